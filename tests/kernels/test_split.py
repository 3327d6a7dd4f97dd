"""The choice of who reads a missing expert: no other choice of the same order is faster, by definition."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS
from coldstream.kernels.experts.split import (
    BY_FETCHES,
    BY_MISSES,
    BY_SHARED_CPU,
    BY_SHARED_FETCHES,
    MAX_NS,
    NUM_WORDS,
    WHOLE,
    MissTimes,
    streamed_experts,
)

FLAT = (50,) * MAX_MAILBOX_ROWS
rows = st.lists(st.one_of(st.integers(1, 12), st.integers(60, 512)), max_size=10)


@st.composite
def miss_times(draw: st.DrawFn) -> MissTimes:
    time, share = st.integers(1, 3000), st.integers(1, WHOLE)
    grown = draw(st.lists(st.integers(0, 300), min_size=MAX_MAILBOX_ROWS, max_size=MAX_MAILBOX_ROWS))
    cpu = [draw(time)]
    for more in grown[1:]:
        cpu.append(cpu[-1] + more)
    return MissTimes(draw(time), tuple(cpu), draw(st.integers(0, 500)), draw(share), draw(share), draw(time))


def split_at(numbers: list[int], count: int) -> tuple[int, list[int]]:
    return count, sorted(numbers, reverse=True)[count:]


@given(rows, miss_times(), st.integers(0, 12))
def test_no_number_is_faster_and_none_as_fast_is_less(
    numbers: list[int], times: MissTimes, most: int
) -> None:
    taken = [times.nanoseconds(*split_at(numbers, number)) for number in range(len(numbers) + 1)]
    assert times.num_streamed(numbers) == taken.index(min(taken))
    possible = taken[: most + 1]
    assert times.num_streamed(numbers, most) == possible.index(min(possible))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=7), miss_times())
@settings(max_examples=60)
def test_no_other_experts_of_that_number_are_better(numbers: list[int], times: MissTimes) -> None:
    """The bus takes as long for each, the CPU longest for those of the most rows."""
    count = times.num_streamed(numbers)
    chosen = times.nanoseconds(*split_at(numbers, count))
    for by_bus in combinations(range(len(numbers)), count):
        by_cpu = [rows for i, rows in enumerate(numbers) if i not in by_bus]
        assert times.nanoseconds(count, by_cpu) >= chosen


def test_cpu_and_bus_end_at_about_the_same_time() -> None:
    times = MissTimes(100, FLAT)
    assert times.num_streamed([1] * 30) == 10
    assert times.nanoseconds(10, [1] * 20) == 1000
    slow_cpu = MissTimes(100, tuple(50 * rows for rows in range(1, MAX_MAILBOX_ROWS + 1)))
    assert slow_cpu.num_streamed([10, 1, 1, 1]) == 1, "one read is for ten rows"


def test_rows_beyond_those_measured_take_the_cpu_as_much_for_each() -> None:
    times = MissTimes(100, tuple(range(10, 10 + MAX_MAILBOX_ROWS)))
    assert [times.cpu_time(rows) for rows in (1, 64, 65, 128, 512)] == [10, 73, 74, 146, 584]
    assert times.nanoseconds(0, [128, 1]) == 156
    assert times.num_streamed([128, 1, 1]) == 1


def test_one_side_alone_is_faster_than_beside_the_other() -> None:
    times = MissTimes(100, FLAT, answer=10, bus_left=512, cpu_left=256)
    assert times.nanoseconds(4, []) == 200
    assert times.nanoseconds(0, [1] * 4) == 10 + 50
    assert times.nanoseconds(1, [1] * 4) == 10 + 80 + 120 // 4
    assert times.nanoseconds(3, [1]) == 10 + 50 + 230 // 2


def test_the_first_of_equals_is_streamed() -> None:
    times = MissTimes(50, FLAT)
    ids = [[9, 4, 1], [2, 4, 9], [3, 5, 9]]
    assert streamed_experts(ids, [1, 2, 3, 4, 5, 9], times) == {9, 4, 1}
    assert streamed_experts([row[::-1] for row in ids[::-1]], [1, 2, 3, 4, 5, 9], times) == {9, 4, 1}
    assert streamed_experts(ids, [1, 2, 3, 4, 5, 9], times, most=2) == {9, 4}
    assert streamed_experts(ids, [2, 3, 5], times) == {2}
    assert streamed_experts(ids, [], times) == set()
    assert times.by_misses(4) == (0, 0, 1, 1, 2)


def test_a_step_of_one_row_has_a_time_of_its_own() -> None:
    times, fast = MissTimes(100, FLAT, row_bus=50), MissTimes(50, FLAT)
    assert times.by_misses(8) == fast.by_misses(8) != MissTimes(100, FLAT).by_misses(8)
    assert times.num_streamed([1] * 8) < times.by_misses(8)[-1]


def test_words_are_what_the_device_reads() -> None:
    times = MissTimes(7, tuple(range(1, MAX_MAILBOX_ROWS + 1)), 3, 900, 800)
    words = times.words()
    assert len(words) == NUM_WORDS
    assert words[:7] == (7, 3, 3 * 1024 // 900, 900, 800, 1, 2)
    assert words[BY_MISSES] == times.by_misses(MAX_RANKS)
    assert not any((*words[BY_FETCHES], *words[BY_SHARED_FETCHES]))
    assert times.words(recall=1.0) == words, "of a layer that takes an unknown time"
    assert replace(times, layer=20).words() == words, "where nothing is copied ahead"
    ahead = replace(times, layer=20).words(recall=1.0)
    assert ahead[: BY_MISSES.start] == words[: BY_MISSES.start]
    assert not any(ahead[BY_MISSES])
    assert ahead[BY_FETCHES] == replace(times, layer=20).by_fetches(MAX_RANKS)
    shared = replace(times, layer=20).by_shared_fetches(MAX_RANKS)
    assert ahead[BY_SHARED_FETCHES] == shared
    assert ahead[BY_SHARED_CPU] == replace(times, layer=20).by_shared_cpu(shared)


@given(times=miss_times(), layer=st.integers(1, 1000), recall=st.sampled_from([0.0, 0.3, 0.74, 0.9, 1.0]))
def test_what_is_copied_ahead_comes_in_time_and_no_other_number_is_faster(
    times: MissTimes, layer: int, recall: float
) -> None:
    """A copy takes an expert from the CPU as often as its guess is right, and time beside it always."""
    fetches = replace(times, layer=layer).by_fetches(MAX_RANKS, recall)
    for misses, fetched in enumerate(fetches):
        taken = []
        for number in range(misses + 1):
            rest, left = misses - number, misses - recall * number
            asked, cpu = min(1.0, left) * times.answer, left * times.cpu[0]
            in_time = layer + (times.answer + rest * times.cpu[0] if rest else 0)
            is_alone = misses == 1 and times.bus <= 2 * layer
            if number * times.bus <= in_time or is_alone:
                beside = min(number * times.bus, cpu)
                taken.append(asked + beside + (cpu - beside) * times.cpu_left / WHOLE)
        assert fetched == taken.index(min(taken)), "those that come in time are the first numbers"
    assert recall > 0 or not any(fetches)
    assert not any(replace(times, layer=0).by_fetches(MAX_RANKS, recall))


@given(
    times=miss_times(),
    layer=st.integers(1, 1000),
    recall=st.sampled_from([0.0, 0.74, 1.0]),
    misses=st.integers(0, MAX_RANKS),
)
def test_what_a_layer_takes_by_the_number_of_copies_ahead(
    times: MissTimes, layer: int, recall: float, misses: int
) -> None:
    """Without any the bus reads some in place. No more are copied than come in time."""
    times = replace(times, layer=layer)
    fetched = times.by_fetches(misses, recall)[misses]
    found = times.by_most_fetches(misses, MAX_RANKS, recall)
    assert len(found) == MAX_RANKS + 1
    bus = times.row_bus or times.bus
    in_place = replace(times, bus=bus)
    assert found[0] == min(in_place.nanoseconds(count, [1] * (misses - count)) for count in range(misses + 1))
    assert len(set(found[max(1, fetched) :])) == 1
    if fetched:
        assert found[fetched] == min(found[1:])
    else:
        assert found[-1] == pytest.approx(times._behind_copies(0, misses))


@given(times=miss_times(), layer=st.integers(1, 1000), recall=st.sampled_from([0.0, 0.3, 0.74, 1.0]))
def test_no_other_number_of_copies_for_several_rows_ends_earlier(
    times: MissTimes, layer: int, recall: float
) -> None:
    """Found by trying: the bus copies first what was guessed, then what it is given of the rest."""
    fetches = replace(times, layer=layer).by_shared_fetches(MAX_RANKS, recall)
    for misses in range(MAX_RANKS + 1):
        ends = []
        for number in range(misses + 1):
            left, late = misses - recall * number, max(0, number * times.bus - layer)
            parts = np.linspace(0, left, 2001)  # the CPU's
            of_all = np.maximum(late + (left - parts) * times.bus, times.answer + parts * times.cpu[0])
            ends.append(of_all.min())
        assert ends[fetches[misses]] == pytest.approx(min(ends), rel=0.01, abs=1 + times.answer / 500)
    assert recall > 0 or not any(fetches)
    assert not any(replace(times, layer=0).by_shared_fetches(MAX_RANKS, recall))


def test_of_several_rows_the_bus_copies_ahead_while_the_gpu_computes() -> None:
    """Where many are missing, CPU and bus are both busy otherwise."""
    times = MissTimes(56_000, (32_000,) * MAX_MAILBOX_ROWS, answer=13_000, layer=45_000)
    for recall in (1.0, 0.8, 0.5):
        assert times.by_shared_fetches(16, recall) == (0,) + (1,) * 16
    assert not any(times.by_shared_fetches(16, 0.15))
    on_cpu = times.by_shared_cpu((0,) + (1,) * 16)
    assert (on_cpu[1], on_cpu[8], on_cpu[16]) == (0, 4, 9)
    assert not any(replace(times, bus=200_000).by_shared_fetches(16, 0.6)), "its copies would be late"


def test_guesses_that_are_often_wrong_are_not_worth_the_buss_time() -> None:
    """The CPU's experts take a fifth longer beside copies."""
    cpu = (32_000,) * MAX_MAILBOX_ROWS
    times = MissTimes(56_000, cpu, answer=13_000, cpu_left=821, layer=45_000)
    tables = [times.by_fetches(8, recall) for recall in (1.0, 0.74, 0.5, 0.3, 0.05)]
    assert tables[0] == tables[1] == tables[2] == (0, 1, 1, 1, 2, 2, 2, 3, 3)
    assert tables[3] == (0, 1, 0, 0, 0, 0, 0, 0, 0)
    assert not any(tables[4]), "so the bus reads missing experts in place"
    assert times.words(0.05) == times.words()


