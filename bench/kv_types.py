"""What keys and values in each type of cache cost: perplexity of the demo model on held-out text.

    python bench/kv_types.py --out docs/results/kv_types.json

The text and the windows are those of `tools/train_demo`: standard library files that the model has not seen,
each token predicted with at least half a window before it. Everything but the cache is float32, in the
reference operations on the CPU, so that the types are all that differs. Beside the loss stands its standard
error, as a small one can be luck, and the distance of the logits from those over an f32 cache.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.train_demo.data import SourceFile, load_corpus
from tools.train_demo.held_out import Window, scoring_windows

from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.spec import ModelSpec
from results import write_result

EXACT = "f32"
TYPES = (EXACT, *(name for name in CACHE_LAYOUTS if name != EXACT))
WINDOW = 2048
END_OF_TEXT = "<|endoftext|>"


@dataclass
class Loss:
    """What a type of cache does to the scored tokens, one value a token."""

    nats: list[float] = field(default_factory=list)
    squared_distances: list[float] = field(default_factory=list)  # of centred logits from those over EXACT
    same_top: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> None:
        """Counts rows of logits [T, vocab] that predict `targets` [T]."""
        self.nats += torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none").tolist()
        difference = (logits - exact).double()
        self.squared_distances += difference.var(dim=-1, correction=0).tolist()
        self.same_top += (logits.argmax(-1) == exact.argmax(-1)).double().tolist()

    def figures(self, exact: "Loss") -> dict[str, float]:
        """Perplexity, how much it is above that of `exact`, and how far the logits are from those."""
        more = np.array(self.nats) - np.array(exact.nats)
        return {
            "perplexity": math.exp(np.mean(self.nats)),
            "loss": math.expm1(more.mean()),
            "loss_standard_error": float(more.std() / math.sqrt(len(more))),
            "logit_distance": math.sqrt(np.mean(self.squared_distances)),
            "same_top1": float(np.mean(self.same_top)),
        }


def held_out_stream(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> np.ndarray:
    """The files as token ids, each behind an end-of-text token, as in training."""
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(END_OF_TEXT, parse_special=True)
        ids += tokenizer.encode(file.text)
    return np.array(ids)


def window_logits(model: CausalLM, token_ids: torch.Tensor, kv_type: str) -> torch.Tensor:
    """float32 logits [T, vocab] after each token of a fresh sequence."""
    count = len(token_ids)
    cache = ModelCache(model.spec, model.ops, num_states=1, context_length=count, kv_type=kv_type)
    rows = Rows(torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
    logits: torch.Tensor = model.logits(model.forward(token_ids, rows, cache))
    return logits


@torch.no_grad()
def measure(model: CausalLM, ids: np.ndarray, windows: Sequence[Window]) -> dict[str, Loss]:
    """The losses over the tokens that `windows` score, by type."""
    losses = {kv_type: Loss() for kv_type in TYPES}
    for window in windows:
        inputs, targets = (torch.from_numpy(ids[window.start + i : window.end + i]) for i in (0, 1))
        counted = slice(window.first - window.start - 1, None)
        exact = window_logits(model, inputs, EXACT)[counted]
        for kv_type, loss in losses.items():
            logits = exact if kv_type == EXACT else window_logits(model, inputs, kv_type)[counted]
            loss.add(logits, exact, targets[counted])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=53, help="how many, evenly spaced over the text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with GGUFFile.open(demo_model_path()) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        model = CausalLM.load(file, spec, ReferenceOps())
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = held_out_stream(tokenizer, load_corpus().held_out)
    every = list(scoring_windows(len(ids), WINDOW))
    chosen = np.linspace(0, len(every) - 1, min(options.windows, len(every))).round().astype(int)
    losses = measure(model, ids, [every[i] for i in chosen])
    exact = losses[EXACT]
    result = {
        "command": "python bench/kv_types.py",
        "model": demo_model_path().name,
        "window_tokens": WINDOW,
        "scored_tokens": len(exact.nats),
        "head_dim": spec.head_dim,
        "types": {
            kv_type: {"bits_per_value": 8 * CACHE_LAYOUTS[kv_type].row_bytes(spec.head_dim) / spec.head_dim}
            | loss.figures(exact)
            for kv_type, loss in losses.items()
        },
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
