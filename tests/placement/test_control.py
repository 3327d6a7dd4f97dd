"""Controllers find about the best fixed setting of a simulated machine, whatever they begin with."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
import pytest

from coldstream.placement.control import (
    MOST_OVERHEAD,
    MOST_TIMES,
    NUM_FIRST,
    Balance,
    Climb,
    Contradiction,
    Overhead,
    Pace,
    Work,
)

UNITS = 320  # experts of an update, over all layers
STEPS_OF_AN_UPDATE = 4
UPDATES = 100 // STEPS_OF_AN_UPDATE
PROBED = UNITS // 40  # of one layer

Times = Callable[[int], tuple[float, float]]  # seconds of a unit on both places, by update


def divided(times: tuple[float, float]) -> int:
    """The whole number of units of the first place with which both take the least time."""
    about = int(UNITS * times[1] / (times[0] + times[1]))
    return min((about, about + 1), key=lambda count: max(count * times[0], (UNITS - count) * times[1]))


@dataclass
class Machine:
    """Two places that work at the same time. What is seen of them is noisy, and now and then far too long."""

    times: Times
    noise: float = 0.1
    generator: random.Random = field(default_factory=lambda: random.Random(1))

    def update(
        self, number: int, expected: tuple[float, float], probes: tuple[bool, bool] = (False, False)
    ) -> tuple[tuple[Work, Work], float]:
        """What is seen of both places, and the seconds that the update takes without what disturbs it.

        expected: seconds of a unit, by which the units are divided.
        """
        first = divided(expected)
        first = max(first, PROBED if probes[0] else 0)
        first = min(first, UNITS - (PROBED if probes[1] else 0))
        units, times = (first, UNITS - first), self.times(number)
        seconds = [count * time for count, time in zip(units, times, strict=True)]
        seen = [Work(count, each * self._disturbance()) for count, each in zip(units, seconds, strict=True)]
        return (seen[0], seen[1]), max(seconds)

    def _disturbance(self) -> float:
        held_up = 20.0 if self.generator.random() < 0.02 else 1.0
        return held_up * math.exp(self.generator.gauss(0, self.noise))


def run(balance: Balance, machine: Machine, updates: range) -> list[float]:
    """Seconds of these updates."""
    found = []
    for number in updates:
        seen, seconds = machine.update(number, balance.seconds, balance.probes)
        balance.learn(*seen)
        found.append(seconds)
    return found


def best_fixed(times: Times, updates: range) -> float:
    """Of the best of all fixed shares, the mean seconds of these updates."""
    machine = Machine(times)
    shares = [number / 80 for number in range(1, 80)]
    fixed = [(1e-3, 1.0), *((1 - share, share) for share in shares), (1.0, 1e-3)]
    return min(mean(machine.update(number, times)[1] for number in updates) for times in fixed)


RATIOS = (1 / 20, 1 / 3, 1.0, 3.0, 20.0)
WRONG = (0.1, 1.0, 10.0)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(("first", "second"), itertools.product(WRONG, WRONG))
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_forecast_that_is_ten_times_wrong_costs_some_tens_of_steps(
    ratio: float, first: float, second: float
) -> None:
    def times(number: int) -> tuple[float, float]:
        return 1e-5 * ratio, 1e-5

    balance = Balance(first * 1e-5 * ratio, second * 1e-5)
    machine = Machine(times)
    run(balance, machine, range(UPDATES))
    later = range(UPDATES, 12 * UPDATES)
    assert mean(run(balance, machine, later)) <= 1.1 * best_fixed(times, later)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("times_as_slow", [2.0, 10.0])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_load_that_comes_and_goes_is_followed(ratio: float, times_as_slow: float, slow: int) -> None:
    """Within a hundred steps of each change."""

    def times(number: int) -> tuple[float, float]:
        both = [1e-5 * ratio, 1e-5]
        if 50 <= number < 100:
            both[slow] *= times_as_slow
        return both[0], both[1]

    machine, balance = Machine(times), Balance(1e-5 * ratio, 1e-5)
    found = run(balance, machine, range(300))
    for begin, end in ((UPDATES, 50), (50 + UPDATES, 100), (100 + UPDATES, 300)):
        assert mean(found[begin:end]) <= 1.1 * best_fixed(times, range(begin, end))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_drift_is_followed(slow: int) -> None:
    def times(number: int) -> tuple[float, float]:
        both = [1e-5, 2e-5]
        both[slow] *= 1.01**number
        return both[0], both[1]

    found = run(Balance(1e-4, 2e-5), Machine(times), range(400))
    for begin in range(UPDATES, 400, 75):
        updates = range(begin, begin + 75)
        assert mean(found[begin : begin + 75]) <= 1.1 * best_fixed(times, updates)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 50])
@pytest.mark.parametrize("slow", [0, 1])
def test_two_modes_that_flip_are_not_chased(period: int, slow: int) -> None:
    def times(number: int) -> tuple[float, float]:
        both = [1e-5, 1e-5]
        if number // period % 2:
            both[slow] *= 2
        return both[0], both[1]

    found = run(Balance(1e-4, 1e-5), Machine(times), range(600))
    later = range(100, 600)
    assert mean(found[100:]) <= 1.1 * best_fixed(times, later)


def test_a_place_without_work_is_tried_again() -> None:
    """So that it is found once it has become faster."""

    def times(number: int) -> tuple[float, float]:
        return (1e-3 if number < 200 else 1e-5), 1e-6

    balance, machine = Balance(1e-3, 1e-6), Machine(times)
    run(balance, machine, range(200))
    assert divided(balance.seconds) == 0
    run(balance, machine, range(200, 300))
    assert balance.share == pytest.approx(1 / 11, rel=0.5)


ABSURD = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 1e-308, 5e-324, 1.0)


def test_no_input_makes_a_share_that_is_none() -> None:
    balance = Balance(1e-5, 1e-5)
    for values in itertools.product(ABSURD, repeat=4):
        balance.learn(Work(*values[:2]), Work(*values[2:]))
        assert 0 <= balance.share <= 1
        assert all(factor * (1 + 1e-9) >= 1 / MOST_TIMES for factor in balance.factors)
        assert all(factor <= MOST_TIMES * (1 + 1e-9) for factor in balance.factors)
    machine = Machine(lambda number: (3e-5, 1e-5))
    run(balance, machine, range(UPDATES))
    assert balance.share == pytest.approx(0.25, rel=0.25), "and it is forgotten"


def test_one_update_that_is_held_up_hardly_moves_a_share() -> None:
    balance = Balance(1e-5, 1e-5)
    for _ in range(10):
        balance.learn(Work(100, 1e-3), Work(100, 1e-3))
    balance.learn(Work(100, 1.0), Work(100, 1e-3))
    assert balance.share == pytest.approx(0.5)


def test_a_pace_moves_by_parts_and_without_overshooting() -> None:
    pace = Pace()
    pace.learn(1.0)
    factors = []
    for _ in range(30):
        pace.learn(10.0)
        factors.append(pace.factor)
    assert factors == sorted(factors)
    assert factors[1] < 6
    assert 9.5 < factors[-1] <= 10 * (1 + 1e-9)


def threads_time(free: float, count: int) -> float:
    """Of a step whose threads wait for the slowest: those beyond the free cores share one with others."""
    return 1 / count * (1 if count <= free else 2.5) + 0.002 * count


@pytest.mark.parametrize("first", [1, 4, 8, 15])
@pytest.mark.parametrize("free", [2, 8, 15])
def test_a_number_of_threads_is_found_from_any_other(first: int, free: int) -> None:
    settings, generator = range(1, 16), random.Random(1)
    climb = Climb(settings, first)
    found = []
    for _ in range(400):
        seconds = threads_time(free, climb.setting)
        found.append(seconds)
        climb.learn(seconds * math.exp(generator.gauss(0, 0.005)))
    best = min(threads_time(free, count) for count in settings)
    assert threads_time(free, climb.best) <= 1.1 * best
    assert mean(found[200:]) <= 1.1 * best


def test_threads_are_given_up_and_taken_again_as_a_load_comes_and_goes() -> None:
    climb, found = Climb(range(1, 16), 15), []
    for number in range(900):
        found.append(threads_time(8 if 300 <= number < 600 else 15, climb.setting))
        climb.learn(found[-1])
    assert mean(found[250:300]) <= 1.1 * threads_time(15, 15)
    assert mean(found[500:600]) <= 1.1 * threads_time(8, 8)
    assert mean(found[800:]) <= 1.1 * threads_time(15, 15)


def test_absurd_times_of_threads_change_nothing() -> None:
    climb = Climb((1, 2, 4), 2)
    for _, seconds in itertools.product(range(20), (math.nan, math.inf, 0.0, -1.0)):
        climb.learn(seconds)
    assert (climb.setting, climb.best) == (2, 2)
    with pytest.raises(ValueError, match="not in tuple"):
        Climb((1, 2, 4), 3)


def test_one_setting_is_kept() -> None:
    climb = Climb((3,), 3)
    for _ in range(100):
        climb.learn(1.0)
        assert climb.setting == climb.best == 3


@pytest.mark.parametrize("times", [2.0, 0.5])
@pytest.mark.parametrize("place", [0, 1])
def test_a_place_that_has_changed_contradicts(times: float, place: int) -> None:
    generator = random.Random(1)
    contradiction = Contradiction()

    def learn(seconds: list[float]) -> None:
        works = [Work(9, 9 * each * math.exp(generator.gauss(0, 0.1))) for each in seconds]
        contradiction.learn(*works)

    for _ in range(200):
        learn([1e-5, 2e-5])
    assert not contradiction.is_there
    changed = [1e-5, 2e-5]
    changed[place] *= times
    for _ in range(6):
        learn(changed)
    assert contradiction.is_there


def test_updates_that_are_held_up_do_not_contradict() -> None:
    contradiction = Contradiction()
    for number in range(300):
        held_up = 20.0 if number % 9 == 0 else 1.0
        contradiction.learn(Work(9, 9e-5 * held_up), Work(0, 0.0))
    assert not contradiction.is_there
    for _ in range(NUM_FIRST):
        contradiction.learn(Work(0, 1e-5), Work(9, math.nan))
    assert not contradiction.is_there


def parts(
    generator: np.random.Generator, overhead: float, noise: float, most: int = 8
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of 40 layers, whose requests have 1 to `most` units, more in the later ones."""
    requests, units = np.full(40, 4.0), 4 * np.linspace(1, most, 40)
    seconds = 1e-5 * (units + overhead * requests) * np.exp(noise * generator.normal(size=40))
    return requests, units, seconds


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("overhead", [0.0, 0.5, 2.0])
def test_an_overhead_is_found_by_requests_of_different_sizes(overhead: float, noise: float) -> None:
    found, generator = Overhead(), np.random.default_rng(1)
    for number in range(25):
        requests, units, seconds = parts(generator, overhead, noise)
        if number % 9 == 0:
            seconds[number] *= 20  # held up
        found.learn(requests, units, seconds)
    assert found.units == pytest.approx(overhead, abs=0.15)


def test_requests_of_one_size_say_nothing_of_their_overhead() -> None:
    found = Overhead()
    for _ in range(25):
        found.learn(*parts(np.random.default_rng(1), 2.0, 0.1, most=1))
        found.learn(*np.zeros((3, 0)))
    assert found.units == 0


def test_no_input_makes_an_overhead_that_is_none() -> None:
    found = Overhead()
    for values in itertools.product(ABSURD, repeat=3):
        found.learn(*np.array([values, (1.0, 1.0, 1.0)]).T)
        found.learn(*np.array([(1.0, 1.0, 1.0), values, (1.0, 3.0, 1.5)]).T)
        assert 0 <= found.units <= MOST_OVERHEAD
