"""How much is fetched ahead, in how many bytes, and where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from coldstream.experts.prefetch import MAX_PREFETCHED, Prefetching
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.kernels.cuda.memory import ALIGNMENT

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
