"""Logits and greedy text of the demo model beside llama.cpp's, through the `xllamacpp` module (test extra).

    python -m bench.peers.agreement --out docs/results/agreement.json
    python -m bench.peers.agreement --arch qwen3moe --out docs/results/agreement_qwen3moe.json

Top-1 agreement is counted over the start of Python's own `argparse.py`. Greedy texts are compared token by
token; the first difference counts as a near-tie when llama.cpp's own logits there put our token within
NEAR_TIE of its choice: both quantise activations, with different rounding, so the last bits of a logit
differ.

With --arch, logits of the tests' small model of that architecture, with random weights in the types of
published files, over random tokens. Two best logits of random weights are often as good as equal, so that
choices are counted over all positions and over those where llama.cpp's two best are further apart than
CLEAR_GAP. What a difference amounts to is seen by two other comparisons: llama.cpp with other settings of its
own, and both programs with the same weights as float32, where no activation is rounded.
"""

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models" / "architectures"))

import gguf
from bench.float_twin import read_tensors, write_file
from bench.results import write_result
from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.read_spec import read_spec
from tools import llama_cpp as oracle

NEAR_TIE = 0.25
CLEAR_GAP = 0.1  # between the two best logits
POSITIONS = 1024
ARCHITECTURES = ("qwen3moe", "qwen3next")
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "def read_lines(path):\n    with open(path) as f:\n",
    "for i in range(10):\n",
    "class TestCase(unittest.TestCase):\n    def test_",
    "try:\n    import ",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(",
    '"""Utilities for ',
    "    def __repr__(self):\n        return ",
)


def top1_agreement(model: Path, ids: list[int], runner: CpuRunner) -> float:
    """Share of positions where both sides' most likely next token is the same."""
    ours = runner.logits(ids).argmax(axis=1)
    return float((ours == oracle.logits(model, ids).argmax(axis=1)).mean())


def greedy(runner: CpuRunner, ids: list[int], count: int) -> list[int]:
    """The `count` most likely tokens after `ids`, one at a time."""
    sequence = runner.new_sequence()
    tokens = [int(runner.extend(sequence, ids).argmax())]
    while len(tokens) < count:
        tokens.append(int(runner.extend(sequence, tokens[-1:]).argmax()))
    runner.release(sequence)
    return tokens


def first_gap(model: Path, prompt: list[int], ours: list[int], theirs: list[int]) -> float | None:
    """By how much llama.cpp prefers its token where the texts first differ; None if they are equal."""
    different = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    if not different:
        return None
    at = different[0]
    logits: np.ndarray = oracle.logits(model, prompt + theirs[:at])[-1]
    return float(logits[theirs[at]] - logits[ours[at]])


def measure(model: Path, threads: int, tokens: int) -> dict[str, object]:
    """All figures; see the module docstring."""
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    runner = open_cpu_runner(model, threads=threads, context_length=2048)
    module: ModuleType = argparse
    ids = tokenizer.encode(Path(str(module.__file__)).read_text())[:POSITIONS]
    gaps = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text)
        gaps.append(
            first_gap(model, prompt, greedy(runner, prompt, tokens), oracle.greedy(model, prompt, tokens))
        )
    differing = [gap for gap in gaps if gap is not None]
    return {
        "model": model.name,
        "command": "python -m bench.peers.agreement",
        "positions": len(ids),
        "top1_agreement": top1_agreement(model, ids, runner),
        "num_prompts": len(PROMPTS),
        "tokens_per_prompt": tokens,
        "equal_prompts": gaps.count(None),
        "near_tie_prompts": sum(gap <= NEAR_TIE for gap in differing),
        "largest_gap": max(differing, default=0.0),
    }


def write_models(arch: str, folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """A quantised file, the same values as float32, and the types of the former by kind of tensor."""
    from family_cases import K_TYPES

    from convert_hf import Variant, convert  # transformers takes seconds to import
    from hf_models import tiny_qwen3moe, tiny_qwen3next

    model = tiny_qwen3moe() if arch == "qwen3moe" else tiny_qwen3next(2)
    path, floats = convert(model, folder / "quantised.gguf", Variant(K_TYPES)), folder / "floats.gguf"
    reader = gguf.GGUFReader(path)
    write_file(floats, reader, read_tensors(reader))
    return path, floats, {kind or "others": quant_type.name for kind, quant_type in K_TYPES.items()}


def logits_token_by_token(path: Path, ids: list[int]) -> np.ndarray:
    """llama.cpp's, one token a step."""
    with oracle.open_session(path, len(ids)) as session:
        return np.concatenate([session.feed([token]) for token in ids])


def compared(
    names: tuple[str, str], first: np.ndarray, second: np.ndarray, is_clear: np.ndarray
) -> dict[str, object]:
    """Two arrays of logits [positions, vocab]; `is_clear` [positions] says where the choice is."""
    is_same = first.argmax(axis=-1) == second.argmax(axis=-1)
    distances = (first.astype(np.float64) - second).var(axis=-1)
    return {
        "of": names[0],
        "and": names[1],
        "top1_agreement": float(is_same.mean()),
        "clear_top1_agreement": float(is_same[is_clear].mean()),
        "logit_distance": float(np.sqrt(distances.mean())),
    }


def measure_architecture(arch: str) -> dict[str, object]:
    """Figures of a small random model; see the module docstring. The first row of `rows` is the agreement."""
    from family_cases import cpu_logits

    with tempfile.TemporaryDirectory() as folder:
        path, floats, types = write_models(arch, Path(folder))
        with GGUFFile.open(path) as file:
            vocab_size = read_spec(file.metadata, file.tensors).vocab_size
        ids = np.random.default_rng(0).integers(0, vocab_size, POSITIONS).tolist()
        ours, ours_f32 = cpu_logits(path, ids, "i16"), cpu_logits(path, ids, "f32")
        unrounded = cpu_logits(floats, ids, "f32")
        theirs = oracle.logits(path, ids)
        theirs_by_token = logits_token_by_token(path, ids)
        theirs_by_default = oracle.logits(path, ids, float32_attention=False)
    second, first = np.sort(theirs, axis=-1)[:, -2:].T
    is_clear = first - second > CLEAR_GAP
    llama, plain = "llama.cpp", "float32 weights"
    pairs = [
        (("coldstream", llama), ours, theirs),
        (("coldstream, f32 cache", llama), ours_f32, theirs),
        (("llama.cpp, a token a step", llama), theirs_by_token, theirs),
        (("llama.cpp, flash attention and f16 cache", llama), theirs_by_default, theirs),
        (("coldstream", plain), ours, unrounded),
        ((llama, plain), theirs, unrounded),
    ]
    return {
        "command": f"python -m bench.peers.agreement --arch {arch}",
        "arch": arch,
        "types": types,
        "cache_type": "i16",
        "xllamacpp": version("xllamacpp"),
        "positions": len(ids),
        "clear_gap": CLEAR_GAP,
        "clear_positions": int(is_clear.sum()),
        "median_gap": float(np.median(first - second)),
        "rows": [compared(*pair, is_clear) for pair in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--arch", choices=ARCHITECTURES, help="a small random model in place of MODEL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.arch:
        result = measure_architecture(options.arch)
    else:
        result = measure(options.model, options.threads, options.tokens)
    write_result(result, options.out)


if __name__ == "__main__":
    main()
