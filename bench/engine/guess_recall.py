"""How many of a layer's experts its router names when it sees the input of an earlier layer.

    python -m bench.engine.guess_recall --out docs/results/guess_recall.json
    python -m bench.engine.guess_recall MODEL                            made by full_size_model.py

The bundled model reads source text that comes with Python, another one consecutive tokens, as its text walks
through the vocabulary. Everything is computed by the reference. Of the
uses that are guessed at, those of experts that none of the last tokens used matter most: they are what a
cache of about that size would have to fetch.
"""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from bench.device import describe
from bench.engine.gpu import FIRST_ID
from bench.results import ROOT, write_result
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.ops import RouterWeights
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.sequences import Rows
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

TOKENS = 400
RECENT = 8  # tokens
DISTANCES = (1, 2, 3)


class SeenOps(ReferenceOps):
    """Keeps what each router saw and chose."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, RouterWeights, torch.Tensor]] = []

    def choose_experts(self, x: torch.Tensor, weights: RouterWeights) -> tuple[torch.Tensor, torch.Tensor]:
        ids, topk_weights = super().choose_experts(x, weights)
        self.seen.append((x.clone(), weights, ids.clone()))
        return ids, topk_weights


def chosen(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Whether each expert is among those of a token: bool [tokens, experts]."""
    return torch.zeros(len(ids), num_experts, dtype=torch.bool).scatter_(1, ids.long(), True)


def measure(ops: SeenOps, distance: int, num_experts: int) -> dict[str, float]:
    """Over all layers that are guessed at."""
    right = uses = right_rare = rare = guessed_rare = 0
    for (x, _, _), (_, weights, ids) in zip(ops.seen, ops.seen[distance:], strict=False):
        guess = chosen(ReferenceOps().choose_experts(x, weights)[0], num_experts)
        real = chosen(ids, num_experts)
        recent = torch.zeros_like(real)
        for back in range(1, RECENT + 1):
            recent[back:] |= real[:-back]
        right += int((guess & real).sum())
        uses += int(real.sum())
        right_rare += int((guess & real & ~recent)[RECENT:].sum())
        rare += int((real & ~recent)[RECENT:].sum())
        guessed_rare += int((guess & ~recent)[RECENT:].sum())
    return {
        "layers_ahead": distance,
        "recall": right / uses,
        "recall_of_unused": right_rare / rare,
        "precision_of_unused": right_rare / guessed_rare,
    }


def run(path: Path | None = None) -> dict[str, Any]:
    """path: of a model of full_size_model.py; None for the bundled one."""
    ops = SeenOps()
    with GGUFFile.open(path or demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        model = CausalLM.load(file, spec, ops)
        if path is None:
            ids = Tokenizer.from_metadata(file.metadata).encode(inspect.getsource(argparse))[-TOKENS:]
        else:
            ids = list(range(FIRST_ID, min(FIRST_ID + TOKENS, spec.vocab_size)))
        cache = ModelCache(spec, ops, 1, len(ids), "f32")
        places = torch.arange(len(ids), dtype=torch.int32)
        model.forward(torch.tensor(ids, dtype=torch.int32), Rows(places, torch.zeros_like(places)), cache)
    return {
        "command": " ".join(["python -m bench.engine.guess_recall", *([path.name] if path else [])]),
        "machine": describe("cpu"),
        "tokens": len(ids),
        "recent": RECENT,
        "rows": [measure(ops, distance, spec.num_experts) for distance in DISTANCES],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="instead of the bundled one")
    parser.add_argument("--out", type=Path, help="of the bundled one: docs/results/guess_recall.json")
    options = parser.parse_args()
    kept = None if options.model else ROOT / "docs" / "results" / "guess_recall.json"
    write_result(run(options.model), options.out or kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
