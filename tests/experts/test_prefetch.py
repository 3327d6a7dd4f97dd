"""How much is fetched ahead, in how many bytes, and where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")


import numpy as np

from coldstream.experts.prefetch import (
    MAX_PREFETCHED,
    GuessCounter,
    Prefetching,
    PrefetchStatistics,
    Recall,
)
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.kernels.cuda.array import ALIGNMENT

distances, counts = st.integers(1, 4), st.integers(1, MAX_PREFETCHED)


@pytest.mark.parametrize(("distance", "experts"), [(0, 1), (1, 0), (1, MAX_PREFETCHED + 1)])
def test_it_has_bounds(distance: int, experts: int) -> None:
    with pytest.raises(ValueError, match="at least 1 layer ahead"):
        Prefetching(distance, experts)


def test_trap_16_no_cap_is_negative_and_none_holds_nothing() -> None:
    with pytest.raises(ValueError, match="a cap below 0 bytes"):
        Prefetching(1, 1, -1)
    assert Prefetching(1, 1, 0).fitting(10**6, 1) is None


@given(distances, counts, st.integers(0, 10_000), st.integers(0, 500), st.none() | st.integers(0, 10_000))
def test_what_fits_is_as_much_as_finds_places(
    distance: int, experts: int, num_bytes: int, expert_bytes: int, cap_bytes: int | None
) -> None:
    fitting = Prefetching(distance, experts, cap_bytes).fitting(num_bytes, expert_bytes)
    room = num_bytes if cap_bytes is None else min(cap_bytes, num_bytes)
    count = 0 if fitting is None else fitting.experts
    one_each = (distance + 1) * max(1, expert_bytes)
    assert count * one_each <= room
    if count < experts:
        assert (count + 1) * one_each > room
    if fitting is not None:
        assert (fitting.distance, fitting.cap_bytes) == (distance, count * one_each)
        assert fitting.fitting(num_bytes, expert_bytes) == fitting, "what was decided stays"


@given(distances, st.integers(1, 8), st.integers(0, 3 * ALIGNMENT))
def test_places_are_aligned_apart_and_within_the_memory(distance: int, experts: int, rest: int) -> None:
    data = torch.zeros((distance + 1) * experts * ALIGNMENT + rest, dtype=torch.uint8)
    ring = PrefetchRing(
        Prefetching(distance, experts), data, lambda shape, dtype: torch.zeros(shape, dtype=torch.int32), 6
    )
    assert ring.num_bytes <= data.numel()
    begins = []
    for layer in range(distance, 2 * distance + 1):
        room = ring.prefetched(layer, ()).room
        assert room.count == experts
        assert room.place_bytes % ALIGNMENT == 0
        begins += [room.data + place * room.place_bytes - data.data_ptr() for place in range(experts)]
    assert len(set(begins)) == len(begins)
    assert all(begin >= 0 and begin % ALIGNMENT == 0 for begin in begins)
    assert sorted(begins)[-1] + ring.prefetched(distance, ()).room.place_bytes <= ring.num_bytes


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_right_guesses_are_counted_as_sets_are_compared(
    distance: int, num_layers: int, rows: int, ranks: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    chosen = [
        np.stack([[generator.permutation(9)[:ranks] for _ in range(2 * rows)] for _ in range(num_layers)])
        if num_layers
        else np.zeros((0, 2 * rows, ranks), np.int64)
        for _ in range(2)
    ]
    guessed, used = chosen
    counter = GuessCounter(num_layers, distance)
    for first in (0, rows):
        counter.count(guessed[:, first : first + rows], used[:, first : first + rows])
    for layer in range(num_layers):
        right = sum(len(set(guessed[layer, row]) & set(used[layer, row])) for row in range(2 * rows))
        is_guessed = layer >= distance
        assert counter.right[layer] == (right if is_guessed else 0)
        assert counter.guessed[layer] == (2 * rows * ranks if is_guessed else 0)


@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_guesses_at_missing_experts_are_those_that_have_places(
    distance: int, num_whole: int, rows: int, num_places: int, seed: int
) -> None:
    """The likeliest of each row. Layers that miss none come last, and their guesses may be anything."""
    generator = np.random.default_rng(seed)
    guessed, used = (
        np.stack([[generator.permutation(9)[:4] for _ in range(rows)] for _ in range(5)]) for _ in range(2)
    )
    resident = generator.random((5 - num_whole, 9)) < 0.4
    guessed[5 - num_whole :] = -7
    counter = GuessCounter(5, distance, num_places)
    counter.count(guessed, used, resident)
    counter.count(guessed, used)
    expected = [0, 0]
    for layer in range(distance, 5 - num_whole):
        for row in range(rows):
            missing = [expert for expert in guessed[layer, row] if not resident[layer, expert]][:num_places]
            expected[0] += len(missing)
            expected[1] += len(set(missing) & set(used[layer, row]))
    assert counter.missing == tuple(expected)


@pytest.mark.parametrize("true", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("of_an_update", [3, 40, 5000])
def test_recall_is_that_of_the_last_guesses(true: float, of_an_update: int) -> None:
    recall, generator = Recall(0.74), np.random.default_rng(0)
    assert recall.share == 0.74
    num_updates = max(3, 4096 // of_an_update)
    for each in (0.5, true):
        for _ in range(num_updates):
            recall.learn(of_an_update, int(generator.binomial(of_an_update, each)))
        assert recall.share == pytest.approx(each, abs=0.06)


@given(st.lists(st.tuples(st.integers(-5, 5000), st.integers(-5, 5000))))
def test_recall_is_a_share_whatever_is_counted(counts: list[tuple[int, int]]) -> None:
    recall = Recall(0.74)
    for guessed, right in counts:
        before = recall.share
        recall.learn(guessed, right)
        assert 0 <= recall.share <= 1
        assert recall.share == before or 0 <= right <= guessed


def test_what_was_fetched_in_vain_is_wasted() -> None:
    counter = GuessCounter(3, 1)
    counter.count(np.array([[[9, 9]], [[1, 2]], [[3, 4]]]), np.array([[[9, 9]], [[2, 5]], [[4, 3]]]))
    statistics = PrefetchStatistics.of(counter, np.array([[0, 0, 0], [2, 1, 1], [3, 3, 0]]), [10, 20, 30])
    assert statistics.right == (0, 1, 2)
    assert statistics.recall == 0.75
    assert statistics.wasted_bytes == (0, 20, 0)
    assert statistics.given_up == (0, 1, 0)
    assert statistics.given_up_bytes == (0, 20, 0)
    assert PrefetchStatistics.of(GuessCounter(3, 1), np.zeros((3, 3)), [1, 1, 1]).recall == 0


@st.composite
def layers_of_steps(draw: st.DrawFn) -> tuple[frozenset[int], list[int], int]:
    """Experts that a layer of a step misses, those fetched for it, and how many of these arrive too late."""
    experts = st.integers(0, 5)
    missing, fetched = draw(st.frozensets(experts)), draw(st.lists(experts, max_size=4, unique=True))
    return missing, fetched, draw(st.integers(0, len(fetched)))


@given(st.lists(st.lists(layers_of_steps(), min_size=3, max_size=3), max_size=6))
def test_trap_15_copies_are_those_on_demand_and_what_is_counted(
    steps: list[list[tuple[frozenset[int], list[int], int]]],
) -> None:
    """Also if all of an expert that came too late was copied but for a last byte."""
    sizes, tallies = (10, 20, 30), np.zeros((3, 3), np.int64)
    on_demand, ahead = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for layers in steps:
        for layer, (missing, fetched, num_late) in enumerate(layers):
            whole = frozenset(fetched[: len(fetched) - num_late])
            tallies[layer] += (len(whole), len(whole & missing), num_late)
            on_demand[layer] += len(missing) * sizes[layer]
            ahead[layer] += (len(missing - whole) + len(whole)) * sizes[layer] + num_late * (sizes[layer] - 1)
    counted = PrefetchStatistics.of(GuessCounter(3, 1), tallies, sizes)
    assert (ahead <= on_demand + counted.wasted_bytes + counted.given_up_bytes).all()
    late = np.array(counted.given_up)
    assert (ahead + late == on_demand + counted.wasted_bytes + counted.given_up_bytes).all()
