"""ModelRunner: whole models through the C++ graph, held to the exact PyTorch definition and to themselves."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import Dims, write_gguf
from coldstream.errors import InvalidRequestError, ModelChangedError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.qwen35 import Qwen35Model
from coldstream.models.runner import CHUNK, ModelRunner
from coldstream.models.spec import ModelSpec

MIX = {
    "*_exps.weight": "Q4_K",
    "*.ffn_down_exps.weight": "Q6_K",
    "*.attn_qkv.weight": "Q5_K",
    "token_embd.weight": "Q4_0",
}
VARIANTS = {
    "moe": ("qwen35moe", {"types": MIX}),
    "moe-nextn-fused": (
        "qwen35moe",
        {"nextn": True, "fused_experts": True, "fused_attention": True, "quant": "Q4_K"},
    ),
    "small-tensors-quantised": (
        "qwen35moe",
        {
            "types": {
                "*.ffn_gate_inp.weight": "Q8_0",
                "*.ssm_alpha.weight": "Q4_K",
                "*.ssm_beta.weight": "F16",
            }
        },
    ),
    "dense-tied": ("qwen35", {"tied": True, "quant": "Q5_0"}),
    "float": ("qwen35moe", {"quant": "BF16", "types": {"*_exps.weight": "IQ4_XS"}}),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, options = VARIANTS[request.param]
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, arch, **options)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    write_gguf(path, types=MIX)
    return path


def token_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, 256, count)]


def reference_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """What docs/arithmetic.md and the reference operations say."""
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        ops = ReferenceOps(exact=True)
        model = Qwen35Model.load(file, spec, ops)
    cache = ModelCache(spec, ops, num_slots=1, context_length=len(ids), kv_dtype="float32")
    rows = Rows(torch.arange(len(ids), dtype=torch.int32), torch.zeros(len(ids), dtype=torch.int32))
    return model.logits(model.forward(torch.tensor(ids, dtype=torch.int32), rows, cache))


def test_the_graph_computes_what_the_reference_defines(model_path: Path) -> None:
    ids = token_ids(7)
    with ModelRunner.open(model_path, threads=2, context_length=64, kv_dtype="float32") as runner:
        assert np.array_equal(runner.logits(ids), reference_logits(model_path, ids).numpy())


@pytest.mark.parametrize("tier", _csrc.supported_tiers())
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_do_not_depend_on_tier_threads_or_chunks(moe_path: Path, tier: str, threads: int) -> None:
    ids = token_ids(CHUNK + 9)
    with ModelRunner.open(moe_path, threads=2, tier="generic", context_length=len(ids)) as runner:
        expected = runner.prefill(ids)
    with ModelRunner.open(moe_path, threads=threads, tier=tier, context_length=len(ids)) as runner:
        assert np.array_equal(runner.prefill(ids), expected)
        runner.reset()
        start = 0
        for size in (1, 2, 15, 16, 17, 64, len(ids)):
            logits = runner.prefill(ids[start : start + size])
            start += size
        assert np.array_equal(logits, expected)


def test_decoding_equals_prefill_bit_for_bit(model_path: Path) -> None:
    ids = token_ids(70)
    with ModelRunner.open(model_path, threads=2, context_length=128) as runner:
        together = runner.logits(ids)
        runner.reset()
        alone = np.stack([runner.decode(token) for token in ids])
    assert np.array_equal(together, alone)


def test_twenty_requests_in_one_process_answer_like_the_first(moe_path: Path) -> None:
    with ModelRunner.open(moe_path, threads=2, context_length=128) as runner:
        expected = runner.prefill(token_ids(33))
        for other in range(1, 21):
            runner.reset()
            runner.prefill(token_ids(other))
            runner.reset()
            assert np.array_equal(runner.prefill(token_ids(33)), expected)


def test_what_cannot_be_computed_is_refused_and_changes_nothing(moe_path: Path) -> None:
    with ModelRunner.open(moe_path, threads=1, context_length=16) as runner:
        runner.prefill(token_ids(8))
        for bad in ([], token_ids(9), [-1], [runner.spec.vocab_size]):
            with pytest.raises(InvalidRequestError):
                runner.prefill(bad)
        assert runner.position == 8
        after = runner.decode(5)
        runner.reset()
        assert np.array_equal(runner.prefill([*token_ids(8), 5]), after)


def test_fl01_a_file_that_shrinks_is_an_error_and_the_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "shrinking.gguf"
    write_gguf(path, types=MIX)
    with ModelRunner.open(path, threads=2, context_length=16) as runner:
        runner.prefill(token_ids(4))
        os.truncate(path, 4096)
        with pytest.raises(ModelChangedError, match=r"shrinking\.gguf"):
            runner.prefill(token_ids(4))
        assert runner.position == 0


def test_an_unknown_tier_is_refused_by_name(moe_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sse9"):
        ModelRunner.open(moe_path, threads=1, tier="sse9", context_length=16)


def test_activations_share_memory_between_layers(tmp_path: Path) -> None:
    sizes = []
    for layers in (4, 12):
        path = tmp_path / f"{layers}.gguf"
        write_gguf(path, dims=Dims(layers=layers))
        with ModelRunner.open(path, threads=1, context_length=16) as runner:
            sizes.append(runner.activation_bytes)
    assert sizes[0] == sizes[1]
