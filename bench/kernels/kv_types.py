"""The accuracy of each type of cached keys and values: perplexity of the demo model on held-out text.

    python -m bench.kernels.kv_types --out docs/results/kv_types.json

The text and the windows are those of `tools/train_demo`: standard library files that the model has not seen,
each token predicted with at least half a window before it. The CPU's own attention runs over each type; all
weights and whatever else there is are float32, so that the types are all that differs. Beside the loss stands
its standard error, as a small one can be luck, and the distance of the logits from those over an f32 cache.

Then single heads of random data, plain and with outlier channels in keys and values: the RMS error of the
exact definition's output over its RMS size, against float64.
"""

import argparse
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import gguf
from bench.float_twin import read_tensors, write_file
from bench.kernels.attention_heads import HEAD_DIMS, OUTLIERS, float_attend, random_head, relative_error
from bench.results import write_result
from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.exact import attend, heads_of
from coldstream.models.cpu.runner import CpuRunner
from tools.train_demo.data import SourceFile, load_corpus
from tools.train_demo.held_out import Window, scoring_windows

EXACT = "f32"
TYPES = (EXACT, "f16", "i16", "i8", "i4", "i3")
WINDOW = 2048
SEEDS = range(8)  # of single heads
END_OF_TEXT = "<|endoftext|>"


@dataclass
class Loss:
    """The effect of a type of cache on the scored tokens, one value per token."""

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


@contextmanager
def float_runners(threads: int) -> Iterator[dict[str, CpuRunner]]:
    """By type of cache, the demo model with all its weights as float32."""
    reader = gguf.GGUFReader(demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_file(path, reader, read_tensors(reader))
        yield {
            kv_type: open_cpu_runner(path, threads=threads, context_length=WINDOW, kv_type=kv_type)
            for kv_type in TYPES
        }


def measure(runners: Mapping[str, CpuRunner], ids: np.ndarray, windows: Sequence[Window]) -> dict[str, Loss]:
    """The losses over the tokens that `windows` score, by type."""
    losses = {kv_type: Loss() for kv_type in runners}
    for window in windows:
        targets = torch.from_numpy(ids[window.start + 1 : window.end + 1])
        counted = slice(window.first - window.start - 1, None)
        inputs = ids[window.start : window.end].tolist()
        exact = torch.from_numpy(runners[EXACT].logits(inputs))[counted]
        for kv_type, loss in losses.items():
            logits = exact if kv_type == EXACT else torch.from_numpy(runners[kv_type].logits(inputs))[counted]
            loss.add(logits, exact, targets[counted])
    return losses


def head_error(kv_type: str, head_dim: int, outlier: float, seeds: Iterable[int]) -> float:
    """The relative error of single heads over a type, the RMS over seeds."""
    cache_type = CACHE_TYPES[kv_type]
    errors = []
    for seed in seeds:
        head = random_head(head_dim, outlier, seed)
        query = cache_type.rotate_query(head.query.squeeze(1) * head_dim**-0.5)
        # All rows see the same positions, so that they are heads of one row.
        heads = heads_of(cache_type, query, cache_type.encode(head.key), cache_type.encode(head.value))
        output = cache_type.rotate_back(attend(heads)).unsqueeze(1)
        errors.append(relative_error(output, float_attend(*head, head.positions)))
    return math.sqrt(np.mean(np.square(errors)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=16, help="how many, evenly spaced over the text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with GGUFFile.open(demo_model_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = held_out_stream(tokenizer, load_corpus().held_out)
    every = list(scoring_windows(len(ids), WINDOW))
    chosen = np.linspace(0, len(every) - 1, min(options.windows, len(every))).round().astype(int)
    with float_runners(options.threads) as runners:
        losses = measure(runners, ids, [every[i] for i in chosen])
        head_dim = runners[EXACT].spec.kv_heads[0][1]
    exact = losses[EXACT]
    result = {
        "command": "python -m bench.kernels.kv_types",
        "model": demo_model_path().name,
        "window_tokens": WINDOW,
        "scored_tokens": len(exact.nats),
        "head_dim": head_dim,
        "types": {
            kv_type: {"bits_per_value": 8 * CACHE_LAYOUTS[kv_type].row_bytes(head_dim) / head_dim}
            | loss.figures(exact)
            for kv_type, loss in losses.items()
        },
        "seeds": len(SEEDS),
        "heads": [
            {"head_dim": head_dim, "outliers": outlier}
            | {"error": {kv_type: head_error(kv_type, head_dim, outlier, SEEDS) for kv_type in TYPES}}
            for head_dim in HEAD_DIMS
            for outlier in OUTLIERS
        ],
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
