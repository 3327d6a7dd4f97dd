"""Statistics of guesses."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.prefetch_statistics import GuessCounter, PrefetchStatistics


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
