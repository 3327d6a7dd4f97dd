"""What the first steps of a prompt cost beside the best fixed way, on simulated machines. Pure.

    python -m bench.engine.first_prompts            a table over a grid of machines

The product's own division of a step (`experts/step_division.py`) meets machines whose bus, cores and share
of resident experts differ. Each runs a prompt whose steps the host divides, from the first one after opening.
The best fixed way is the faster of all steps with the CPU's part and all without it, with the same noise.
"""

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final, NamedTuple

import numpy as np

from coldstream.experts.cpu_share import likely_order
from coldstream.experts.step_division import Division, StepDivision
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes

Array = np.ndarray[Any, Any]

MOST_ROWS: Final = 2048
LINK: Final = 53e9  # of a copy that has the whole bus between other programs
GROUP, BUFFERS = 32, 6  # experts of a buffer, and buffers of the ring
EAGER: Final = (2.2e-3, 3.5e-4)  # the host's seconds of a layer and of a group, before steps are recorded
PIECES: Final = (1.1e-3, 1.0e-4)  # and behind that
RECORDING: Final = 1.3  # times as long as a step that is not recorded
PART: Final = 9e-5  # of a group, more, with the CPU's part
ROWS_DOWN, ROWS_UP = 1.6e-7, 1.0e-7  # seconds of a row to the CPU and back


