"""Decoding from wrong rates, and beside another program, with shares that move and with fixed ones.

    python -m bench.engine.wrong_rates full.gguf --out docs/results/gpu/wrong_rates.json
    python -m bench.report               writes docs/performance.md and docs/wrong_rates.svg

The model file is written first if it isn't there (21 GB). For each budget of GPU memory the model is opened
once. All cases decode the same text, which is decoded once before. Missing experts are divided between the
CPU and the bus by fixed shares of the bus, by the plan's times, and by times that are ten times too long or
too short. Then shares move from each of these. So do they while child processes take half of the cores.

The best fixed share is the fastest one of a sweep. It is run again behind the others, and the better time
counts. Rates are those of the tokens behind the first SETTLED ones. All cases must give the same tokens.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from bench.device import describe
from bench.engine.gpu import FIRST_ID, write_model
from bench.engine.gpu_hybrid import budget_with
from bench.full_size_model import FULL_SHAPE
from bench.results import add_result_options, write_result
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM, EngineConfig, open_model
from coldstream.engine.opened_model import OwnParts
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.controls import Controls, Moves
from coldstream.placement.hardware import Hardware
from coldstream.planning.config import parse_size
from coldstream.planning.machine import measured_hardware

SETTLED: Final = 96  # tokens, after which rates count
WINDOW: Final = 16  # tokens
PROMPT: Final = 64  # tokens
WRONG: Final = 10.0
COARSE: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the bus
FINE: Final = 0.125  # beside the best of them
FOREIGN: Final = """
import sys, numpy
first, second = numpy.ones((2, 1 << 23))
print("ready", flush=True)
sys.stdin.readline()
while True:
    numpy.add(first, second, out=second)
