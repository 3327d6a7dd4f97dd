"""Whether the CPU has a part in a prefill step, on a simulated machine."""

import random
from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.cpu_part import FEWEST, HOPELESS, MOST_DEBT, STEPS_BETWEEN, CpuPart

ROWS = 2048
Time = Callable[[int], float]  # of a step, by its number


class Machine:
    """with_cpu, without: times of its steps, of which `on_bus` are the bus's. noise: of a time's logarithm.
    held_up: the odds that another program holds a step up, which then takes up to four times as long.
    """

    def __init__(
        self,
        with_cpu: Time,
        without: Time,
        on_bus: Time = lambda _: 0.0,
        noise: float = 0.0,
        held_up: float = 0.0,
    ) -> None:
        self.part, self._rng = CpuPart(), random.Random(1)
        self._times, self._on_bus = {True: with_cpu, False: without}, on_bus
        self._noise, self._held_up = noise, held_up
        self.ways: list[bool] = []
        self.seconds = self.least = 0.0  # what steps took without noise, and what the better ways would have

    def run(self, count: int, rows: int = ROWS) -> "Machine":
        for _ in range(count):
            number, way = len(self.ways), self.part.choose(rows)
            seconds = self._times[way](number)
            self.seconds += seconds
            self.least += min(time(number) for time in self._times.values())
            seen = seconds * self._rng.lognormvariate(0.0, self._noise)
            if self._rng.random() < self._held_up:
                seen *= self._rng.uniform(1.5, 4.0)
            self.part.learn(rows, seen, self._on_bus(number), with_cpu=way)
            self.ways.append(way)
        return self


def always(seconds: float) -> Time:
    return lambda _: seconds


times = st.floats(0.1, 10)


@given(with_cpu=times, without=times)
def test_it_settles_on_the_faster_way_in_a_few_steps(with_cpu: float, without: float) -> None:
    machine = Machine(always(with_cpu), always(without)).run(10 * STEPS_BETWEEN)
    assert machine.ways[0], "it begins with the CPU"
    assert False in machine.ways[: FEWEST + 1], "and tries the other way early"
    if max(with_cpu, without) > 1.03 * min(with_cpu, without):
        settled = machine.ways[2 * FEWEST : 2 * FEWEST + STEPS_BETWEEN - 1]
        assert set(settled) == {with_cpu < without}
    tries = 2 * FEWEST * max(with_cpu, without)
    assert machine.seconds <= 1.05 * machine.least + 2 * tries


@given(seed=st.integers(0, 1000), ratio=st.floats(1.1, 2.0), cpu_is_faster=st.booleans())
def test_noise_and_steps_that_are_held_up_cost_little(seed: int, ratio: float, cpu_is_faster: bool) -> None:
    fast, slow = always(1.0), always(ratio)
    order = (fast, slow) if cpu_is_faster else (slow, fast)
    machine = Machine(*order, noise=0.03, held_up=0.02)
    machine._rng.seed(seed)
    machine.run(400)
    # Both steps of a first try may be held up.
    assert machine.seconds <= 1.03 * machine.least + (4 * FEWEST + 2 * STEPS_BETWEEN) * (ratio - 1)


def test_one_step_of_a_try_that_is_held_up_does_not_decide() -> None:
    machine = Machine(always(1.0), lambda number: 2.5 if number == FEWEST else 0.7).run(3 * FEWEST + 2)
    assert not any(machine.ways[FEWEST:])


@pytest.mark.parametrize(("with_cpu", "without"), [(0.145, 0.110), (0.110, 0.145)])
def test_rates_that_are_new_to_the_first_steps_do_not_decide_for_long(
    with_cpu: float, without: float
) -> None:
    """Three times as long at first, and right after eight steps."""

    def learning(seconds: float) -> Time:
        return lambda number: seconds * (1 + 2 * max(0.0, 1 - number / 8))

    ways = Machine(learning(with_cpu), learning(without)).run(6 * STEPS_BETWEEN).ways
    assert mean(way == (with_cpu < without) for way in ways[2 * STEPS_BETWEEN :]) > 0.85


@given(before=st.booleans(), at=st.integers(10, 60), noise=st.sampled_from([0.0, 0.03]))
def test_a_machine_that_changes_is_looked_at_again(before: bool, at: int, noise: float) -> None:
    """The way that it takes becomes much slower, as where another program takes half of the cores."""
    machine = Machine(
        lambda number: 1.0 if (number < at) == before else 2.0,
        lambda number: 1.0 if (number < at) != before else 2.0,
        noise=noise,
    ).run(at + 60)
    right = [way == (before == (number < at)) for number, way in enumerate(machine.ways)]
    assert mean(right[at + 3 * FEWEST :]) > 0.85


