"""Whether the CPU has a part in a prefill step that the host shares out, by what both ways took. Pure.

Its part saves copies. It costs time of the thread that launches: rows go to the CPU and come back, and the
bus has more and shorter copies. Which is more depends on the bus, the cores and the experts. Both ways give
the same bits.
"""

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import Final, NamedTuple

from coldstream.placement.control import NUM_COMPARED, WORTHWHILE

SIZES_PER_DOUBLING: Final = 4  # of steps that are compared with each other
FEWEST: Final = 2  # steps of a way that say what it takes, if they agree
HOPELESS: Final = 3.0  # times as long as the other way: one step says enough
CHANGED: Final = 1.2  # times as long as before, or as short
STEPS_BETWEEN: Final = 16  # until the other way is tried again, at least, while nothing changes
MOST_COST: Final = 0.02  # of the time, for tries that fail; half of it after each one, while nothing changes
MOST_FAILED: Final = 4  # tries after which it stays so
MOST_DEBT: Final = 2.0  # steps' time that tries may have cost more than that, when something has changed


class CpuPart:
    """The way of the next step: the one that took less time for a row. It begins with the CPU.

    Steps of about as many rows are compared: two or three with the CPU, and then as many without. The slower
    way is tried again now and then: seldom where tries are expensive, and soon where the faster way takes
    another time than it did. Where the bus alone takes longer than a step with the CPU, steps without it are
    not tried, or no longer once one has shown it.
    """

    def __init__(self) -> None:
        self._ways: dict[int, _Ways] = {}  # by size

    def choose(self, rows: int) -> bool:
        """Whether the CPU has a part in the next step, of so many rows."""
        return self._of(rows).chosen

    def learn(
        self, rows: int, seconds: float, on_bus: float, *, with_cpu: bool, is_usual: bool = True
    ) -> None:
        """Takes note of a step that ended. What is absurd is left out.

        on_bus: seconds that all missing experts of the step take the bus at least, if the CPU has no part.
        is_usual: whether it did nothing for the first time. Of others, only the bus's time counts.
        """
        if math.isfinite(seconds) and seconds > 0:
            self._of(rows).learn(_Step(seconds / rows, on_bus / rows, with_cpu, is_usual))

    def _of(self, rows: int) -> "_Ways":
        return self._ways.setdefault(round(SIZES_PER_DOUBLING * math.log2(rows)), _Ways())


class _Step(NamedTuple):
    """See `CpuPart.learn`; times are seconds of a row."""

    seconds: float
    on_bus: float
    way: bool
    is_usual: bool


class _Ways:
    """Of steps of about as many rows. Times are seconds of a row."""

    def __init__(self) -> None:
        self._best = self.chosen = True
        self._times: dict[bool, deque[float]] = {way: deque(maxlen=NUM_COMPARED) for way in (True, False)}
        self._usual: float | None = None  # of the best way, when ways were compared last; None: never
        self._debt = 0.0  # what tries cost, less what the steps since then may cost
        self._cost = 0.0  # of the try
        self._num_steps = 0  # since the last try
        self._num_failed = 0  # tries, since the best way or its time has changed

    def learn(self, step: _Step) -> None:
        seconds, on_bus, way, is_usual = step
        if is_usual:
            self._times[way].append(seconds)
        if self.chosen != self._best:
            if way == self.chosen:
                self._go_on_trying(step)
            return
        if way != self._best or not is_usual:
            return
        self._num_steps += 1
        self._debt = max(0.0, self._debt - MOST_COST / 2**self._num_failed * seconds)
        best = median(self._times[way])
        is_possible = not way or on_bus < best
        is_known = _agree(self._times[way]) or (way and HOPELESS * on_bus < best)
        if is_possible and is_known and self._is_due(best):
            self.chosen, self._cost = not way, 0.0
            self._times[self.chosen].clear()

    def _is_due(self, best: float) -> bool:
        """Whether the other way is to be tried."""
        if self._usual is None:
            return True
        if not 1 / CHANGED < best / self._usual < CHANGED:
            self._num_failed = 0
            return self._debt <= MOST_DEBT * best
        return self._debt == 0 and self._num_steps >= STEPS_BETWEEN

    def _go_on_trying(self, step: _Step) -> None:
        best, tried = median(self._times[self._best]), self._times[self.chosen]
        self._cost += max(0.0, step.seconds - best)
        is_ruled_out = not step.way and step.on_bus > CHANGED * best
        is_known = step.is_usual and (_agree(tried) or step.seconds >= HOPELESS * best)
        if not (is_ruled_out or is_known):
            return
        found = step.on_bus if is_ruled_out else median(tried)
        if found < WORTHWHILE * best:
            self._best, self._num_failed = self.chosen, 0
        else:
            self._debt += self._cost
            self._num_failed = min(MOST_FAILED, self._num_failed + 1)
        self.chosen, self._num_steps = self._best, 0
        self._usual = min(found, best)


def _agree(times: Collection[float]) -> bool:
    """Whether their median says what a step takes: one step that something held up says nothing."""
    is_alike = len(times) >= FEWEST and max(times) < CHANGED * min(times)
    return is_alike or len(times) == NUM_COMPARED
