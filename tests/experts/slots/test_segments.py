"""The memory of slots in pieces: sizes, addresses, and what is left when pieces are given back."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import OutOfMemoryError
from coldstream.experts.slots.segments import GRANULE_BYTES, SEGMENT_BYTES, SlotSegments, segment_slots
from coldstream.kernels.cuda.array import HostArray

LINE = 256


def on_host(num_bytes: int) -> HostArray:
    return HostArray.of(np.zeros(num_bytes, np.uint8))


@given(num_slots=st.integers(0, 10**5), slot_bytes=st.integers(1, 2**17).map(lambda lines: LINE * lines))
def test_segments_hold_all_slots_and_are_of_a_size(num_slots: int, slot_bytes: int) -> None:
    counts = segment_slots(num_slots, slot_bytes)
    assert sum(counts) == num_slots
    assert all(0 < count <= max(1, SEGMENT_BYTES // slot_bytes) for count in counts)
    assert len(set(counts[1:])) <= 1  # and the first has the rest
    assert counts == sorted(counts)
    assert all(count > max(1, SEGMENT_BYTES // slot_bytes) // 2 for count in counts[1:])


@pytest.mark.parametrize("slot_bytes", [1_105_920, 1_769_472, 2_064_384, 591_872, 3_244_032])
def test_rounding_up_by_the_driver_is_no_loss(slot_bytes: int) -> None:
    """Less than a thousandth for experts of real models."""
    *_, whole = segment_slots(10_000, slot_bytes)
    num_bytes = whole * slot_bytes
    assert -num_bytes % GRANULE_BYTES < num_bytes / 1000


@given(
    counts=st.dictionaries(st.integers(1, 8).map(lambda lines: LINE * lines), st.integers(0, 20), min_size=1),
    segment_lines=st.integers(1, 24),
    data=st.data(),
)
def test_slots_lie_apart_and_stay_where_they_are_when_others_go(
    counts: dict[int, int], segment_lines: int, data: st.DataObject
) -> None:
    segments = SlotSegments(counts, on_host, segment_lines * LINE)
    first = {size: segments.addresses(size) for size in counts}
    assert segments.num_slots == counts
    places = sorted((int(begin), size) for size in counts for begin in first[size])
    for (begin, size), (following, _) in pairwise(places):
        assert begin + size <= following
    while segments.largest is not None:
        present = [size for size in counts if segments.num_slots[size]]
        assert segments.num_slots[segments.largest] * segments.largest == max(
            segments.num_slots[size] * size for size in present
        )
        size = data.draw(st.sampled_from(present))
        left, before = segments.without_last(size), segments.num_slots[size]
        assert segments.drop_last(size) == (before - left) * size
        assert segments.num_slots[size] == left < before
        for each in counts:
            assert np.array_equal(segments.addresses(each), first[each][: segments.num_slots[each]])
    assert set(segments.num_slots.values()) <= {0}
    while segments.dropped_bytes:
        before, taken = segments.num_slots, segments.dropped_bytes
        size = segments.restore_last()
        assert segments.num_slots == before | {size: before[size] + taken // size}
    assert segments.num_slots == counts


def test_mm02_a_segment_that_cannot_be_had_leaves_none_behind() -> None:
    taken: list[int] = []

    def allocate(num_bytes: int) -> HostArray:
        if len(taken) == 3:
            raise OutOfMemoryError("no memory")
        taken.append(num_bytes)
        return on_host(num_bytes)

    with pytest.raises(OutOfMemoryError):
        SlotSegments({LINE: 10}, allocate, 2 * LINE)
    assert taken == [2 * LINE] * 3


def test_mm03_a_segment_that_cannot_be_had_again_is_still_missing() -> None:
    segments = SlotSegments({LINE: 4}, on_host, 2 * LINE)
    segments.drop_last(LINE)
    segments._allocate = no_memory
    with pytest.raises(OutOfMemoryError):
        segments.restore_last()
    assert segments.dropped_bytes == 2 * LINE
    assert segments.num_slots == {LINE: 2}


def no_memory(num_bytes: int) -> HostArray:
    raise OutOfMemoryError(f"no memory for {num_bytes} bytes")
