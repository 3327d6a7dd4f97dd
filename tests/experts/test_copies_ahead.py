"""The number of copies ahead is the one that takes the least time, wherever a run begins."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from coldstream.experts.copies_ahead import LEAST_SHARE, CopiesAhead

MOST = 3
UPDATES = 25  # of a hundred tokens
Curve = Sequence[float]  # what a missing expert takes with 0, 1, … copies ahead
CURVES: tuple[Curve, ...] = (
    (1.0, 1.03, 1.06, 1.1),
    (1.1, 1.05, 1.0, 1.02),
    (1.1, 1.0, 1.08, 1.12),
    (1.2, 1.1, 1.05, 1.0),
    (1.0, 1.3, 1.3, 1.3),
    (1.3, 1.0, 1.3, 1.3),
    (1.15, 1.15, 1.0, 1.15),
    (1.0, 1.0, 1.0, 1.0),
)


class Machine:
    """Steps that take times of a curve. times: the curve and how loaded the machine is, by update."""

    def __init__(
        self, times: Callable[[int], tuple[Curve, float]], noise: float = 0.0, seed: int = 0
    ) -> None:
        self._times, self._noise, self._rng = times, noise, np.random.default_rng(seed)
        self._num_updates, self._last = 0, -1
        self.ratios: list[float] = []  # of each update's time to the best possible

    def run(
        self,
        ahead: CopiesAhead,
        updates: int,
        *,
        share: float = 0.7,
        may_try: bool = True,
        forecast: Curve = (),
    ) -> None:
        for _ in range(updates):
            curve, load = self._times(self._num_updates)
            took = curve[ahead.count]
            if self._last not in (-1, ahead.count):  # steps of both, and one that is captured
                took = 3 * max(curve)
            self._last = ahead.count
            self.ratios.append(curve[ahead.count] / min(curve))
            slow = math.exp(self._noise * self._rng.normal())
            seconds = 20e-6 * took * load * slow
            ahead.learn(seconds, share, MOST, may_try=may_try, forecast=forecast)
            self._num_updates += 1


def staying(curve: Curve) -> Callable[[int], tuple[Curve, float]]:
    return lambda _: (curve, 1.0)


@pytest.mark.parametrize("first", range(MOST + 1))
@pytest.mark.parametrize("curve", CURVES)
def test_the_best_number_is_found_in_a_hundred_tokens_from_any_beginning(curve: Curve, first: int) -> None:
    """And what looking for it costs later is within a few percent, with noise."""
    ahead, machine = CopiesAhead(0, MOST, first), Machine(staying(curve))
    machine.run(ahead, UPDATES)
    assert curve[ahead.best] <= 1.02 * min(curve)
    found, later = [], []
    for seed in range(20):
        ahead, machine = CopiesAhead(0, MOST, first), Machine(staying(curve), 0.03, seed)
        machine.run(ahead, UPDATES)
        found.append(curve[ahead.best] / min(curve))
        machine.run(ahead, 8 * UPDATES)
        later += machine.ratios[UPDATES:]
    assert np.mean(found) <= 1.02
    assert np.mean(later) <= 1.03


@pytest.mark.parametrize("first", range(MOST + 1))
def test_load_that_comes_and_goes_costs_little(first: int) -> None:
    curve = (1.15, 1.05, 1.0, 1.02)
    machine = Machine(lambda number: (curve, 2.0 if number // 30 % 2 else 1.0), 0.03)
    machine.run(CopiesAhead(0, MOST, first), 20 * UPDATES)
    assert np.mean(machine.ratios[UPDATES:]) <= 1.04


def test_a_machine_that_drifts_changes_nothing() -> None:
    curve = (1.15, 1.05, 1.0, 1.02)
    machine = Machine(lambda number: (curve, 1 + number / 200), 0.03)
    machine.run(CopiesAhead(0, MOST, 0), 20 * UPDATES)
    assert np.mean(machine.ratios[UPDATES:]) <= 1.03


@pytest.mark.parametrize("first", [0, MOST])
def test_another_number_is_used_once_it_is_the_best(first: int) -> None:
    """As when another program takes the bus, or gives it back. Within two hundred tokens each time."""
    slow_bus, slow_cpu = (1.0, 1.3, 1.6, 1.9), (1.9, 1.6, 1.3, 1.0)
    curves = [slow_bus, slow_cpu, slow_bus, slow_cpu]
    ahead, period = CopiesAhead(0, MOST, first), 6 * UPDATES
    machine = Machine(lambda number: (curves[number // period], 1.0), 0.03)
    for curve in curves:
        machine.run(ahead, 2 * UPDATES)
        assert curve[ahead.best] == min(curve)
        machine.run(ahead, period - 2 * UPDATES)


@pytest.mark.parametrize("period", [5, 20, 80])
def test_two_modes_that_flip_cost_no_more_than_the_worst_number_that_stays(period: int) -> None:
    modes = (1.0, 1.03, 1.06, 1.15), (1.15, 1.05, 1.0, 1.0)
    machine = Machine(lambda number: (modes[number // period % 2], 1.0), 0.03)
    machine.run(CopiesAhead(0, MOST, MOST), 20 * UPDATES)
    fixed = [np.mean([mode[count] / min(mode) for mode in modes]) for count in range(MOST + 1)]
    assert np.mean(machine.ratios[UPDATES:]) <= max(fixed)


def test_one_that_is_much_slower_is_left_at_once_and_seldom_tried_again() -> None:
    ahead, machine = CopiesAhead(0, 1, 0), Machine(staying((1.0, 3.0)), 0.01)
    machine.run(ahead, 10 * UPDATES)
    assert ahead.best == 0
    assert sum(ratio > 1 for ratio in machine.ratios) <= 4
    assert machine.ratios[4] == 3.0, "it was tried"


def test_nothing_is_tried_where_little_is_missing_or_another_trial_runs() -> None:
    for share, may_try in ((0.9 * LEAST_SHARE, True), (0.9, False)):
        ahead, machine = CopiesAhead(0, MOST, 2), Machine(staying(CURVES[0]))
        machine.run(ahead, 4 * UPDATES, share=share, may_try=may_try)
        assert set(machine.ratios) == {CURVES[0][2]}
    ahead, machine = CopiesAhead(0, MOST, 2), Machine(staying(CURVES[0]))
    while not ahead.is_trying:
        machine.run(ahead, 1)
    machine.run(ahead, 2, share=0.0)
    assert ahead.count == 2, "a trial ends where it can no longer say anything"


def test_numbers_that_make_no_difference_are_not_tried() -> None:
    ahead, used = CopiesAhead(0, MOST, MOST), set()
    for _ in range(4 * UPDATES):
        used.add(ahead.count)
        ahead.learn(1e-5, 0.7, 1)
    assert used == {0, MOST}


@pytest.mark.parametrize("first", range(MOST + 1))
def test_where_no_copy_comes_in_time_none_is_made_nor_tried(first: int) -> None:
    """With any, the bus reads none in place. Until one comes in time again."""
    ahead, machine, used = CopiesAhead(0, MOST, first), Machine(staying(CURVES[3])), set()
    for _ in range(4 * UPDATES):
        ahead.learn(1e-5, 0.7, 0)
        used.add(ahead.count)
    assert used == {0}
    machine.run(ahead, 2 * UPDATES)
    assert CURVES[3][ahead.best] <= 1.02 * min(CURVES[3])
    fixed = CopiesAhead(first, first, first)
    fixed.learn(1e-5, 0.7, 0)
    assert fixed.count == first, "what is fixed stays"


@pytest.mark.parametrize("first", range(MOST + 1))
def test_what_is_much_slower_by_forecast_is_not_among_the_first_that_are_tried(first: int) -> None:
    """But later, now and then, as a forecast may be wrong."""
    curve = (1.0, 1.05, 1.3, 1.6)
    machine, ahead, used = Machine(staying(curve)), CopiesAhead(0, MOST, first), list[int]()
    for _ in range(20 * UPDATES):
        machine.run(ahead, 1, forecast=curve)
        used.append(ahead.count)
    begin = used.index(0)
    assert set(used[begin:16]) <= {0, 1}, "what is smaller is tried, and what is not much slower"
    assert set(used) == {0, 1, 2, 3}
    assert ahead.best == 0
    wrong = tuple(reversed(curve))
    machine = Machine(staying(curve))
    ahead = CopiesAhead(0, MOST, MOST)
    machine.run(ahead, 8 * UPDATES, forecast=wrong)
    assert ahead.best == 0


def test_what_is_fixed_stays() -> None:
    for count in range(MOST + 1):
        ahead, machine = CopiesAhead(count, count, count), Machine(staying(CURVES[0]))
        machine.run(ahead, 4 * UPDATES)
        assert ahead.count == count
    for wrong in ((1, 3, 0), (0, 3, 4), (-1, 3, 0), (2, 1, 2)):
        with pytest.raises(ValueError, match="copies ahead begin with"):
            CopiesAhead(*wrong)


def test_absurd_times_are_left_out() -> None:
    ahead, rng = CopiesAhead(0, MOST, 1), np.random.default_rng(0)
    for _ in range(500):
        seconds, share = rng.choice([math.nan, math.inf, -1.0, 0.0, 1e-300, 1e300, 1e-5], 2)
        ahead.learn(float(seconds), float(share), int(rng.integers(-1, 20)))
        assert 0 <= ahead.count <= MOST
    machine = Machine(staying((1.3, 1.0, 1.3, 1.3)))
    machine.run(ahead, 40 * UPDATES)
    assert ahead.best == 1


def test_tries_are_bounded_where_the_machine_changes_all_the_time_and_where_nothing_does() -> None:
    curve = (1.0, 3.0)
    machine = Machine(lambda number: (curve, 2.0 if number // 12 % 2 else 1.0))
    machine.run(CopiesAhead(0, 1, 0), 40 * UPDATES)
    assert np.mean(machine.ratios) <= 1.03
    ahead, machine, num_tried = CopiesAhead(0, 1, 0), Machine(staying((1.0, 1.0))), 0
    for _ in range(40 * UPDATES):
        machine.run(ahead, 1)
        num_tried += ahead.is_trying
    assert 0 < num_tried <= 4 * UPDATES
