"""Logits and greedy text of the demo model beside llama.cpp's, through the `xllamacpp` module (test extra).

    python bench/agreement.py --out docs/results/agreement.json

Top-1 agreement is counted over the start of Python's own `argparse.py`. Greedy texts are compared token by
token; the first difference counts as a near-tie when llama.cpp's own logits there put our token within
NEAR_TIE of its choice: both quantise activations, with different rounding, so the last bits of a logit
differ.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.cpu_runner import CpuRunner
from results import write_result
from tools import llama_cpp as oracle

NEAR_TIE = 0.25
POSITIONS = 1024
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
    runner = CpuRunner.open(model, threads=threads, context_length=2048)
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
        "command": "python bench/agreement.py",
        "positions": len(ids),
        "top1_agreement": top1_agreement(model, ids, runner),
        "num_prompts": len(PROMPTS),
        "tokens_per_prompt": tokens,
        "equal_prompts": gaps.count(None),
        "near_tie_prompts": sum(gap <= NEAR_TIE for gap in differing),
        "largest_gap": max(differing, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.threads, options.tokens)
    write_result(result, options.out)


if __name__ == "__main__":
    main()
