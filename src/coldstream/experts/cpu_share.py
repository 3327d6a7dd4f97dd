"""What the CPU computes of the experts and layers that a GPU lacks, and what goes over the bus. Pure.

Both work at the same time, and the shares let them end together. A prefill shares out the experts of one
layer after another. A decode step of a dense model shares out its missing layers all at once. (The experts of
a decode step are shared out on the device: `kernels/experts/partition.cuh`.)
"""

from typing import Any

import numpy as np

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes

Array = np.ndarray[Any, Any]

FIRST_BUS_RATE, FIRST_CPU_RATE = 20e9, 10e9  # bytes a second, before any was measured
STEPS_TO_COMPARE = 16  # of about as many rows, until the slower way is tried again
BESIDE_CPU = 0.8  # at least so much of the bus's rate is left beside the CPU


def bus_order(counts: Array, missing: Array, with_cpu: bool) -> list[int]:
    """The experts that are `missing` (bool [experts]) and have tokens, by int counts [experts].

    With the CPU, experts of the most tokens come first, as the CPU computes the last ones. Otherwise they are
    in file order.
    """
    wanted = np.flatnonzero(missing & (counts > 0))
    if with_cpu:
        wanted = wanted[np.argsort(-counts[wanted], kind="stable")]
    return wanted.tolist()


def likely_order(last_counts: Array, missing: Array, with_cpu: bool) -> list[int]:
    """The experts that are `missing`, in the order in which to copy them before the layer's router has run.

    last_counts: int [experts], tokens of the step before. With the CPU, only half of the experts that had
    any: the CPU computes the others.
    """
    likely = bus_order(last_counts, missing, with_cpu)
    if with_cpu and likely:
        return likely[: -(-len(likely) // 2)]
    return likely + np.flatnonzero(missing & (last_counts == 0)).tolist()


class CpuShare:
    """How many experts of a layer the CPU computes, so that it ends when the last of the others has arrived.

    The estimate is from measured rates of the bus, and of the CPU in steps of about as many rows: the time of
    an expert grows with its rows.
    """

    def __init__(self) -> None:
        self._bus_rate = FIRST_BUS_RATE
        self._cpu_seconds: dict[int, float] = {}  # per expert, by the bit length of a step's rows

    @property
    def bus_rate(self) -> float:
        """Bytes a second."""
        return self._bus_rate

    def learn_bus(self, num_bytes: int, seconds: float) -> None:
        """Averages in the rate of a transfer."""
        if seconds > 0:
            self._bus_rate = (self._bus_rate + num_bytes / seconds) / 2

    def learn_cpu(self, rows: int, num_experts: int, seconds: float) -> None:
        """Averages in the CPU's time for `num_experts` experts in a step of `rows` rows."""
        magnitude, measured = rows.bit_length(), seconds / num_experts
        self._cpu_seconds[magnitude] = (self._cpu_seconds.get(magnitude, measured) + measured) / 2

    def split(self, rows: int, num_experts: int, expert_bytes: int, bytes_on_their_way: int) -> int:
        """How many of `num_experts` the CPU computes: at least one, so that its rate stays measured."""
        if num_experts == 0:
            return 0
        on_cpu = self._cpu_seconds.get(rows.bit_length(), expert_bytes / FIRST_CPU_RATE)
        on_bus = expert_bytes / self._bus_rate
        waiting = bytes_on_their_way / self._bus_rate
        return max(1, min(num_experts, round((waiting + num_experts * on_bus) / (on_cpu + on_bus))))


class CpuPart:
    """Whether the CPU has a part in a prefill step: the way that took less time for a row so far.

    Its part saves copies. It costs time of the thread that launches kernels: rows go to the CPU and come
    back, and the bus has more and shorter copies. Which is more depends on the bus, the cores and the
    experts. So steps of about as many rows are compared. The first one does not count, as rates and kernels
    are new to it. Then one is measured with the CPU and one without, and the slower way is tried again now
    and then. Where the bus alone would take longer than a step with the CPU, steps without it are not tried.
    Both ways give the same bits.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}  # for a row, by the bit length of a step's rows
        self._on_bus: dict[int, float] = {}  # likewise, in the last step
        self._steps: dict[int, int] = {}  # since the slower way was tried, likewise

    def choose(self, rows: int) -> bool:
        """For the next step, of so many rows."""
        magnitude = rows.bit_length()
        with_cpu, without = (self._seconds.get((magnitude, way)) for way in (True, False))
        if with_cpu is None or BESIDE_CPU * self._on_bus[magnitude] >= with_cpu:
            return True
        if without is None:
            return False
        is_faster = with_cpu <= without
        return is_faster if self._steps[magnitude] < STEPS_TO_COMPARE else not is_faster

    def learn(self, rows: int, seconds: float, on_bus: float, *, with_cpu: bool) -> None:
        """Averages in the time of a step, which ended.

        on_bus: seconds that all missing experts of the step take the bus, at the rate that it had.
        """
        magnitude, measured = rows.bit_length(), seconds / rows
        steps = self._steps.get(magnitude)
        self._on_bus[magnitude] = on_bus / rows
        self._steps[magnitude] = 0 if steps is None or steps >= STEPS_TO_COMPARE else steps + 1
        if steps is not None:
            known = self._seconds.get((magnitude, with_cpu), measured)
            self._seconds[magnitude, with_cpu] = (known + measured) / 2


class Lookahead:
    """How many groups of a layer are copied before its router has run, to keep the bus busy."""

    def __init__(self) -> None:
        self.count = 1

    def learn(self, num_on_their_way: int, most: int) -> None:
        """After the router has run: doubles if no group is in flight, decreases if several are."""
        if num_on_their_way == 0:
            self.count = min(2 * self.count, most)
        elif num_on_their_way > 1:
            self.count = max(1, self.count - 1)


def layers_of_cpu(num_missing: int, rows: int, times: MissTimes) -> frozenset[int]:
    """Which of the missing layers 0 … num_missing − 1 the CPU computes in a step of `rows` rows.

    Their number lets the CPU and the bus end together. They lie evenly between the others, so that the bus
    works while the CPU's layer is awaited. None for more than MAX_MAILBOX_ROWS rows, which no mailbox takes.
    """
    if rows > MAX_MAILBOX_ROWS or num_missing == 0:
        return frozenset()
    count = num_missing - times.num_streamed([rows] * num_missing)
    return frozenset(
        number
        for number in range(num_missing)
        if (number + 1) * count // num_missing > number * count // num_missing
    )
