"""A model of a long step whose experts the host divides: when host, bus, CPU and GPU are busy. Pure.

    python -m bench.engine.long_step            what less of the host's time and halves of a step would bring

Experts go over the bus in groups, through a ring, also some of the next layer's before its router has run.
The CPU computes its part once the router has run, and the next layer's mixer waits for both. With `halves`
the rows of a step go through each layer in two parts. An expert is copied once for both. The CPU computes
those of the first half, and then those of the second while the GPU mixes the first.
"""

import argparse
import sys
from collections import deque
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Times:
    """Of a step's parts, in milliseconds. Of an expert, of a group of experts, or of a layer."""

    bus: float  # an expert's bytes
    cpu: float  # an expert for the CPU, whatever its rows
    cpu_row: float  # and for each of its rows
    gpu_group: float  # a group's products
    gpu_mix: float  # a layer's sum of experts, mixer and router
    rows_down: float  # the rows for the CPU
    rows_up: float  # and what it computed of them
    launch: float  # the host's: a launch
    copy: float  # and the copies of a group
    divide: float  # and the division of a layer's experts


@dataclass(frozen=True)
class Step:
    """Experts of a layer with tokens, rows of one that the CPU takes, and what the host launches."""

    layers: int
    experts: int
    cpu_rows: float
    launches: int  # of a layer before its experts
    group_launches: int
    group: int = 16  # experts
    buffers: int = 8  # of the ring
    halves: int = 1


@dataclass
class _Clock:
    """When each is free, and how long it has worked."""

    host: float = 0.0
    bus: float = 0.0
    cpu: float = 0.0
    gpu: float = 0.0
    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("host", "bus", "cpu", "gpu"), 0.0))

    def do(self, who: str, seconds: float, *after: float) -> float:
        """Has it work as soon as it is free and all of `after` is over. When that ends."""
        end: float = max(getattr(self, who), *after, 0.0) + seconds
        setattr(self, who, end)
        self.work[who] += seconds
        return end


class _Simulation:
    """One step."""

    def __init__(self, step: Step, times: Times) -> None:
        self.step, self.times, self.clock = step, times, _Clock()
        self._free = deque([0.0] * step.buffers)  # from when on each buffer is free, in cyclic order
        self._waiting = deque[tuple[int, float]]()  # experts and arrival of groups that are not computed
        self.cpu_experts = 0

    def run(self) -> float:
        """Milliseconds."""
        answers = [0.0] * self.step.halves
        for layer in range(self.step.layers):
            routed = [self._route(answer) for answer in answers]
            on_cpu = self._share(routed[0])
            self.cpu_experts += on_cpu
            asked = [self.clock.do("host", self.times.divide / self.step.halves, each) for each in routed]
            rest = self.step.experts - on_cpu - sum(count for count, _ in self._waiting)
            in_slots = self._stream(rest, asked)
            if layer + 1 < self.step.layers:
                self._begin_ahead()
            one = self.times.cpu + self.times.cpu_row * self.step.cpu_rows / self.step.halves
            down, up = (each / self.step.halves for each in (self.times.rows_down, self.times.rows_up))
            answers = [
                max(in_slots, self.clock.do("cpu", on_cpu * one, each + down) + up if on_cpu else 0.0)
                for each in asked
            ]
        return max(answers)

    def _route(self, answer: float) -> float:
        """When the host knows what a half's routers chose, whose last layer is complete at `answer`."""
        launched = self.clock.do("host", self.step.launches * self.times.launch)
        return self.clock.do("gpu", self.times.gpu_mix / self.step.halves, answer, launched)

    def _share(self, now: float) -> int:
        """How many experts the CPU computes, so that it ends with the bus."""
        step, times = self.step, self.times
        one = step.halves * times.cpu + times.cpu_row * step.cpu_rows
        begun = sum(count for count, _ in self._waiting)
        on_its_way = max(0.0, self.clock.bus - now)
        late = times.rows_down + times.rows_up + max(0.0, self.clock.cpu - now)
        left = step.experts - begun
        return round(max(0.0, min(left, (on_its_way + left * times.bus - late) / (one + times.bus))))

    def _begin(self, count: int, *after: float) -> None:
        queued = self.clock.do("host", self.times.copy, *after)
        self._waiting.append(
            (count, self.clock.do("bus", count * self.times.bus, queued, self._free.popleft()))
        )

    def _compute(self, asked: list[float]) -> float:
        """Has the oldest group computed, for each half."""
        _, arrival = self._waiting.popleft()
        end = 0.0
        for each in asked:
            launched = self.clock.do("host", self.step.group_launches * self.times.launch, each)
            end = self.clock.do("gpu", self.times.gpu_group / self.step.halves, launched, arrival)
        self._free.append(end)
        return end

    def _stream(self, experts: int, asked: list[float]) -> float:
        """Has experts copied and computed. When the last ones are."""
        end = 0.0
        while experts > 0 or self._waiting:
            if experts > 0 and self._free:
                self._begin(min(self.step.group, experts), asked[0])
                experts -= self.step.group
            else:
                end = self._compute(asked)
        return end

    def _begin_ahead(self) -> None:
        """At most half of a layer, before its router has run."""
        for _ in range(min(len(self._free), self.step.experts // 2 // self.step.group)):
            self._begin(self.step.group)


def simulated(step: Step, times: Times) -> dict[str, float]:
    """Milliseconds of a step, of the work of each in it, and the CPU's experts."""
    simulation = _Simulation(step, times)
    total = simulation.run()
    return {"step_ms": total, **simulation.clock.work, "cpu_experts": simulation.cpu_experts}


# Of 2,048 and 512 tokens on an H200, in docs/notes/streaming.md: 7,430 experts in 290 ms on the bus, 40 µs of
# the CPU for 6 rows and 66 for 18, the GPU's 79 and 32 ms, the host's 0.06 ms a launch and 0.15 a group.
TIMES = Times(
    bus=0.039, cpu=0.027, cpu_row=0.00217, gpu_group=0.07, gpu_mix=1.2, rows_down=0.33, rows_up=0.2,
    launch=0.06, copy=0.15, divide=0.4,
)  # fmt: skip
STEPS = {
    2048: (Step(layers=40, experts=254, cpu_rows=18, launches=26, group_launches=3), TIMES),
    512: (
        Step(layers=40, experts=207, cpu_rows=6, launches=26, group_launches=3),
        replace(TIMES, gpu_mix=0.5, gpu_group=0.04, rows_down=0.08, rows_up=0.06),
    ),
}


def cases(step: Step, times: Times) -> dict[str, dict[str, float]]:
    """The step as it is, with less of the host's time, in halves, and with faster cores."""
    graphs = replace(step, launches=1, group_launches=1)
    halves = replace(graphs, halves=2)
    quick = replace(times, launch=0.03, copy=0.1, divide=0.25)
    fast = replace(quick, cpu=0.02, cpu_row=0.0)
    return {
        "launches": simulated(step, times),
        "graphs": simulated(graphs, quick),
        "no time of the host": simulated(graphs, replace(times, launch=0.0, copy=0.0, divide=0.0)),
        "halves": simulated(halves, quick),
        "graphs, 20 µs an expert of the CPU": simulated(graphs, fast),
        "halves, 20 µs an expert of the CPU": simulated(halves, fast),
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for rows, (step, times) in STEPS.items():
        print(f"{rows} rows")
        for name, found in cases(step, times).items():
            figures = "  ".join(f"{who} {value:6.1f}" for who, value in found.items())
            print(f"  {name:36} {figures}  {1e3 * rows / found['step_ms']:6.0f} tok/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