def _quiet(number: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Machine:
    """bus: bytes a second, without the CPU's part. beside: share of it that is left while the CPU computes.
    programs: that have the bus in turn, so that some copies are as fast as the whole bus. resident: share of
    experts in slots. noise: of a step's logarithm. load: times as long as the CPU takes, by step.
    """

    bus: float
    cores: int
    resident: float = 0.0
    beside: float = 0.9
    programs: int = 0
    expert_bytes: int = 1_770_000
    layers: int = 40
    experts: int = 256
    noise: float = 0.0
    load: Callable[[int], float] = _quiet
    forecast: float = 1.0  # times as long as the CPU takes: what a plan says
    gpu_s: float = 8e-6  # of an expert's rows

    def cpu_seconds(self, rows: Array) -> Array:
        """Of experts with so many rows."""
        of_bytes = self.expert_bytes / min(6e9 * self.cores, 7e10)
        return of_bytes + rows * 3.5e-5 / self.cores * self.expert_bytes / 1.77e6

    @property
    def times(self) -> MissTimes:
        """What a plan says."""
        rows = np.arange(1, MAX_MAILBOX_ROWS + 1)
        cpu = np.rint(1e9 * self.forecast * self.cpu_seconds(rows)).astype(int)
        return MissTimes(round(1e9 * self.expert_bytes / self.bus), tuple(cpu.tolist()))


class Steps:
    """Steps of a machine, divided by the product. way: of all steps; None: as they are chosen."""

    def __init__(
        self, machine: Machine, seed: int = 0, way: bool | None = None, most_rows: int = 2048
    ) -> None:
        self.machine, self.way = machine, way
        self._rng, self._noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self.division = StepDivision(MOST_ROWS)
        self.division.begin_with(machine.times, machine.expert_bytes)
        if way is not None:
            self.division._part = _Fixed(way)  # type: ignore[assignment]
        self._resident = self._rng.random((machine.layers, machine.experts)) < machine.resident
        self._num_copies = 0
        self._cpu_s = 0.0  # that the CPU was at work
        self._recorded: dict[tuple[int, bool], int] = {}  # steps of each form
        self.now = 0.0
        self.ways: list[bool] = []

    def run(self, rows: int, count: int) -> list[float]:
        """Seconds of so many steps."""
        return [self._step(rows) for _ in range(count)]

    def _step(self, rows: int) -> float:
        machine, division = self.machine, self.division
        begun = self.now
        division.start(rows, begun)
        with_cpu = division.with_cpu
        self.ways.append(with_cpu)
        step = _Step(self, rows, with_cpu)
        for layer in range(machine.layers):
            step.layer(layer)
        slow = float(np.exp(machine.noise * self._noise.normal()))
        seconds = slow * (step.host if step.host > step.gpu else step.gpu)
        self.now = begun + seconds
        division.end(self.now)
        form = rows, with_cpu
        self._recorded[form] = self._recorded.get(form, 0) + 1
        return seconds

    def counts(self, rows: int) -> Array:
        """Rows of each expert of a layer."""
        odds = self._rng.gamma(0.8, size=self.machine.experts)
        return self._rng.multinomial(8 * rows, odds / odds.sum())


class _Fixed:
    """In place of `CpuPart`."""

    def __init__(self, way: bool) -> None:
        self._way = way

    def __getattr__(self, name: str) -> Any:
        return lambda *others, **more: self._way


class _Copy(NamedTuple):
    end: float
    num_bytes: int
    seconds: float
    is_alone: bool


class _Step:
    """When host, bus, CPU and GPU are free, from the beginning of a step on."""

    def __init__(self, steps: Steps, rows: int, with_cpu: bool) -> None:
        self._steps, self._rows, self._with_cpu = steps, rows, with_cpu
        self.machine, self._division = steps.machine, steps.division
        number = steps._recorded.get((rows, with_cpu), 0)
        self._times = PIECES if number > 1 else EAGER
        self._slower = RECORDING if number == 1 else 1.0
        if number == 1:
            self._division.note_recording()
        self.host = self.gpu = self.bus = 0.0
        self._cpu = (0.0, 0.0)  # begin and end of the last request
        self._load = self.machine.load(len(steps.ways) - 1)
        self._free = deque([0.0] * BUFFERS)  # from when on each buffer is free
        self._waiting: deque[tuple[list[int], float]] = deque()  # experts and arrival
        self._copies: deque[_Copy] = deque()  # not yet learned
        self._next: Array = steps.counts(rows)

    def layer(self, layer: int) -> None:
        """A layer, whose mixer waits for the experts of the one before."""
        machine, division, rows = self.machine, self._division, self._rows
        of_layer, of_group = self._times
        of_group += PART if self._with_cpu else 0.0
        counts, self._next = self._next, self._steps.counts(rows)
        missing = ~self._steps._resident[layer]
        self.host += self._slower * of_layer
        routed = max(self.gpu, self.host) + 5e-7 * rows
        self.gpu = self.host = routed
        coming = [expert for experts, _ in self._waiting for expert in experts]
        moving = sum(copy.num_bytes for copy in self._copies if copy.end > self.host)
        shared = division.divide(counts, missing, coming, machine.expert_bytes, moving)
        answered = 0.0
        if shared.on_cpu:
            took = self._load * float(machine.cpu_seconds(counts[shared.on_cpu]).sum())
            begin = routed + ROWS_DOWN * rows
            self._cpu = begin, begin + took
            division.asked(counts[shared.on_cpu], machine.expert_bytes, self._steps._cpu_s)
            self._steps._cpu_s += took
            answered = self._cpu[1] + ROWS_UP * rows
        self._learn()
        division.lookahead.learn(sum(copy.end > self.host for copy in self._copies), BUFFERS)
        self._stream(shared, self._slower * of_group)
        self._begin_ahead(layer + 1, self._slower * of_group)
        self.gpu = max(self.gpu, answered)

    def _learn(self) -> None:
        while self._copies and self._copies[0].end <= self.host:
            copy = self._copies.popleft()
            self._division.copied(copy.num_bytes, copy.seconds, is_alone=copy.is_alone)

    def _stream(self, shared: Division, of_group: float) -> None:
        experts = shared.streamed
        left = deque(experts[i : i + GROUP] for i in range(0, len(experts), GROUP))
        while left or self._waiting:
            if left and self._free:
                self._begin(list(left.popleft()), of_group, is_alone=shared.is_alone)
                continue
            group, arrival = self._waiting.popleft()
            self.host += of_group
            self.gpu = max(self.gpu, self.host, arrival) + self.machine.gpu_s * len(group)
            self._free.append(self.gpu)

    def _begin(self, experts: list[int], of_group: float, *, is_alone: bool = False) -> None:
        self.host += of_group
        size = len(experts) * self.machine.expert_bytes
        begin = max(self.host, self.bus, self._free.popleft())
        end = begin + self._copy_seconds(begin, size)
        self._copies.append(_Copy(end, size, end - begin, is_alone))
        self._waiting.append((experts, end))
        self.bus = end

    def _copy_seconds(self, begin: float, size: int) -> float:
        """The CPU takes a share of the bus while it computes; other programs have it in turn."""
        machine = self.machine
        seconds = size / machine.bus
        if machine.programs:
            fast = machine.bus / LINK
            is_fast = self._steps._num_copies % (machine.programs + 1) == 0
            seconds *= fast if is_fast else (machine.programs + 1 - fast) / machine.programs
        self._steps._num_copies += 1
        cpu_begin, cpu_end = self._cpu
        beside = max(0.0, min(cpu_end, begin + seconds / machine.beside) - max(begin, cpu_begin))
        return seconds + beside * (1 - machine.beside)

    def _begin_ahead(self, layer: int, of_group: float) -> None:
        if layer >= self.machine.layers:
            return
        most = GROUP * min(self._division.lookahead.count, len(self._free))
        missing = ~self._steps._resident[layer]
        likely = likely_order(self._next, missing, self._with_cpu)[:most]
        for i in range(0, len(likely), GROUP):
            self._begin(likely[i : i + GROUP], of_group)


def grid() -> Iterator[Machine]:
    """Buses of 3 to 50 GB/s, 2 to 32 cores, from no expert in slots to nine of ten."""
    buses, cores, residents = (3e9, 6.6e9, 13e9, 26e9, 50e9), (2, 6, 16, 32), (0.0, 0.36, 0.9)
    for bus, number, resident in itertools.product(buses, cores, residents):
        one = Machine(bus, number, resident)
        yield one
        if bus < 20e9:
            yield replace(one, programs=3)
        yield replace(one, beside=0.5)
        yield replace(one, expert_bytes=860_000, noise=0.03)
        yield replace(one, gpu_s=4e-5)


def costs(machine: Machine, rows: int, counts: Sequence[int], seed: int = 0) -> dict[int, float]:
    """By number of steps from the first one on, what they took over the best fixed way."""
    chosen = Steps(machine, seed).run(rows, max(counts))
    fixed = [Steps(machine, seed, way).run(rows, max(counts)) for way in (True, False)]
    return {count: sum(chosen[:count]) / min(sum(each[:count]) for each in fixed) for count in counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parser.parse_args()
    found = []
    for machine in grid():
        cost = costs(machine, options.rows, options.steps)
        found.append(cost)
        steps = Steps(machine)
        steps.run(options.rows, max(options.steps))
        ways = "".join("C" if way else "b" for way in steps.ways)
        print(
            f"{machine.bus / 1e9:5.1f} GB/s {machine.cores:2} cores {machine.resident:4.0%} "
            f"beside {machine.beside:.1f} programs {machine.programs} {machine.expert_bytes / 1e6:.2f} MB  "
            + "  ".join(f"{count}: {each:.3f}" for count, each in cost.items())
            + f"  {ways}"
        )
    for count in options.steps:
        of_count = [each[count] for each in found]
        print(f"{count} steps: mean {mean(of_count):.3f}, most {max(of_count):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