@given(drift=st.floats(0.002, 0.05), noise=st.sampled_from([0.0, 0.03]))
def test_a_slow_drift_is_seen(drift: float, noise: float) -> None:
    machine = Machine(lambda number: 0.7 * (1 + drift) ** number, always(1.0), noise=noise)
    machine.run(round(150 * 0.01 / drift) + 60)
    assert machine.seconds < 1.12 * machine.least


@given(period=st.integers(1, 100), noise=st.sampled_from([0.0, 0.03]))
def test_modes_that_flip_cost_no_more_than_the_better_fixed_way(period: int, noise: float) -> None:
    with_cpu: Time = lambda number: 1.0 if number // period % 2 else 2.0  # noqa: E731
    machine = Machine(with_cpu, always(1.4), noise=noise).run(600)
    fixed = min(sum(map(with_cpu, range(600))), 1.4 * 600)
    assert machine.seconds <= 1.06 * fixed


@given(ratio=st.floats(1.2, 50.0))
def test_the_loss_of_tries_is_bounded(ratio: float) -> None:
    """In all, though the faster way's time jumps up and down all the time."""
    machine = Machine(lambda number: 1.0 if number // 7 % 2 else 1.5, always(1.5 * ratio)).run(700)
    one_try = FEWEST * (1.5 * ratio if ratio < HOPELESS else 1.5 * ratio / FEWEST)
    assert machine.seconds <= 1.03 * machine.least + 2 * one_try + 3 * MOST_DEBT


def test_where_the_bus_alone_takes_longer_nothing_else_is_tried() -> None:
    steps = 3 * STEPS_BETWEEN
    assert all(Machine(always(1.0), always(0.5), on_bus=always(1.01)).run(steps).ways)
    assert not all(Machine(always(1.0), always(0.5), on_bus=always(0.99)).run(steps).ways)
    slower_bus = Machine(always(1.0), always(0.5), on_bus=lambda number: 1.01 if number < 9 else 0.5)
    assert slower_bus.run(steps).ways.index(False) == 10


@given(slower=st.floats(1.3, 10.0), unusual=st.integers(1, 3))
def test_one_step_that_the_bus_held_up_by_itself_ends_a_try(slower: float, unusual: int) -> None:
    """Also one that does something for the first time, as all do at first. The fastest copies of steps with
    the CPU had promised more.
    """
    part, ways = CpuPart(), []
    for _ in range(3 * STEPS_BETWEEN):
        way = part.choose(ROWS)
        ways.append(way)
        on_bus = 0.5 if way else slower
        seconds = 1.0 if way else 1.2 * slower
        part.learn(ROWS, seconds, on_bus, with_cpu=way, is_usual=ways.count(way) > unusual)
    assert ways.count(False) == 1
    assert ways.index(False) == unusual + FEWEST


@given(faster=st.floats(0.2, 0.9), unusual=st.integers(1, 3), longer=st.floats(1.0, 9.0))
def test_what_a_step_does_for_the_first_time_does_not_end_a_try(
    faster: float, unusual: int, longer: float
) -> None:
    part, ways = CpuPart(), []
    for _ in range(2 * STEPS_BETWEEN):
        way = part.choose(ROWS)
        ways.append(way)
        is_usual = ways.count(way) > unusual
        seconds = (1.0 if way else faster) * (1.0 if is_usual else longer)
        part.learn(ROWS, seconds, 0.9 * faster, with_cpu=way, is_usual=is_usual)
    first = unusual + FEWEST
    assert not any(ways[first : first + STEPS_BETWEEN])


@given(rows=st.integers(513, 2048))
def test_steps_of_other_lengths_choose_for_themselves(rows: int) -> None:
    machine = Machine(always(2.0), always(1.0)).run(3 * FEWEST)
    assert not machine.ways[-1]
    far = rows < ROWS / 1.2
    assert machine.part.choose(rows) or not far
    assert not machine.part.choose(ROWS - 1)


@pytest.mark.parametrize("absurd", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_absurd_is_left_out(absurd: float) -> None:
    machine = Machine(always(1.0), always(2.0)).run(STEPS_BETWEEN)
    for way in (True, False):
        machine.part.learn(ROWS, absurd, 0.0, with_cpu=way)
    assert machine.run(3).ways[-1]
