"""What the tests of each family of models ask of llama.cpp and of the CPU."""

from pathlib import Path

import numpy as np

from coldstream.models.cpu_runner import CpuRunner
from gguf import GGMLQuantizationType as Type
from hf_models import VOCAB_SIZE
from tools import llama_cpp

K_TYPES = {"": Type.Q4_K, "ffn_down_exps": Type.Q6_K, "output": Type.Q6_K}


def random_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, VOCAB_SIZE - 2, count)]


def cpu_logits(path: Path, token_ids: list[int], kv_type: str = "f16") -> np.ndarray:
    with CpuRunner.open(path, threads=2, context_length=len(token_ids), kv_type=kv_type) as runner:
        return runner.logits(token_ids)


def assert_chooses_like_llama_cpp(path: Path) -> None:
    """Both round activations of a quantised file, in ways of their own: where the two best logits are as good
    as equal, either may be first."""
    ids = random_ids(800)
    theirs = llama_cpp.logits(path, ids)
    second, first = np.sort(theirs, axis=-1)[:, -2:].T
    is_clear = first - second > 0.1
    assert is_clear.sum() >= 500
    alike = cpu_logits(path, ids).argmax(-1) == theirs.argmax(-1)
    assert alike.mean() > 0.95
    assert alike[is_clear].mean() >= 0.99
