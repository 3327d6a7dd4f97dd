"""Controllers that learn from a run's own stamps how its work is best divided. Pure: no clocks, no devices.

A forecast is where they begin. They are fed what a few steps took, and say how the next ones should go. What
they say is bounded for any input, moves by averages, and is contradicted by later observations. No token
depends on it. Unit of work: an update, of a few steps.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

MOST_TIMES: Final = 256.0  # as slow or as fast as the forecast, at most
GAIN: Final = 1 / 4  # of a new observation in an average
NUM_COMPARED: Final = 3  # observations of which the median counts: one that something held up alone does not
SURPRISE: Final = 1.5  # times as fast as expected: it is looked at again at once
PATIENCE, MOST_PATIENCE = 4, 64  # updates without work for a place, until it is given a little
LITTLE: Final = 1 / 40  # of the work, about: a layer
MOST_COST: Final = 0.05  # of the time, for giving a little to a place that is slow
WORTHWHILE: Final = 0.98  # of a setting's time: another one that takes more does not replace it
HOPELESS: Final = 1.1  # of a setting's time: what takes so much is not tried for longer
NUM_FIRST: Final = 8  # updates that say what is usual
CONTRADICTED: Final = 1.5  # times as long as usual, or as short
MOST_OVERHEAD: Final = 16.0  # units' time, of a request
NUM_OVERHEADS, MOST_OVERHEADS = 4, 32  # observations of which the median counts
UNLIKE: Final = 1.2  # times as many units in a request
FIRST_PAUSE, MOST_PAUSE = 2, 64  # updates between two tries of others; twice as many after each that fails


@dataclass(frozen=True)
class Work:
    """What one place did: a number of units, and the seconds that it was at work. requests: in which the
    units came to it, if each of them takes time besides.
    """

    units: float
    seconds: float
    requests: float = 0.0

    def whole(self, overhead: float) -> "Work":
        """The same with requests counted as units, of which each takes the time of `overhead`."""
        return Work(self.units + overhead * self.requests, self.seconds)

    @property
    def is_usable(self) -> bool:
        """Whether there is anything to learn from it."""
        return all(math.isfinite(each) and each > 0 for each in (self.units, self.seconds))


class Pace:
    """How many times as long as forecast a place takes for a unit, from what it took so far."""

    def __init__(self) -> None:
        self._log = 0.0
        self._last: deque[float] = deque(maxlen=NUM_COMPARED)
        self._num_observed = 0

    @property
    def factor(self) -> float:
        """From 1 / MOST_TIMES to MOST_TIMES."""
        return math.exp(self._log)

    def learn(self, times_as_long: float) -> bool:
        """Averages in an observation, which is positive; the first one replaces the forecast.

        Returns whether it is to be looked at again at once: it is one of the first, or much faster.
        """
        limit = math.log(MOST_TIMES)
        observed = max(-limit, min(limit, math.log(times_as_long)))
        is_surprise = self._num_observed < NUM_COMPARED or observed < self._log - math.log(SURPRISE)
        self._last.append(observed)
        self._num_observed += 1
        self._log += max(GAIN, 1 / self._num_observed) * (median(self._last) - self._log)
        return is_surprise


class Overhead:
    """How many units' time a request takes besides its units: by small requests beside large ones.

    Until it is known it is 0, as a forecast has it.
    """

    def __init__(self) -> None:
        self._found: deque[float] = deque(maxlen=MOST_OVERHEADS)

    @property
    def units(self) -> float:
        """From 0 to MOST_OVERHEAD."""
        return median(self._found) if len(self._found) >= NUM_OVERHEADS else 0.0

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")  # what is absurd is bounded
    def learn(self, requests: Array, units: Array, seconds: Array) -> None:
        """Takes note of parts of an update's work, of which some had larger requests than others.

        Float64 [parts] each. What is absurd is left out.
        """
        usable = np.isfinite(seconds) & np.isfinite(units) & (requests > 0) & (units > 0) & (seconds > 0)
        parts = np.stack((requests, units, seconds))[:, usable]
        ordered = parts[:, np.argsort(parts[1] / parts[0], kind="stable")]
        half = ordered.shape[1] // 2
        small, large = ordered[:, :half].sum(axis=1), ordered[:, half:].sum(axis=1)
        if not (small[0] and large[1] * small[0] >= UNLIKE * small[1] * large[0]):
            return
        # seconds = (overhead · requests + units) · seconds of a unit, of both
        of_units = small[0] * large[2] - large[0] * small[2]
        of_requests = small[2] * large[1] - large[2] * small[1]
        found = of_requests / of_units if of_units > 0 else MOST_OVERHEAD
        self._found.append(max(0.0, min(MOST_OVERHEAD, float(found))))


class Balance:
    """How work is divided between two places that are busy at the same time, so that both end together.

    A place that has no work cannot be observed. It is given a little of it then, now and then (`probes`).
    """

    def __init__(self, first_s: float, second_s: float) -> None:
        """Forecasts of the seconds of a unit."""
        self._forecast = (first_s, second_s)
        self._paces = (Pace(), Pace())
        self._silent = [MOST_PATIENCE, MOST_PATIENCE]  # updates since a place had work and no surprise

    @property
    def factors(self) -> tuple[float, float]:
        """How many times as long as forecast each place takes."""
        first, second = self._paces
        return first.factor, second.factor

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a unit, for each place."""
        first, second = (time * factor for time, factor in zip(self._forecast, self.factors, strict=True))
        return first, second

    @property
    def share(self) -> float:
        """Of the work, for the first place: from 0 to 1."""
        first, second = self.seconds
        return second / (first + second)

    @property
    def probes(self) -> tuple[bool, bool]:
        """Which places get a little of the work of the next update, if they would get none."""
        return self._is_due(0), self._is_due(1)

    def _is_due(self, place: int) -> bool:
        times_as_slow = self.seconds[place] / self.seconds[1 - place]
        patience = LITTLE * (times_as_slow - 1) / MOST_COST
        return self._silent[place] >= max(PATIENCE, min(MOST_PATIENCE, patience))

    def learn(self, first: Work, second: Work) -> None:
        """Takes note of what both places did in an update. What is absurd is left out."""
        for number, work in enumerate((first, second)):
            self._silent[number] = min(MOST_PATIENCE, self._silent[number] + 1)
            if not work.is_usable:
                continue
            ratio = work.seconds / work.units / self._forecast[number]
            if not (math.isfinite(ratio) and ratio > 0):
                continue
            looks_again = self._paces[number].learn(ratio)
            self._silent[number] = MOST_PATIENCE if looks_again else 0


