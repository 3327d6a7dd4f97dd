"""How many guessed experts of a layer are copied ahead for a single token, by what steps took. Pure.

Copies ahead spare the CPU experts, and take memory bandwidth from it and the bus from reads in place. A
forecast is often too close to say which is faster. So a run begins with what is planned, tries each other
number for some steps, and keeps the one with which a missing expert takes the least time. Any number gives
the same tokens.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from coldstream.placement.control import HOPELESS, NUM_COMPARED, WORTHWHILE

SETTLING: Final = 1  # updates behind a change of the number: some of their steps had another one
UNLIKELY: Final = 1.15  # times as long by forecast as the best number so far: others are tried before
LEAST_SHARE: Final = 0.25  # of a step's time: where missing experts take less, nothing is tried
CHANGED: Final = 1.2  # times as long as when all numbers had been tried, or as short
FIRST_PAUSE, MOST_PAUSE = 8, 64  # updates until a number is tried again; twice as many after each that fails
MOST_COST: Final = 0.01  # of the time, for tries that fail, once all numbers were tried
LARGEST_DEBT: Final = 8.0  # so that an absurd time does not end all tries
MOST_DEBT: Final = 2.0  # updates' time that tries may have cost more than that, when something has changed


class CopiesAhead:
    """The number of a layer's guessed experts that are copied ahead at most, for the next steps of one row.

    All likely numbers are tried in turn at first, and whenever steps take another time than they did: none or
    most of them first, as that makes the largest difference, and then the neighbours of the best one so far.
    After that any one is tried again now and then.
    """

    def __init__(self, least: int, most: int, first: int) -> None:
        """Raises ValueError unless 0 ≤ least ≤ first ≤ most."""
        if not 0 <= least <= first <= most:
            raise ValueError(f"copies ahead begin with {first}, which is not in {least} … {most}")
        self._least, self._most = least, most
        self.best = self.count = first
        self._times: deque[float] = deque(maxlen=NUM_COMPARED)  # with the best number
        self._trial: list[float] = []
        self._forecast: tuple[float, ...] = ()
        self._worse: set[int] = set()  # numbers that were tried, until all were
        self._usual: float | None = None  # time with the best number when all had been tried; None: not yet
        self._settling = self._wait = self._num_failed = 0
        self._pause, self._debt = FIRST_PAUSE, 0.0

    @property
    def is_trying(self) -> bool:
        """Whether this number is tried beside the best one so far."""
        return self.count != self.best

    def learn(
        self,
        seconds: float,
        share: float,
        most_useful: int,
        *,
        may_try: bool = True,
        forecast: Sequence[float] = (),
    ) -> None:
        """Takes note of an update. What is absurd is left out.

        seconds: that a missing expert took. share: of a step's time, which all of them took. most_useful:
        larger numbers make no difference now, and none is better than any if it is 0. may_try: whether
        nothing else is being tried. forecast: a layer's time with none, one, …, if it is known.
        """
        self._forecast = tuple(forecast)
        if most_useful == 0 and self._least == 0 and self.best > 0:
            self._trial.clear()
            self._times.clear()
            self.best = 0
            self._begin_anew()
            self._use(0)
        if self._settling:
            self._settling -= 1
            return
        if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(share)):
            return
        if share < LEAST_SHARE:
            self._trial.clear()
            self._use(self.best)
        elif self.is_trying:
            self._go_on_trying(seconds, most_useful)
        else:
            self._note(seconds)
            if may_try and len(self._times) == NUM_COMPARED:
                self._try_if_due(most_useful)

    def _note(self, seconds: float) -> None:
        self._times.append(seconds)
        self._wait = max(0, self._wait - 1)
        self._debt = max(0.0, self._debt - MOST_COST)
        if self._usual is not None and not 1 / CHANGED < median(self._times) / self._usual < CHANGED:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._worse.clear()
        self._usual, self._pause = None, FIRST_PAUSE

    def _try_if_due(self, most_useful: int) -> None:
        if self._usual is None:
            if self._debt <= MOST_DEBT:
                self._try_next(most_useful)
        elif self._wait == 0 and self._debt == 0.0:
            others = sorted(self._others(most_useful), key=self._is_likely, reverse=True)
            if others:
                self._use(others[self._num_failed % len(others)])

    def _try_next(self, most_useful: int) -> None:
        """Of those that were not tried yet; if all were, the best one is used."""
        others = self._others(most_useful)
        untried = [each for each in others if each not in self._worse and self._is_likely(each)]
        if untried:
            self._use(untried[0])
            return
        self._usual = median(self._times)
        self._wait = self._pause if any(map(self._is_likely, others)) else MOST_PAUSE
        self._use(self.best)

    def _is_likely(self, number: int) -> bool:
        """Whether it is no larger than the best one, or not much slower by forecast."""
        if number < self.best or number >= len(self._forecast):
            return True
        return self._forecast[number] < UNLIKELY * self._forecast[self.best]

    def _others(self, most_useful: int) -> list[int]:
        """Numbers that differ from the best one: the other of none and most, then the nearest first."""
        most = max(self._least, min(self._most, most_useful))
        best = min(self.best, most)
        far = self._least if best > self._least else most
        numbers = {*range(self._least, most + 1)} - {best}
        return sorted(numbers, key=lambda each: (each != far, abs(each - best), each))

    def _go_on_trying(self, seconds: float, most_useful: int) -> None:
        usual, trial, tried = median(self._times), self._trial, self.count
        trial.append(seconds)
        self._debt = min(self._debt + max(0.0, seconds / usual - 1), LARGEST_DEBT)
        if len(trial) < NUM_COMPARED and seconds < HOPELESS * usual:
            return
        is_better = median(trial) < WORTHWHILE * usual
        if is_better:
            if self._usual is not None:
                self._begin_anew()
            self._worse.add(self.best)
            self.best = tried
            self._times.extend(trial)
        else:
            self._worse.add(tried)
        trial.clear()
        if self._usual is None:
            self._try_next(most_useful)
        else:
            self._num_failed += 1
            self._wait = self._pause = min(MOST_PAUSE, 2 * self._pause)
            self._use(self.best)

    def _use(self, count: int) -> None:
        if count != self.count:
            self.count, self._settling = count, SETTLING
