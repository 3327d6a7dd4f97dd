"""Time of choosing tokens on a GPU by settings and rows, beside the greedy choice and an older checkout.

    python -m bench.kernels.gpu_sampling [--old CHECKOUT]

Each figure is the median over replays of a graph of 40 choices that follow each other, the least of all
turns. An older checkout is run in turn, in a process of its own, if its `sample_cuda` has the same arguments.
Logits are normal. Either some stand out, as those of trained models do, or all are nearly the same. A mask
allows every other token.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.device import describe, graph_seconds
from bench.engine.gpu import numbers
from bench.results import ROOT, add_result_options, write_result
from coldstream.kernels.sample.cuda import (
    ROW_BYTES,
    SETTINGS_WORDS,
    are_greedy,
    ranked_words,
    sample_cuda,
    write_rows,
)
from coldstream.kernels.sample.settings import RowSettings, bitmask_of

LAUNCHES = 40
VOCAB = 248320
RECENT = 64  # tokens that penalties are for
CUDA = torch.device("cuda")
PLAIN = RowSettings(0.8, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), seed=1, position=1001)
GREEDY = "greedy"
MASK = bitmask_of(range(0, VOCAB, 2), VOCAB)
TOP = {"top_k": 20, "top_p": 0.95}
FILTERS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "temperature": {},
    "top-k 20, top-p 0.95": TOP,
    "top-k 40, top-p 0.95, min-p 0.05": {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top-k 1000": {"top_k": 1000},
    "top-k 50000, top-p 0.95": {"top_k": 50_000, "top_p": 0.95},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "mask": {"temperature": 0.0, "allowed": MASK},
    "mask, top-k 20, top-p 0.95": TOP | {"allowed": MASK},
    "log-probabilities of 5": {"temperature": 0.0, "logprobs": 5},
    "log-probabilities of 5, top-k 20, top-p 0.95": TOP | {"logprobs": 5},
    "log-probabilities of 1000, top-k 20, top-p 0.95": TOP | {"logprobs": 1000},
    "mask, log-probabilities of 20, top-k 20, top-p 0.95": TOP | {"allowed": MASK, "logprobs": 20},
}
LIKELIEST, AHEAD = 64, 12.0  # how many logits stand out, and by how much
SPREADS = {"trained": 2.5, "flat": 0.02}
MARK = "figures: "


def random_logits(rows: int, kind: str) -> torch.Tensor:
    logits = SPREADS[kind] * torch.randn(rows, VOCAB, device=CUDA)
    if kind == "trained":
        ids = torch.randint(0, VOCAB, (rows, LIKELIEST), device=CUDA)
        logits.scatter_add_(1, ids, torch.linspace(AHEAD, 0, LIKELIEST, device=CUDA).expand(rows, -1))
    return logits


def seconds_of(logits: torch.Tensor, settings: RowSettings) -> float:
    rows = len(logits)
    workspace = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=CUDA)
    chosen = torch.zeros(rows, 2, dtype=torch.int32, device=CUDA)
    unchanged = torch.zeros(rows * RECENT, device=CUDA)
    to, tokens = np.zeros((rows, SETTINGS_WORDS), np.int32), np.zeros(rows * (RECENT + len(MASK)), np.int32)
    each = [replace(settings, seed=row) for row in range(rows)]
    write_rows(each, range(rows), to, tokens)
    inputs = torch.from_numpy(to).cuda(), torch.from_numpy(tokens).cuda()
    ranked = torch.zeros(sum(map(ranked_words, each)), dtype=torch.int32, device=CUDA)

    def choose() -> None:
        memory = (unchanged, workspace, chosen, chosen, ranked)
        sample_cuda(logits, *inputs, *memory, is_greedy=are_greedy(each))

    return graph_seconds([choose] * LAUNCHES)


def measured(row_counts: Sequence[int]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    recent = np.random.default_rng(0).integers(0, VOCAB, RECENT).tolist()
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "recent": recent}
    cases = []
    for rows, kind in product(row_counts, SPREADS):
        logits = random_logits(rows, kind)
        for (name, filters), has_penalties in product(FILTERS.items(), (False, True)):
            settings = replace(PLAIN, **filters, **(penalties if has_penalties else {}))
            case = {"rows": rows, "logits": kind, "settings": name, "penalties": has_penalties}
            cases.append(case | {"us": round(1e6 * seconds_of(logits, settings), 2)})
    return cases


def measured_in(checkout: Path, row_counts: Sequence[int]) -> list[dict[str, Any]]:
    """In a process of its own, whose package is that of a checkout."""
    paths = [str(checkout / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "bench.kernels.gpu_sampling", "--worker"]
    command += ["--rows", ",".join(map(str, row_counts))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix(MARK))
    return found


def least(turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each case's least time over the turns, and by how much it is longer than the greedy choice."""
    cases = [dict(those[0], us=min(each["us"] for each in those)) for those in zip(*turns, strict=True)]
    key = ("rows", "logits", "penalties")
    greedy = {tuple(each[k] for k in key): each["us"] for each in cases if each["settings"] == GREEDY}
    return [
        each | {"over_greedy_us": round(each["us"] - greedy[*(each[k] for k in key)], 2)} for each in cases
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=[1, 2, 8, 32])
    parser.add_argument("--old", type=Path, help="a checkout that is measured in turn")
    parser.add_argument("--turns", type=int, default=2)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "sampling.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(MARK + json.dumps(measured(options.rows)), flush=True)
        return 0
    checkouts = {"new": ROOT} | ({"old": options.old.resolve()} if options.old else {})
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in checkouts}
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            turns[name].append(measured_in(checkout, options.rows))
    result = {
        "command": "python -m bench.kernels.gpu_sampling",
        "machine": describe("cuda"),
        "vocab": VOCAB,
        "turns": options.turns,
        **{name: least(each) for name, each in turns.items()},
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
