"""Estimates of steps' times: medians where they were measured, never cheaper than fewer rows where not."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.row_times import MAX_ROWS, RecentMedian, RowTimes, row_range

seconds = st.integers(1, 1000).map(lambda ms: ms / 1000)
rows = st.integers(1, MAX_ROWS)
RANGES = [*((n, n) for n in range(1, 9)), (9, 12), (13, 16), (17, 24), (25, 32), (33, 48), (49, 64)]


def _measured(times: dict[int, float], repeats: int = 2) -> RowTimes:
    """With these seconds by rows; the first step of each only warms it up."""
    known = RowTimes()
    for num_rows, value in times.items():
        for _ in range(repeats):
            known.record(num_rows, value)
    return known


def test_rows_are_counted_one_by_one_and_then_in_ranges() -> None:
    for number, (first, last) in enumerate(RANGES):
        assert {row_range(each) for each in range(first, last + 1)} == {number}
    for outside in (0, -1, MAX_ROWS + 1):
        with pytest.raises(AssertionError, match="1 to 64 rows"):
            row_range(outside)


def test_nothing_is_known_before_the_second_step() -> None:
    """The first with as many rows may have captured a graph or compiled a kernel."""
    times = RowTimes()
    assert times.seconds(1) is None
    times.record(1, 30.0)
    assert times.seconds(1) is None
    times.record(1, 0.01)
    assert times.seconds(1) == 0.01
    with pytest.raises(AssertionError, match="takes time"):
        times.record(1, 0.0)


@given(st.lists(seconds, min_size=1, max_size=30), st.integers(1, MAX_ROWS))
def test_where_measured_it_is_the_median_of_the_last_nine(values: list[float], num_rows: int) -> None:
    times = RowTimes()
    times.record(num_rows, 99.0)
    for value in values:
        times.record(num_rows, value)
    assert times.seconds(num_rows) == statistics.median_low(values[-9:])


@given(st.lists(st.tuples(rows, seconds), min_size=1, max_size=40))
def test_what_was_not_measured_is_monotone_and_not_cheaper_than_fewer_rows(
    steps: list[tuple[int, float]],
) -> None:
    times = RowTimes()
    seen: dict[int, list[float]] = {}
    for num_rows, value in steps:
        times.record(num_rows, value)
        seen.setdefault(row_range(num_rows), []).append(value)
    measured = {number for number, values in seen.items() if len(values) > 1}
    if not measured:
        assert times.seconds(1) is None
        return
    estimates = [times.seconds(first) for first, _ in RANGES]
    by_range = [value for value in estimates if value is not None]
    assert len(by_range) == len(RANGES)
    for number, value in enumerate(by_range):
        assert value > 0
        if number in measured:
            assert value in seen[number][1:]
            continue
        assert value >= max((by_range[each] for each in measured if each < number), default=0.0)
        others = [each for each in range(number) if each not in measured]
        assert value >= max((by_range[each] for each in others), default=0.0) - 1e-12
        if measured & set(range(number)) and (above := [each for each in measured if each > number]):
            below = [by_range[each] for each in measured if each < number]
            assert value <= max(*below, by_range[min(above)]) + 1e-12, "in between"


@pytest.mark.parametrize(
    ("known", "num_rows", "expected"),
    [
        ({1: 10.0}, 2, 13.0),
        ({1: 10.0}, 64, 10.0 * (1 + 0.3 * 63)),
        ({2: 13.0}, 1, 10.0),
        ({2: 13.0}, 4, 19.0),
        ({1: 10.0, 5: 18.0}, 3, 14.0),
        ({1: 10.0, 5: 18.0}, 8, 24.0),
        ({1: 10.0, 12: 21.0}, 9, 21.0),
        ({1: 10.0, 3: 20.0, 5: 12.0}, 4, 20.0),
        ({1: 10.0, 3: 20.0, 5: 12.0}, 6, 20.0),
        ({1: 10.0, 3: 20.0, 5: 12.0}, 5, 12.0),
        ({4: 10.0, 2: 20.0}, 3, 20.0),
    ],
)
def test_estimates_between_and_beyond(known: dict[int, float], num_rows: int, expected: float) -> None:
    assert _measured(known).seconds(num_rows) == pytest.approx(expected)


@given(st.integers(9, 30), st.integers(1, 4))
def test_some_slow_steps_change_nothing(num_steps: int, num_slow: int) -> None:
    times = _measured({4: 0.01}, num_steps + 1)
    for _ in range(num_slow):
        times.record(4, 5.0)
    assert times.seconds(4) == 0.01


def test_a_lasting_change_is_followed_in_a_few_steps() -> None:
    times = _measured({4: 0.01}, 30)
    for _ in range(6):
        times.record(4, 0.02)
    assert times.seconds(4) == 0.02


def test_where_steps_are_rare_a_new_one_outweighs_the_stale() -> None:
    """A size that was slow while something else ran is found to be fast by the first probes."""
    times = _measured({1: 0.01, 4: 0.5}, 12)
    for _ in range(3):
        for _ in range(1500):
            times.record(1, 0.01)
        times.record(4, 0.02)
        assert times.seconds(4) == 0.02


def test_what_was_not_measured_for_long_is_estimated_from_the_others() -> None:
    times = _measured({1: 0.01, 8: 0.5, 5: 0.014})
    for step in range(8200):
        times.record(1, 0.01)
        times.record(5, 0.014)
        if step % 1000 == 0 or step > 8180:
            assert times.seconds(8) == (0.5 if step < 8190 else pytest.approx(0.017))


def test_of_two_the_lower_counts() -> None:
    median = RecentMedian()
    for step, value in enumerate((100.0, 1.0, 50.0)):
        median.add(value, step)
    assert median.value == 1.0


def test_the_age_is_that_of_the_last_step_that_was_measured() -> None:
    times = RowTimes()
    times.record(1, 0.01)
    times.record(10, 0.01)
    assert (times.age(1), times.age(9), times.age(2)) == (2, 2, 2), "a first step is no measurement"
    times.record(12, 0.01)
    times.record(1, 0.01)
    assert (times.age(1), times.age(9), times.age(2)) == (0, 1, 4)


def test_steps_that_were_timed_together_count_as_one_measurement_of_a_step() -> None:
    times = RowTimes()
    for _ in range(3):
        times.record(2, 1.0, num_steps=8)
    assert times.seconds(2) == 0.125
    assert times.age(2) == 0
    assert times.age(5) == 24


def test_what_was_measured_long_ago_is_used_as_long_as_nothing_newer_is_known() -> None:
    times = _measured({1: 0.5})
    times.skip(10**6)
    assert times.seconds(1) == 0.5
    assert times.age(1) == 10**6
    for _ in range(2):
        times.record(4, 0.125)
    assert times.seconds(4) == 0.125
    assert times.seconds(1) < 0.125, "what was measured long ago counts no more"