class Contradiction:
    """Whether a place takes another time for a unit than it did at first."""

    def __init__(self) -> None:
        self._first: tuple[list[Work], list[Work]] = [], []
        self._last: tuple[list[Work], list[Work]] = [], []
        self.is_there = False  # for good, once it is

    def learn(self, first: Work, second: Work, overhead: float = 0.0) -> None:
        """Takes note of what both places did in an update. overhead: see `Overhead`, as it is known now."""
        for before, last, work in zip(self._first, self._last, (first, second), strict=True):
            if not work.is_usable:
                continue
            if len(before) < NUM_FIRST:
                before.append(work)
                continue
            last.append(work)
            if len(last) < NUM_COMPARED:
                continue
            difference = _usual(last, overhead) - _usual(before, overhead)
            last.clear()
            self.is_there |= abs(difference) > math.log(CONTRADICTED)


def _usual(works: Collection[Work], overhead: float) -> float:
    """The logarithm of the seconds of a unit."""
    wholes = [work.whole(overhead) for work in works]
    return median(math.log(whole.seconds) - math.log(whole.units) for whole in wholes)


class Climb:
    """Which of some ordered settings takes the least time, found by trying others than the best one so far.

    As for numbers of threads: too few leave cores idle, too many wait for each other or for other programs.
    Near ones are tried first, then farther ones, as there may be a worse one in between. Tries become rare
    while they fail, until the best one takes another time than it did.
    """

    def __init__(self, settings: Sequence[int], first: int) -> None:
        """settings: ascending. Raises ValueError unless `first` is one of them."""
        self._settings = tuple(settings)
        self._best = self._tried = self._settings.index(first)
        self._times: deque[float] = deque(maxlen=NUM_COMPARED)  # of the best setting
        self._trial: list[float] = []
        self._distances = _distances(len(self._settings))
        self._next = 0  # of the distances
        self._pause = self._wait = FIRST_PAUSE
        self._usual: float | None = None  # the best setting's time when the pause was short last

    @property
    def setting(self) -> int:
        """For the next update."""
        return self._settings[self._tried]

    @property
    def best(self) -> int:
        """The setting to which others are compared."""
        return self._settings[self._best]

    def learn(self, seconds: float) -> None:
        """Takes note of what a step took in this update, on average. What is absurd is left out."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        if self._tried != self._best:
            self._trial.append(seconds)
            if len(self._trial) == NUM_COMPARED or seconds > HOPELESS * median(self._times):
                self._decide(median(self._trial))
            return
        self._times.append(seconds)
        self._wait -= 1
        if len(self._times) < NUM_COMPARED:
            return
        found = median(self._times)
        if self._usual is None or not 1 / HOPELESS < found / self._usual < HOPELESS:
            self._usual, self._next, self._pause = found, 0, FIRST_PAUSE
            self._wait = min(self._wait, FIRST_PAUSE)
        if self._wait <= 0:
            self._try_another()

    def _try_another(self) -> None:
        for _ in self._distances:
            tried = self._best + self._distances[self._next]
            if 0 <= tried < len(self._settings):
                self._tried = tried
                return
            self._next = (self._next + 1) % len(self._distances)

    def _decide(self, seconds: float) -> None:
        if seconds < WORTHWHILE * median(self._times):
            self._best, self._pause, self._wait, self._usual = self._tried, FIRST_PAUSE, 0, seconds
            self._times.extend(self._trial)
        else:
            self._tried = self._best
            self._next = (self._next + 1) % len(self._distances)
            self._pause = min(MOST_PAUSE, 2 * self._pause)
            self._wait = self._pause
            self._times.clear()
        self._trial.clear()


def _distances(num_settings: int) -> tuple[int, ...]:
    """-1, 1, -2, 2, -4, 4, … to other settings."""
    found: list[int] = []
    distance = 1
    while distance < num_settings:
        found += (-distance, distance)
        distance *= 2
    return tuple(found)