"""


@dataclass(frozen=True)
class Case:
    """How missing experts are divided.

    share: of the bus, whatever times say; None: by the plan's times, of which the CPU's and the bus's are
    multiplied by `cpu` and `bus`. moves: whether that is where moving shares begin. with_threads: whether
    the number of the CPU's threads moves as well.
    """

    cpu: float = 1.0
    bus: float = 1.0
    share: float | None = None
    moves: bool = False
    with_threads: bool = True

    @property
    def controls(self) -> Controls:
        if not self.moves:
            return Controls()
        return Controls(Moves.ALWAYS, Moves.ALWAYS if self.with_threads else Moves.NEVER)

    @property
    def name(self) -> str:
        if self.share is not None:
            return f"bus {self.share:.1%}"
        wrong = [f"{what} x{factor:g}" for what, factor in (("CPU", self.cpu), ("bus", self.bus))]
        return ", ".join(each for each in wrong if not each.endswith(" x1")) or "as planned"

    def times(self, planned: MissTimes) -> MissTimes:
        if self.share is not None:
            bus, cpu = round(1e6 * (1 - self.share)), round(1e6 * self.share)
            return MissTimes(max(1, bus), (max(1, cpu),) * MAX_MAILBOX_ROWS)
        return replace(
            planned,
            cpu=tuple(max(1, round(self.cpu * each)) for each in planned.cpu),
            bus=max(1, round(self.bus * planned.bus)),
            row_bus=max(1, round(self.bus * (planned.row_bus or planned.bus))),
        )


BEGINNINGS: Final = (
    Case(),
    Case(cpu=WRONG),
    Case(cpu=1 / WRONG),
    Case(bus=WRONG),
    Case(bus=1 / WRONG),
)


@dataclass(frozen=True)
class Lengths:
    """tokens: of the text. short: of it, where shares need none to settle. settled, window: see SETTLED and
    WINDOW. The others are seconds: before another program, beside it, and after it.
    """

    tokens: int = 256
    short: int = 144
    settled: int = SETTLED
    window: int = WINDOW
    quiet_s: float = 2.0
    load_s: float = 8.0
    after_s: float = 3.0


class Machine:
    """A model that is open on a GPU. Its experts are divided as a `Case` says.

    A window of tokens has `at`: when it ended, in seconds; `tok_s`; `by_bus`: of 1, 2, … missing experts
    those of the bus at its end; `factors`: what was learnt of the CPU's and the bus's times, None where
    nothing moves; and `threads` of the CPU.
    """

    def __init__(self, llm: LLM, lengths: Lengths, expected: tuple[int, ...] = ()) -> None:
        """expected: the text's tokens, if they are known. Raises RuntimeError if the GPU reads no experts
        over the bus.
        """
        self.llm, self.lengths, self.tokens = llm, lengths, expected
        times = llm.opened.plan.miss_times
        if times is None:
            raise RuntimeError("all experts are on the GPU, or the bus reads none: choose a smaller --vram")
        self._planned: MissTimes = times
        self._fixed = times
        self._runner: Any = llm.opened.runner

    @property
    def planned_by_bus(self) -> tuple[int, ...]:
        """Of 1, 2, … missing experts, by the plan."""
        return self._by_bus(self._planned)

    def _by_bus(self, times: MissTimes) -> tuple[int, ...]:
        return times.by_misses(self._runner.spec.num_experts_per_tok)[1:]

    def divide(self, case: Case) -> None:
        """From the next text on."""
        self._fixed = case.times(self._planned)
        self._runner.control(case.controls)
        self._runner._partial.set_times(self._fixed)

    def text(self, begun: float, count: int) -> Iterator[dict[str, Any]]:
        """Decodes `count` tokens of the text, window by window; `at` counts from `begun` on. Raises
        RuntimeError if they are others than before.
        """
        self.llm.forget()
        length, vocab_size = self.lengths.window, self._runner.spec.vocab_size
        prompt = [(FIRST_ID + i) % vocab_size for i in range(PROMPT)]
        greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count + 1)
        tokens: list[int] = []
        begin = 0.0
        for piece in self.llm.stream(prompt, greedy):
            for token in piece.token_ids:
                tokens.append(token)
                if len(tokens) % length != 1:
                    continue
                now = time.perf_counter()
                if len(tokens) > 1:  # the first one is the prompt's
                    yield {"at": now - begun, "tok_s": length / (now - begin), **self._shares()}
                begin = now
        if any(one != other for one, other in zip(tokens, self.tokens, strict=False)):
            raise RuntimeError("the text depends on the division of missing experts")
        self.tokens = max(self.tokens, tuple(tokens), key=len)

    def _shares(self) -> dict[str, Any]:
        now = self._runner._partial.shares
        if now is None:
            return {"by_bus": self._by_bus(self._fixed), "factors": None, "threads": self._runner.threads - 1}
        factors = (now.cpu_factor, now.bus_factor)
        return {"by_bus": now.by_bus, "factors": factors, "threads": now.threads}

    def measure(self, case: Case, count: int | None = None) -> dict[str, Any]:
        """The text, or the first `count` tokens of it."""
        self.divide(case)
        windows = list(self.text(time.perf_counter(), count or self.lengths.tokens))
        settled = windows[-(-self.lengths.settled // self.lengths.window) :]
        return {**described(case), "tok_s": mean_rate(settled), "windows": windows}

    def swept(self, count: int | None = None) -> list[dict[str, Any]]:
        """Figures of fixed shares, the last two beside the best of the others. count: see `measure`."""
        found = [self.measure(Case(share=share), count) for share in COARSE]
        best = fastest(found)["share"]
        near = (best - FINE, best + FINE)
        return found + [self.measure(Case(share=share), count) for share in near if 0 <= share <= 1]

    def beside(self, case: Case, foreign: "Foreign") -> dict[str, Any]:
        """Texts one after the other, in the middle of which another program is at work."""
        self.divide(case)
        lengths, begun = self.lengths, time.perf_counter()
        load_end = lengths.quiet_s + lengths.load_s
        windows: list[dict[str, Any]] = []
        while foreign.ended_at is None or windows[-1]["at"] < load_end + lengths.after_s:
            for window in self.text(begun, lengths.tokens):
                windows.append(window)
                if foreign.begun_at is None and window["at"] >= lengths.quiet_s:
                    foreign.begin(window["at"])
                elif foreign.ended_at is None and window["at"] >= load_end:
                    foreign.end(window["at"])
        return {**described(case), "load_s": [foreign.begun_at, foreign.ended_at], "windows": windows}


class Foreign:
    """Another program: processes that add in memory without pause, from `begin` to `end`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", FOREIGN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]
        for each in self._processes:
            assert each.stdout is not None
            each.stdout.readline()

    def begin(self, now: float = 0.0) -> None:
        self.begun_at = now
        for each in self._processes:
            assert each.stdin is not None
            print("begin", file=each.stdin, flush=True)

    def end(self, now: float = 0.0) -> None:
        self.ended_at = now
        for each in self._processes:
            each.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._processes:
            each.kill()
            each.communicate()


def described(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "moves": case.moves,
        "moves_threads": case.controls.threads is Moves.ALWAYS,
        "share": case.share,
    }


def mean_rate(windows: Sequence[dict[str, Any]]) -> float:
    """Tokens a second of windows of the same length."""
    return 1 / statistics.fmean(1 / each["tok_s"] for each in windows)


