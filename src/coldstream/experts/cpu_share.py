"""What the CPU computes of the experts and layers that a GPU lacks, and what goes over the bus. Pure.

Both work at the same time, and the shares let them end together. A prefill shares out the experts of one
layer after another. A decode step of a dense model shares out its missing layers all at once. (The experts of
a decode step are shared out on the device: `kernels/experts/partition.cuh`.)
"""

import math
from typing import Any, NamedTuple

import numpy as np

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.control import Pace

Array = np.ndarray[Any, Any]

FIRST_BUS_RATE, FIRST_CPU_RATE = 20e9, 10e9  # bytes a second, before any was measured
BUS_GAIN = 1 / 16  # of a copy in the average of the last ones
KNOWN_FOR = 256  # steps with the CPU's part, in which copies without it count


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


class BusRate:
    """Bytes a second of copies to the device, by what the last ones took."""

    def __init__(self, first: float = FIRST_BUS_RATE) -> None:
        """first: before any was measured."""
        self._first = first
        self._num_bytes = self._seconds = 0.0  # of the last copies
        self._beside, self._alone = _Copies(), _Copies()  # since `start_step`
        self._last: float | None = None  # of the last step, if the CPU had a part in it
        self._gain: float | None = None  # without the CPU's part over beside it; None: not known
        self._num_steps = 0  # with the CPU's part, since then

    @property
    def now(self) -> float:
        """Of the last copies while the CPU has a part."""
        return self._num_bytes / self._seconds if self._seconds > 0 else self._first

    @property
    def knows_alone(self) -> bool:
        """Whether copies without the CPU's part say how much faster they are than beside it."""
        return self._gain is not None

    def start_step(self) -> None:
        """Forgets the copies of the step before, but not what the last ones took."""
        self._beside, self._alone = _Copies(), _Copies()

    def learn(self, num_bytes: int, seconds: float, *, is_alone: bool = False) -> None:
        """Takes note of a copy. is_alone: whether the CPU had nothing to compute meanwhile, in a step in
        which it has a part.
        """
        if not (seconds > 0 and num_bytes > 0):
            return
        (self._alone if is_alone else self._beside).add(num_bytes, seconds)
        if not is_alone or self._seconds == 0:
            self._num_bytes += num_bytes - BUS_GAIN * self._num_bytes
            self._seconds += seconds - BUS_GAIN * self._seconds

    def end_step(self, *, with_cpu: bool) -> float | None:
        """The rate of all the step's copies if the CPU had no part in it; None if that is not known.

        Copies beside the CPU do not say it: the fastest of them may have had nothing beside them, neither the
        CPU nor another program. Those of layers that were all the bus's say it, and a step without the CPU's
        part behind one with it.
        """
        before, self._last = self._last, None
        beside, alone = self._beside.rate, self._alone.rate
        if not with_cpu:
            if before is not None and beside is not None:
                self._gain, self._num_steps = max(1.0, beside / before), 0
            return beside
        self._last, self._num_steps = beside or alone, self._num_steps + 1
        if alone is not None and self._last is not None:
            self._gain, self._num_steps = max(1.0, alone / self._last), 0
        elif self._num_steps > KNOWN_FOR:
            self._gain = None
        return None if self._gain is None or self._last is None else self._gain * self._last


class _Copies:
    """Bytes and seconds of some copies."""

    def __init__(self) -> None:
        self._num_bytes, self._seconds = 0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._num_bytes += num_bytes
        self._seconds += seconds

    @property
    def rate(self) -> float | None:
        """None if there is none."""
        return self._num_bytes / self._seconds if self._seconds else None


class Share(NamedTuple):
    """Of a layer: experts of the CPU, and seconds as expected until both end, and if all are the bus's."""

    on_cpu: int
    seconds: float
    on_bus: float


class CpuShare:
    """Which experts of a layer the CPU computes, so that it ends when the last of the others has arrived.

    A forecast says how its time for an expert grows with the expert's rows. How many times as long requests
    take is learned in steps of about as many rows.
    """

    def __init__(self, most_rows: int) -> None:
        """most_rows: of a step."""
        self.bus = BusRate()
        # Seconds of a byte, of an expert of 0, 1, … rows.
        self._forecast = np.full(most_rows + 1, 1 / FIRST_CPU_RATE)
        self._paces: dict[int, Pace] = {}  # by the bit length of a step's rows

    def begin_with(self, times: MissTimes, expert_bytes: float) -> None:
        """Takes forecasts of the bus's time and of the CPU's times for experts of so many bytes."""
        self.bus = BusRate(1e9 * expert_bytes / times.bus)
        known = [times.cpu_time(rows) for rows in range(1, len(self._forecast))]
        self._forecast[1:] = 1e-9 * np.array(known, np.float64) / expert_bytes

    def learn_cpu(self, rows: int, of_experts: Array, expert_bytes: int, seconds: float) -> None:
        """Takes note of a request in a step of `rows` rows. of_experts: int [experts], rows of each."""
        if math.isfinite(seconds) and seconds > 0:
            pace = self._paces.setdefault(rows.bit_length(), Pace())
            pace.learn(seconds / (expert_bytes * float(self._forecast[of_experts].sum())))

    def split(self, rows: int, of_experts: Array, expert_bytes: int, bytes_on_their_way: int) -> Share:
        """How many experts the CPU computes in a step of `rows` rows, the last ones: at least one, so that
        its pace stays measured.

        of_experts: int [experts], rows of each, descending.
        """
        if len(of_experts) == 0:
            return Share(0, 0.0, 0.0)
        pace = self._paces.get(rows.bit_length())
        on_cpu = np.cumsum(self._forecast[of_experts[::-1]]) * (pace.factor if pace else 1.0)
        on_bus = (bytes_on_their_way / expert_bytes + np.arange(len(of_experts))[::-1]) / self.bus.now
        both = np.maximum(on_cpu, on_bus)
        best = int(np.argmin(both))
        of_all = bytes_on_their_way / expert_bytes + len(of_experts)
        return Share(1 + best, expert_bytes * float(both[best]), expert_bytes * of_all / self.bus.now)


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
