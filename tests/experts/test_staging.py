"""The sharing out of a long prompt's experts and their places in the ring, without a device."""

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
    CpuShare,
    LayerShape,
    Lookahead,
    RingShape,
    StagingRing,
    adjacent_runs,
    bus_order,
    least_ring,
    likely_order,
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


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    resident=st.integers(0, 2**80),
    with_cpu=st.booleans(),
)
def test_the_missing_experts_that_are_wanted_are_brought_in_order(
    counts: list[int], resident: int, with_cpu: bool
) -> None:
    missing = np.array([not resident >> i & 1 for i in range(len(counts))])
    order = bus_order(np.array(counts), missing, with_cpu)
    wanted = [expert for expert, count in enumerate(counts) if count and missing[expert]]
    assert sorted(order) == wanted
    if with_cpu:
        assert [counts[e] for e in order] == sorted((counts[e] for e in order), reverse=True)
    else:
        assert order == wanted


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    resident=st.integers(0, 2**80),
    with_cpu=st.booleans(),
)
def test_what_was_wanted_most_is_likely(counts: list[int], resident: int, with_cpu: bool) -> None:
    missing = np.array([not resident >> i & 1 for i in range(len(counts))])
    order = likely_order(np.array(counts), missing, with_cpu)
    wanted = [expert for expert, count in enumerate(counts) if count and missing[expert]]
    if with_cpu and wanted:
        assert len(order) == (len(wanted) + 1) // 2
        assert set(order) <= set(wanted)
        assert min(counts[e] for e in order) >= max((counts[e] for e in {*wanted} - {*order}), default=0)
    else:
        assert order[: len(wanted)] == sorted(wanted)
        assert sorted(order) == np.flatnonzero(missing).tolist()


rates = st.floats(1e8, 1e12)


@given(
    bus_rate=rates,
    cpu_rate=rates,
    num_experts=st.integers(1, 256),
    expert_bytes=st.integers(1000, 10**7),
    ahead=st.integers(0, 10**9),
)
def test_bus_and_cpu_end_together(
    bus_rate: float, cpu_rate: float, num_experts: int, expert_bytes: int, ahead: int
) -> None:
    share = CpuShare()
    for _ in range(60):
        share.learn_bus(expert_bytes, expert_bytes / bus_rate)
        share.learn_cpu(300, num_experts, num_experts * expert_bytes / cpu_rate)
    on_cpu = share.split(300, num_experts, expert_bytes, ahead)
    assert 1 <= on_cpu <= num_experts

    def seconds(count: int) -> float:
        bus = (ahead + (num_experts - count) * expert_bytes) / bus_rate
        return max(bus, count * expert_bytes / cpu_rate)

    one_more = 1.001 * max(expert_bytes / bus_rate, expert_bytes / cpu_rate)
    assert seconds(on_cpu) <= min(map(seconds, range(1, num_experts + 1))) + one_more


def test_rates_of_the_cpu_are_those_of_about_as_many_rows() -> None:
    share = CpuShare()
    share.learn_bus(10**9, 0.1)
    for _ in range(10):
        share.learn_cpu(100, 10, 0.001)
        share.learn_cpu(2000, 10, 0.1)
    assert share.split(120, 100, 10**6, 0) > share.split(1500, 100, 10**6, 0)
    assert share.split(120, 0, 10**6, 0) == 0


def test_the_bus_is_kept_busy_and_no_more() -> None:
    ahead = Lookahead()
    for _ in range(10):
        ahead.learn(0, most=8)
    assert ahead.count == 8
    ahead.learn(1, most=8)
    assert ahead.count == 8
    for _ in range(10):
        ahead.learn(3, most=8)
    assert ahead.count == 1
