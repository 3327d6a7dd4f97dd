"""The places of a prefill's experts in the ring, without a device."""

from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.staging import (
    ALIGNMENT,
    MAX_GROUP,
    MIN_BUFFERS,
    LayerShape,
    RingShape,
    StagingRing,
    adjacent_runs,
    least_ring,
)

sizes = st.tuples(*[st.integers(1, 5000)] * 3)
groups = st.sets(st.integers(0, 300), min_size=1, max_size=MAX_GROUP).map(sorted)


@given(groups)
def test_runs_are_whole_and_as_long_as_can_be(experts: list[int]) -> None:
    runs = list(adjacent_runs(experts))
    assert [first + i for _, first, count in runs for i in range(count)] == experts
    assert [place for place, _, _ in runs] == [experts.index(first) for _, first, _ in runs]
    assert all(a + n < b for (_, a, n), (_, b, _) in pairwise(runs))


@given(groups, sizes, st.integers(0, 100))
def test_copies_put_each_matrix_where_its_group_is_read(
    experts: list[int], matrix_sizes: tuple[int, ...], gap: int
) -> None:
    """The host's bytes are unlike each other; those of two matrices may lie in one stack (gap > 0)."""
    steps = tuple(size + gap for size in matrix_sizes)
    host = np.random.default_rng(0).integers(0, 256, 3 * 301 * 5100, np.uint8)
    sources = tuple(i * 301 * 5100 for i in range(3))
    shape = LayerShape(sources, steps, matrix_sizes)
    buffer_bytes = len(experts) * sum(matrix_sizes) + 3 * ALIGNMENT
    assert shape.capacity(buffer_bytes) >= len(experts)
    buffer = np.zeros(buffer_bytes, np.uint8)
    for copy in shape.copies(experts):
        buffer[copy.offset : copy.offset + copy.size] = host[copy.source : copy.source + copy.size]
    offsets = shape.offsets(len(experts))
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    for source, step, size, offset in zip(sources, steps, matrix_sizes, offsets, strict=True):
        for place, expert in enumerate(experts):
            found = buffer[offset + place * size :][:size]
            assert np.array_equal(found, host[source + expert * step :][:size])


@given(st.integers(0, 2**31), sizes)
def test_buffers_fill_the_ring_and_the_least_ring_holds_an_expert(
    ring_bytes: int, matrix_sizes: tuple[int, ...]
) -> None:
    shape = RingShape.of(ring_bytes)
    assert shape.count >= MIN_BUFFERS
    assert shape.count * shape.buffer_bytes <= ring_bytes
    layer = LayerShape((0, 0, 0), matrix_sizes, matrix_sizes)
    least = least_ring(sum(matrix_sizes))
    assert layer.capacity(RingShape.of(least).buffer_bytes) >= 1


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_a_buffer_is_never_written_before_it_was_read(count: int, begins: list[bool]) -> None:
    ring, held = StagingRing(count), deque[int]()
    for begin in begins:
        assert ring.num_free == count - len(held)
        if begin and len(held) < count:
            buffer = ring.take()
            assert buffer not in held
            held.append(buffer)
        elif begin:
            with pytest.raises(ValueError, match="every buffer"):
                ring.take()
        elif held:
            ring.give_back(held.popleft())
    for other in set(range(count)) - set(list(held)[:1]):
        with pytest.raises(ValueError, match="not the next"):
            ring.give_back(other)
