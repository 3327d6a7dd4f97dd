"""How much is fetched ahead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.prefetching import MAX_PREFETCHED, Prefetching


@pytest.mark.parametrize(("distance", "experts"), [(0, 1), (1, 0), (1, MAX_PREFETCHED + 1)])
def test_it_has_bounds(distance: int, experts: int) -> None:
    with pytest.raises(ValueError, match="at least 1 layer ahead"):
        Prefetching(distance, experts)


@given(st.integers(1, 4), st.integers(1, MAX_PREFETCHED), st.integers(0, 10_000), st.integers(0, 500))
def test_what_fits_is_as_much_as_finds_places(
    distance: int, experts: int, num_bytes: int, expert_bytes: int
) -> None:
    fitting = Prefetching(distance, experts).fitting(num_bytes, expert_bytes)
    count = 0 if fitting is None else fitting.experts
    taken = (distance + 1) * expert_bytes
    assert count * taken <= num_bytes
    assert fitting is None or fitting.distance == distance
    if count < experts:
        assert (count + 1) * max(taken, distance + 1) > num_bytes
