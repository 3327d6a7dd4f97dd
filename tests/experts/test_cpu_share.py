"""What the CPU computes of the experts and layers that a GPU lacks, and what comes over the bus."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.experts.cpu_share import (
    KNOWN_FOR,
    BusRate,
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
of_experts = st.lists(st.integers(1, 300), min_size=1, max_size=256).map(
    lambda rows: np.array(sorted(rows, reverse=True))
)


def cpu_seconds(rows: np.ndarray) -> np.ndarray:
    """Of a machine, for each expert: other than the forecast by a factor that grows with the rows."""
    return 1e-6 * (20 + 2.5 * rows)


@given(bus_rate=rates, slower=st.floats(0.1, 10), rows=of_experts, ahead=st.integers(0, 10**9))
def test_bus_and_cpu_end_together(bus_rate: float, slower: float, rows: np.ndarray, ahead: int) -> None:
    """Whatever was forecast: each expert counts by its own rows."""
    size, share = 10**6, CpuShare(2048)
    known = tuple(round(1e9 * each) for each in cpu_seconds(np.arange(1, MAX_MAILBOX_ROWS + 1)))
    share.begin_with(MissTimes(10**5, known), size)

    def seconds(count: int) -> tuple[float, float]:
        on_cpu = slower * float(cpu_seconds(np.minimum(rows, MAX_MAILBOX_ROWS))[len(rows) - count :].sum())
        return (ahead + (len(rows) - count) * size) / bus_rate, on_cpu

    rows = np.minimum(rows, MAX_MAILBOX_ROWS)
    on_cpu = 1
    for _ in range(60):
        share.bus.learn(size, size / bus_rate)
        share.learn_cpu(300, rows[len(rows) - on_cpu :], size, seconds(on_cpu)[1])
        on_cpu = share.split(300, rows, size, ahead).on_cpu
        assert 1 <= on_cpu <= len(rows)
    best = min(max(seconds(count)) for count in range(1, len(rows) + 1))
    assert max(seconds(on_cpu)) <= 1.001 * best


@given(rows=of_experts, factor=st.floats(0.2, 5))
def test_an_expert_of_more_rows_than_are_forecast_takes_as_many_times_as_long(
    rows: np.ndarray, factor: float
) -> None:
    share = CpuShare(2048)
    share.begin_with(MissTimes(1, tuple(range(1, MAX_MAILBOX_ROWS + 1))), 1)
    share.bus.learn(10**9, 1.0)
    for _ in range(8):
        share.learn_cpu(300, rows, 1, factor * 1e-9 * float(rows.sum()))
    ahead = round(factor * float(rows.sum()))  # what the bus has before takes as long as the CPU for all
    assert share.split(300, rows, 1, ahead + len(rows)).on_cpu == len(rows)


def test_the_cpu_and_the_bus_end_together_where_rows_differ_by_far() -> None:
    """By a mean of all it would get half of them."""
    share, size = CpuShare(2048), 10**6
    share.begin_with(MissTimes(10**5, tuple(10**4 * row for row in range(1, MAX_MAILBOX_ROWS + 1))), size)
    for _ in range(20):
        share.bus.learn(size, 1e-4)
    rows = np.array([64] * 20 + [1] * 20)
    assert share.split(300, rows, size, 0).on_cpu == 20 + 2  # 20 · 10 + 2 · 640 µs beside 18 · 100


@given(factors=st.lists(st.floats(0.1, 10), min_size=2, max_size=2))
def test_times_of_the_cpu_are_those_of_steps_of_about_as_many_rows(factors: list[float]) -> None:
    share, lengths, experts = CpuShare(2048), (200, 1000), np.full(200, 7)
    share.bus.learn(10**9, 0.1)
    for _ in range(10):
        for rows, factor in zip(lengths, factors, strict=True):
            share.learn_cpu(rows, experts, 1000, factor * 200 * 1e-7)
    counts = [share.split(rows, experts, 1000, 0).on_cpu for rows in lengths]
    if max(factors) > 1.2 * min(factors):
        assert (counts[0] > counts[1]) == (factors[0] < factors[1])
    assert share.split(150, experts, 1000, 0).on_cpu == counts[0]
    assert share.split(150, np.zeros(0, np.int64), 1000, 0).on_cpu == 0


@given(
    bus_rate=rates,
    beside=st.floats(0.2, 1.0),
    sizes=st.lists(st.integers(10**6, 10**8), min_size=20, max_size=60),
    last=st.integers(1, 1000),
)
def test_the_bus_alone_is_what_copies_of_layers_without_the_cpu_show(
    bus_rate: float, beside: float, sizes: list[int], last: int
) -> None:
    """The share of later layers is by copies beside the CPU. A last one that is small and slow does not count
    as much as the others.
    """
    bus = BusRate()
    for number, size in enumerate(sizes):
        is_alone = number % 4 == 3
        bus.learn(size, size / (bus_rate if is_alone else beside * bus_rate), is_alone=is_alone)
    bus.learn(last, 10 * last / bus_rate)
    assert bus.now == pytest.approx(beside * bus_rate, rel=0.01)
    assert not bus.knows_alone
    assert bus.end_step(with_cpu=True) == pytest.approx(bus_rate, rel=0.01)
    assert bus.knows_alone
    bus.start_step()
    assert bus.end_step(with_cpu=True) is None, "nothing was copied"


def test_copies_beside_the_cpu_do_not_say_what_the_bus_brings_alone() -> None:
    """However fast some of them were."""
    bus = BusRate(3e9)
    assert bus.now == 3e9
    for number in range(40):
        bus.learn(10**7, 1e-3 if number % 4 else 9e-3)
    assert bus.end_step(with_cpu=True) is None
    for absurd in ((0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0)):
        bus.learn(*absurd, is_alone=True)
    assert bus.end_step(with_cpu=True) is None


class SharedBus:
    """A bus at which programs follow each other: one copy in `programs` + 1 is as fast as without them, and
    the others wait. beside: of its rate, while the CPU reads.
    """

    def __init__(self, programs: int, beside: float) -> None:
        self.bus, self.programs, self.beside = BusRate(), programs, beside

    def step(self, *, with_cpu: bool, probed: int = 0) -> float | None:
        """What it says after a step of copies of 10 MB, of which each takes 1 ms with the bus to itself."""
        self.bus.start_step()
        for number in range(120):
            longer = 1.0 + self.programs**2 / 2 if number % (self.programs + 1) else 1.0
            is_alone = number < probed
            slower = self.beside if with_cpu and not is_alone else 1.0
            self.bus.learn(10**7, 1e-3 * longer / slower, is_alone=is_alone)
        return self.bus.end_step(with_cpu=with_cpu)


@settings(max_examples=30)
@given(programs=st.integers(1, 7), beside=st.floats(0.5, 1.0), probes=st.booleans())
def test_copies_without_the_cpu_say_what_they_get_between_other_programs(
    programs: int, beside: float, probes: bool
) -> None:
    """Those of a whole step behind one with the CPU, or of some of its layers; for some hundred steps."""
    shared = SharedBus(programs, beside)
    assert shared.step(with_cpu=True) is None
    probed = 8 * (programs + 1) if probes else 0
    true = shared.step(with_cpu=probes, probed=probed)
    assert true is not None
    assert true < 0.81 * 1e10
    for _ in range(KNOWN_FOR):
        assert shared.bus.knows_alone
        assert shared.step(with_cpu=True) == pytest.approx(true, rel=0.2)
    assert shared.step(with_cpu=True) is None, "it is forgotten in the end"
    assert not shared.bus.knows_alone


def test_a_step_behind_another_one_without_the_cpu_says_nothing_of_both() -> None:
    shared = SharedBus(3, 1.0)
    shared.step(with_cpu=True)
    true = shared.step(with_cpu=False)
    shared.programs = 0
    shared.step(with_cpu=False)
    shared.programs = 3
    assert shared.step(with_cpu=True) == pytest.approx(true)


def test_the_bus_begins_with_what_a_plan_says_of_it() -> None:
    share, size = CpuShare(2048), 10**6
    share.begin_with(MissTimes(250_000, (10**4,) * MAX_MAILBOX_ROWS), size)
    assert share.bus.now == 4e9
    share.bus.learn(size, 1e-4)
    assert share.bus.now == pytest.approx(1e10)


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