def test_a_slower_cpu_leaves_time_to_copy_more() -> None:
    cpu = tuple(20_000 * rows for rows in range(1, MAX_MAILBOX_ROWS + 1))
    times = MissTimes(48_000, cpu, answer=20_000, layer=43_000)
    assert times.by_fetches(8) == (0, 1, 1, 1, 2, 2, 2, 2, 3)
    slow = replace(times, cpu=tuple(3 * each for each in cpu))
    assert all(more >= fewer for more, fewer in zip(slow.by_fetches(8), times.by_fetches(8), strict=True))
    assert slow.by_fetches(8)[8] == 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0, FLAT), "no number of nanoseconds"),
        ((5, (*FLAT[1:], 0)), "no number of nanoseconds"),
        ((MAX_NS + 1, FLAT), "no number of nanoseconds"),
        ((5, FLAT, -1), "no number of nanoseconds"),
        ((5, FLAT[1:]), "times of 63 numbers of rows"),
        ((5, FLAT, 0, WHOLE + 1), "from 1 to 1024 1024ths"),
        ((5, FLAT, 0, 1, 0), "from 1 to 1024 1024ths"),
        ((5, FLAT, 0, 1, 1, -1), "no number of nanoseconds"),
    ],
)
def test_times_that_are_none_are_refused(values: tuple[int, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MissTimes(*values)
