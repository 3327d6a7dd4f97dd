"""Speed of a model on a GPU by the memory it may take there, beside llama.cpp with as much.

    python -m bench.family_models gpt-oss-20b oss.gguf
    python -m bench.peers.gpu_budgets oss.gguf --llama FOLDER --vram all,24G,12G --out RESULT.json

Both compute the same prompts and decode behind them, as desktop.py asks them to, on all CPUs of this process.
With `all` nothing is on the CPU. For another budget llama.cpp has the experts of so many layers on the CPU
that what it takes of the GPU's memory fits: it is loaded, what it takes is read, and it is loaded again with
another number where that is wrong. The result is written after each side of each budget.
"""

import argparse
import json
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.device import describe
from bench.engine.desktop import OURS, THEIRS, received, side
from bench.engine.desktop_workers import Asked, PeerAsked, Row, ours, theirs
from bench.engine.gpu import numbers
from bench.engine.plan_forecast import Work
from bench.results import write_result
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.planning.config import parse_size

ALL = "all"
ROOM_BYTES = 3 << 29  # of llama.cpp, for all but weights, before it is measured
MOST_LOADS = 4  # of one budget


@dataclass(frozen=True)
class Weights:
    """Bytes of a file by what they are of."""

    expert_layer: int  # routed experts of the largest layer
    others: int
    layers: int
    name: str

    @classmethod
    def of(cls, path: Path) -> "Weights":
        with GGUFFile.open(path) as file:
            num_layers = read_spec(file.metadata, file.tensors).num_layers
            by_layer = [0] * num_layers
            others = 0
            for name, tensor in file.tensors.items():
                if "_exps." in name:
                    by_layer[int(name.split(".")[1])] += tensor.num_bytes
                elif not name.startswith(("token_embd", "per_layer")):  # which stay in RAM
                    others += tensor.num_bytes
            return cls(max(by_layer), others, num_layers, str(file.metadata["general.name"]))

    def cpu_layers(self, budget: int) -> int:
        """As many as should fit, before anything is loaded."""
        excess = self.others + self.layers * self.expert_layer + ROOM_BYTES - budget
        return min(self.layers, max(0, math.ceil(excess / self.expert_layer)))


def our_row(options: argparse.Namespace, budget: int | None) -> Row:
    """Our side."""
    asked = Asked(options.model, (0.0,), {0.0: budget or "auto"}, options.work, options.device)
    with side(ours, asked, options.cpus, {}) as connection:
        row: Row = received(connection)
    return row


def their_row(options: argparse.Namespace, cpu_layers: int) -> Row:
    """llama.cpp's, with the experts of so many layers on the CPU."""
    asked = PeerAsked(
        options.model, options.llama, cpu_layers, options.work.prompts, options.generate, options.device
    )
    with side(theirs, asked, options.cpus, {}) as connection:
        about = received(connection)
        connection.send(options.cpus)
        row: Row = received(connection) | {"llama_cpp": about}
        connection.send(None)
    return row


def fitting_row(options: argparse.Namespace, weights: Weights, budget: int | None) -> Row:
    """llama.cpp's with the fewest layers' experts on the CPU whose memory fits.

    Raises RuntimeError if no number that was tried fits.
    """
    if budget is None:
        return their_row(options, 0)
    tried: dict[int, Row] = {}
    number = weights.cpu_layers(budget)
    while number not in tried and len(tried) < MOST_LOADS:
        tried[number] = row = their_row(options, number)
        left = (budget - row["vram_bytes"]) / weights.expert_layer
        number = min(weights.layers, max(0, number - math.floor(left)))
    fitting = {number: row for number, row in tried.items() if row["vram_bytes"] <= budget}
    if not fitting:
        raise RuntimeError(f"llama.cpp took more than {budget} bytes with {sorted(tried)} layers on the CPU")
    return fitting[min(fitting)] | {"tried_cpu_layers": sorted(tried)}


def table(rows: list[Row]) -> str:
    """For people: both sides by budget, and ours over theirs."""
    lines = []
    by_budget: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_budget.setdefault(row["budget"], {})[row["side"]] = row
    for budget, both in by_budget.items():
        for name in both[OURS]["figures"]:
            rates = {side: row["figures"][name]["tok_s"] for side, row in both.items()}
            ratio = f"{rates[OURS] / rates[THEIRS]:.2f}" if THEIRS in rates else ""
            lines.append(f"{budget:>5} {name:>8} {rates[OURS]:10.1f} {rates.get(THEIRS, 0):10.1f} {ratio:>6}")
    return "\n".join((f"{'vram':>5} {'test':>8} {'ours':>10} {'llama.cpp':>10} {'ratio':>6}", *lines))


def run(options: argparse.Namespace) -> list[Row]:
    """Everything; see the module docstring."""
    weights = Weights.of(options.model)
    about: dict[str, Any] = {
        "command": command(options),
        "model": weights.name,
        "file_bytes": options.model.stat().st_size,
        "machine": describe(options.device),
        "cpus": len(options.cpus),
        "work": vars(options.work),
        "generate": options.generate,
    }
    rows: list[Row] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for text in options.vram:
        budget = None if text == ALL else parse_size(text)
        for name in (OURS, THEIRS):
            if any((row["budget"], row["side"]) == (text, name) for row in rows):
                continue
            row = our_row(options, budget) if name == OURS else fitting_row(options, weights, budget)
            rows.append({"budget": text, "side": name, **row})
            write_result(about | {"rows": rows}, options.out, options.commit)
            print(table(rows) if name == THEIRS else f"{text}: ours measured", flush=True)
    return rows


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.peers.gpu_budgets", options.model.name, "--llama", options.llama.name]
    words += ["--vram", ",".join(options.vram), "--prompts", ",".join(map(str, options.work.prompts))]
    words += ["--timed-tokens", str(options.work.timed_tokens), "--generate", str(options.generate)]
    return shlex.join(words)


def budgets(text: str) -> list[str]:
    """Sizes, or `all`. Raises ValueError for another word."""
    words = text.split(",")
    for word in words:
        if word != ALL:
            parse_size(word)
    return words


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="a folder of shared libraries, or one")
    parser.add_argument("--vram", type=budgets, default=[ALL], help="budgets of GPU memory, or all")
    parser.add_argument("--out", type=Path, required=True, help="rows that it has are not measured again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without a budget")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens")
    parser.add_argument("--warm-tokens", type=int, default=320, help="of a text, before it is timed")
    parser.add_argument("--timed-tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--generate", type=int, default=128, help="by llama.cpp")
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    return parser


def main() -> int:
    options = arguments().parse_args()
    options.work = Work(tuple(options.prompts), options.warm_tokens, options.timed_tokens, options.texts)
    options.cpus = sorted(os.sched_getaffinity(0))
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