def fastest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(found, key=lambda each: float(each["tok_s"]))


def wrong_rates(machine: Machine) -> dict[str, Any]:
    """All cases of an idle machine. best: of fixed shares, with the better of its two rates."""
    machine.measure(Case())  # the working set comes in
    fixed = [machine.measure(Case()), *machine.swept()]
    best = fastest(fixed)
    wrong = [machine.measure(case, machine.lengths.short) for case in BEGINNINGS[1:]]
    moving = [machine.measure(replace(case, moves=True)) for case in BEGINNINGS]
    again = machine.measure(Case(share=best["share"]))
    return {
        "fixed": [*fixed, *wrong, again],
        "moving": moving,
        "best": {"case": best["case"], "tok_s": fastest([best, again])["tok_s"]},
    }


def foreign_load(machine: Machine, count: int) -> dict[str, Any]:
    """A foreign load in the middle of all that moves, of shares that move, and of what was planned; and fixed
    shares beside it all the time.
    """
    runs = []
    for case in (Case(moves=True), Case(moves=True, with_threads=False), Case()):
        with Foreign(count) as foreign:
            runs.append(machine.beside(case, foreign))
    with Foreign(count) as foreign:
        foreign.begin()
        fixed = machine.swept(machine.lengths.short)
    best = fastest(fixed)
    return {
        "processes": count,
        "runs": runs,
        "fixed": fixed,
        "best": {"case": best["case"], "tok_s": best["tok_s"]},
    }


def ctx_size(lengths: Lengths) -> int:
    return PROMPT + lengths.tokens + 2


def opened(path: Path, vram: int, lengths: Lengths) -> LLM:
    """The model, whose missing experts are divided as planned. For one text at a time."""
    size, own = ctx_size(lengths), OwnParts(controls=Controls())
    config = EngineConfig(str(path), device="cuda", vram=vram, ctx_size=size, parallel=1, spec_type="none")
    return LLM.from_opened(open_model(config, own=own))


def measure(
    path: Path, budgets: Sequence[int | None], lengths: Lengths, hardware: Hardware
) -> list[dict[str, Any]]:
    """A row for each budget in bytes; None: the least in which the model runs. The load is of the first."""
    rows: list[dict[str, Any]] = []
    tokens: tuple[int, ...] = ()
    for budget in budgets:
        vram = budget or budget_with(path, hardware, ctx_size(lengths), 1, 0, step=2**20)
        with opened(path, vram, lengths) as llm:
            machine, run = Machine(llm, lengths, tokens), llm.opened.plan
            row = {
                "vram_bytes": vram,
                "is_least": budget is None,
                "resident_experts": run.placement.num_resident,
                "experts": run.placement.num_all,
                "threads": run.threads,
                "prefetch": run.prefetch,
                "planned_by_bus": machine.planned_by_bus,
                **wrong_rates(machine),
            }
            if not rows:
                row["load"] = foreign_load(machine, max(1, hardware.num_physical_cores // 2))
            tokens = machine.tokens
        rows.append(row)
        print(summary(row), file=sys.stderr, flush=True)
    return rows


def summary(row: dict[str, Any]) -> str:
    """Of a row, for people."""
    lines = [f"{row['vram_bytes'] / 2**30:.2f} GiB, {row['resident_experts']} of {row['experts']} experts"]
    for each in (*row["fixed"], *row["moving"]):
        lines.append(f"{each['case']:>12} {'moves' if each['moves'] else 'fixed'} {each['tok_s']:8.1f} tok/s")
    return "\n".join(lines)


def budget_of(text: str) -> int | None:
    return None if text == "least" else parse_size(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", nargs="+", default=["3G", "least"], help="budgets, or least")
    parser.add_argument("--tokens", type=int, default=Lengths.tokens)
    parser.add_argument("--load-s", type=float, default=Lengths.load_s, help="of the other program")
    add_result_options(parser)
    options = parser.parse_args()
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    begin = time.perf_counter()
    lengths = Lengths(tokens=options.tokens, load_s=options.load_s)
    hardware = measured_hardware(find_gpu())
    rows = measure(options.model, [budget_of(text) for text in options.vram], lengths, hardware)
    words = ["python", "-m", "bench.engine.wrong_rates", options.model.name, "--vram", *options.vram]
    words += ["--tokens", str(options.tokens), "--load-s", f"{options.load_s:g}"]
    result = {
        "command": shlex.join(words),
        "machine": describe("cuda"),
        "settled": lengths.settled,
        "window": lengths.window,
        "seconds": time.perf_counter() - begin,
        "rows": rows,
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
