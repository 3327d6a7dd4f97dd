"""What the CPU computes of the experts and layers that a GPU lacks, and what comes over the bus."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.cpu_share import (
    STEPS_TO_COMPARE,
    CpuPart,
    CpuShare,
    Lookahead,
    bus_order,
    layers_of_cpu,
    likely_order,
)
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes

times = st.builds(
    lambda bus, cpu, more, answer: MissTimes(
        bus, tuple(cpu + more * row for row in range(MAX_MAILBOX_ROWS)), answer
    ),
    st.integers(1, 10**7),
    st.integers(1, 10**7),
    st.integers(0, 10**6),
    st.integers(0, 10**4),
)


@given(num_missing=st.integers(0, 64), rows=st.integers(1, MAX_MAILBOX_ROWS), times=times)
def test_no_other_number_of_layers_ends_sooner(num_missing: int, rows: int, times: MissTimes) -> None:
    count = len(layers_of_cpu(num_missing, rows, times))
    ends = [times.nanoseconds(num_missing - n, [rows] * n) for n in range(num_missing + 1)]
    assert ends[count] == min(ends)


@given(num_missing=st.integers(1, 64), rows=st.integers(1, MAX_MAILBOX_ROWS), times=times)
def test_the_layers_of_cpu_and_bus_alternate_evenly(num_missing: int, rows: int, times: MissTimes) -> None:
    of_cpu = layers_of_cpu(num_missing, rows, times)
    assert of_cpu <= set(range(num_missing))
    is_cpu = np.array([number in of_cpu for number in range(num_missing)])
    reached = np.cumsum(is_cpu)
    wanted = len(of_cpu) * np.arange(1, num_missing + 1) / num_missing
    assert np.abs(reached - wanted).max() <= 1


def test_more_rows_than_a_mailbox_takes_all_come_over_the_bus() -> None:
    fast = MissTimes(10**9, (1,) * MAX_MAILBOX_ROWS)
    assert layers_of_cpu(5, MAX_MAILBOX_ROWS, fast) == frozenset(range(5))
    assert layers_of_cpu(5, MAX_MAILBOX_ROWS + 1, fast) == frozenset()


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


def ways(
    part: CpuPart, rows: int, count: int, with_cpu: float, without: float, on_bus: float = 0.0
) -> list[bool]:
    """Which of so many steps the CPU has a part in, where a row takes so long with it and without."""
    chosen = []
    for _ in range(count):
        chosen.append(part.choose(rows))
        part.learn(rows, rows * (with_cpu if chosen[-1] else without), rows * on_bus, with_cpu=chosen[-1])
    return chosen


@given(rows=st.integers(513, 2048), with_cpu=st.floats(0.1, 10), without=st.floats(0.1, 10))
def test_the_faster_way_is_kept_and_the_other_tried_again(rows: int, with_cpu: float, without: float) -> None:
    chosen = ways(CpuPart(), rows, 3 + 8 * STEPS_TO_COMPARE, with_cpu, without)
    assert chosen[:3] == [True, True, False]
    faster = with_cpu <= without
    assert chosen.count(not faster) <= 2 + 8
    assert chosen[3] == faster
    assert (not faster) in chosen[3 : 5 + STEPS_TO_COMPARE]


def test_the_cpu_leaves_when_it_becomes_slower_and_comes_back() -> None:
    part, steps = CpuPart(), 5 * STEPS_TO_COMPARE
    assert ways(part, 2048, steps, 1.0, 2.0).count(True) > 0.8 * steps
    assert ways(part, 2048, steps, 3.0, 2.0)[STEPS_TO_COMPARE:].count(False) > 0.6 * steps
    assert ways(part, 2048, steps, 1.0, 2.0)[2 * STEPS_TO_COMPARE :].count(True) > 0.4 * steps


def test_the_first_step_of_a_length_does_not_count() -> None:
    part = CpuPart()
    assert part.choose(2048)
    part.learn(2048, 1e6, 0.0, with_cpu=True)
    assert ways(part, 2048, 4, 1.0, 2.0) == [True, False, True, True]


def test_steps_of_other_lengths_choose_for_themselves() -> None:
    part = CpuPart()
    assert not ways(part, 2048, 4, 2.0, 1.0)[-1]
    assert ways(part, 600, 4, 1.0, 2.0) == [True, True, False, True]
    assert not part.choose(2049)


def test_where_the_bus_alone_takes_longer_nothing_else_is_tried() -> None:
    steps, part = 3 * STEPS_TO_COMPARE, CpuPart()
    assert all(ways(CpuPart(), 2048, steps, 1.0, 2.0, on_bus=1.3))
    assert not all(ways(part, 2048, steps, 1.0, 0.9, on_bus=0.8))
    assert all(ways(part, 2048, steps, 1.0, 2.0, on_bus=1.9)[1:]), "the bus has become slower"
