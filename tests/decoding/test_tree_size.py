"""The size of a draft: worth most of all, never slower than plain on purpose, and probes at a price."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding.loss_bound import LossBound
from coldstream.decoding.row_times import MAX_ROWS, RowTimes
from coldstream.decoding.tree_size import SizePolicy, SizeReason, TreeSize, expected_rates

Seconds = Callable[[int], float]  # of a step, by rows

milliseconds = st.integers(1, 60).map(lambda ms: ms / 1000)
step_times = st.lists(milliseconds, min_size=MAX_ROWS, max_size=MAX_ROWS)
probabilities = st.lists(st.floats(0.0, 1.0), max_size=80)


def _known(seconds: Seconds, rows: Sequence[int] = range(1, MAX_ROWS + 1)) -> RowTimes:
    times = RowTimes()
    for each in rows:
        for _ in range(2):
            times.record(each, seconds(each))
    return times


def _chain(acceptance: float, length: int) -> list[float]:
    return [acceptance**depth for depth in range(1, length + 1)]


@given(probabilities, step_times, milliseconds)
def test_rates_are_tokens_over_seconds(nodes: list[float], seconds: list[float], draft_s: float) -> None:
    rates = expected_rates(nodes, lambda rows: seconds[rows - 1], draft_s)
    assert len(rates) == min(len(nodes), MAX_ROWS - 1) + 1
    for n, rate in enumerate(rates):
        taken = seconds[n] + (draft_s if n else 0.0)
        assert rate == pytest.approx((1.0 + sum(nodes[:n])) / taken)


@given(probabilities, step_times, milliseconds)
def test_the_size_is_worth_most_of_all_and_never_slower_than_plain(
    nodes: list[float], seconds: list[float], draft_s: float
) -> None:
    """A second is worth the tokens of a plain step; what was drafted is spent."""
    times = _known(lambda rows: seconds[rows - 1])
    size = SizePolicy(times).choose(nodes, draft_s)
    estimates = [times.seconds(rows) or 0.0 for rows in range(1, MAX_ROWS + 1)]
    rates = expected_rates(nodes, lambda rows: estimates[rows - 1], 0.0)
    worths = [(rate - rates[0]) * estimates[n] for n, rate in enumerate(rates)]
    assert worths[size.num_nodes] == pytest.approx(max(worths), abs=1e-9)
    assert rates[size.num_nodes] >= rates[0] * (1 - 1e-9)
    assert size.reason is (SizeReason.FASTEST if size.num_nodes else SizeReason.PLAIN)
    assert size.rate == size.best_rate


def test_where_drafts_give_much_a_node_has_to_bring_more() -> None:
    """The last two of seven bring more tokens than a plain step does in their time, and fewer than drafts."""
    policy = SizePolicy(_known(lambda rows: 0.01 + 0.004 * (rows - 1)), probe_share=0.0)
    assert policy.choose(_chain(0.9, 9), 0.0).num_nodes == 7
    for _ in range(200):
        policy.record(0.014, TreeSize(1, SizeReason.FASTEST, 2.0, 2.0), 2.0)
    assert policy.choose(_chain(0.9, 9), 0.0).num_nodes == 5


def test_several_local_maxima_are_no_reason_to_stop() -> None:
    """Steps of a mixture of experts (vllm-mlx #763, NemotronH): 2 rows are slower than 1, 3 the fastest."""
    seconds = {1: 8.47e-3, 2: 13.49e-3, 3: 15.64e-3, 5: 20.67e-3, 8: 28.13e-3}
    policy = SizePolicy(_known(seconds.__getitem__, list(seconds)))
    size = policy.choose(_chain(0.58, 7), 0.0)
    assert size.num_nodes == 2
    assert size.rate == pytest.approx(122.5, abs=0.1)
    rates = expected_rates(_chain(0.58, 7), lambda rows: seconds.get(rows, 1.0), 0.0)
    by_rows = [rates[rows - 1] for rows in seconds]
    assert by_rows == pytest.approx([118, 117, 122.5, 108, 84], abs=0.6)


def test_steps_that_miss_more_experts_are_worth_less() -> None:
    """What they take is in the times that were measured."""
    nodes = _chain(0.8, 7)
    assert (
        SizePolicy(_known(lambda rows: 0.01 + 0.0005 * rows, range(1, 9))).choose(nodes, 0.0).num_nodes == 7
    )
    cold = _known(lambda rows: 0.01 + 0.0005 * rows + 0.02 * max(0, rows - 3), range(1, 9))
    assert SizePolicy(cold).choose(nodes, 0.0).num_nodes == 2


def test_trees_beyond_the_most_rows_are_truncated() -> None:
    times = _known(lambda rows: 0.01, [1, 64])
    assert SizePolicy(times).choose([1.0] * 200, 0.0).num_nodes == MAX_ROWS - 1


def test_nothing_is_drafted_before_plain_steps_were_measured() -> None:
    policy = SizePolicy(RowTimes())
    assert policy.choose([1.0], 0.001) == TreeSize(0, SizeReason.UNMEASURED, draft_s=0.001)
    for _ in range(24):
        assert not policy.should_draft()
        policy.record(0.01)
    assert policy.should_draft()
    assert policy.choose([1.0], 0.001).num_nodes == 1


def test_plain_steps_are_measured_that_follow_each_other() -> None:
    """One after a step with a draft takes longer; here three times."""
    times = RowTimes()
    policy = SizePolicy(times)
    drafted = True
    for _ in range(2000):
        size = policy.choose(_chain(0.9, 3), 0.0) if policy.should_draft() else None
        num_nodes = size.num_nodes if size else 0
        policy.record(0.012 if num_nodes else 0.03 if drafted else 0.01, size, 1.0 + num_nodes)
        drafted = num_nodes > 0
    assert times.seconds(1) == 0.01
    assert times.seconds(4) == 0.012


def test_plain_steps_of_an_unusual_time_are_not_remembered() -> None:
    """The first and the last of a run that is launched ahead; here they take double and half of the time."""
    times = RowTimes()
    policy = SizePolicy(times)
    for _ in range(300):
        policy.record(0.02, is_usual=False)
        for _ in range(3):
            policy.record(0.01)
        for _ in range(4):
            policy.record(0.005, is_usual=False)
        policy.record(0.02, TreeSize(1, SizeReason.FASTEST), 1.5)
    assert times.seconds(1) == 0.01
    assert times.seconds(2) == 0.02


@given(st.integers(1, 4), st.booleans())
def test_some_slow_steps_or_drafts_do_not_end_speculation(num_slow: int, is_draft: bool) -> None:
    policy = SizePolicy(RowTimes())
    slow = set(range(100, 100 + num_slow))
    chosen = []
    for step in range(130):
        size = None
        if policy.should_draft():
            size = policy.choose(_chain(0.9, 3), 5.0 if is_draft and step in slow else 0.001)
        num_nodes = size.num_nodes if size else 0
        chosen.append(num_nodes)
        step_s = 5.0 if not is_draft and step in slow else 0.01 + 0.001 * num_nodes
        policy.record(step_s, size, size.tokens if size and num_nodes else 1.0)
    assert sum(each < 3 for each in chosen[26:]) <= 2, "but for probes"


class _Run:
    """Steps of a simulated model and drafter, with what the policy made of them."""

    def __init__(self, seed: int = 0, noise: float = 0.0) -> None:
        self.times = RowTimes()
        self.policy = SizePolicy(self.times)
        self.sizes: list[TreeSize | None] = []
        self.taken_s: list[float] = []
        self.worth_s: list[float] = []  # of the tokens that each step gave
        self._draws, self._noise = random.Random(seed), noise

    def go(self, num_steps: int, seconds: Seconds, nodes: Sequence[float], draft_s: float) -> None:
        for _ in range(num_steps):
            size = None
            if self.policy.should_draft():
                size = self.policy.choose(nodes, self._noisy(draft_s))
            step_s = self._noisy(seconds(1 + (size.num_nodes if size else 0)))
            tokens = size.tokens if size and size.num_nodes else 1.0
            self.policy.record(step_s, size, tokens)
            self.sizes.append(size)
            self.taken_s.append(step_s + (size.draft_s if size else 0.0))
            plain_s = self.times.seconds(1) or 0.0
            self.worth_s.append(tokens * plain_s / (1.1 if size and size.num_nodes else 1.0))

    def _noisy(self, value: float) -> float:
        return value * (1.0 + self._noise * self._draws.random())

    def reasons(self) -> Counter[SizeReason | None]:
        return Counter(None if size is None else size.reason for size in self.sizes)


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=30)
@given(
    st.floats(0.0, 0.95),
    st.floats(0.0, 2.0),
    st.sampled_from([0.0, 1e-5, 1e-3, 1e-2]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 3),
)
def test_sp10_what_does_not_pay_takes_a_bounded_share_of_the_time(
    acceptance: float, row_share: float, draft_s: float, noise: float, seed: int
) -> None:
    """Before every probe, all those before it were earned; and so for explorations."""
    run = _Run(seed, noise)
    run.go(1500, lambda rows: 0.01 * (1 + row_share * (rows - 1)), _chain(acceptance, 15), draft_s)
    spent = {"probe": 0.0, "exploration": 0.0}
    last_probe = -1000
    passed_s = 0.0
    for step, (size, taken_s, worth_s) in enumerate(zip(run.sizes, run.taken_s, run.worth_s, strict=True)):
        if size is not None and size.best_rate is not None:
            is_probe = size.reason is SizeReason.PROBE
            kind = "probe" if is_probe else "exploration"
            if is_probe or size.is_exploration:
                assert spent[kind] <= 0.005 * passed_s + 1e-9
                worth_s = size.tokens / size.best_rate if is_probe else worth_s
                spent[kind] += max(0.0, taken_s - worth_s)
            if is_probe:
                assert step - last_probe >= 16
                last_probe = step
            assert is_probe or (size.rate or 0.0) >= size.best_rate
        passed_s += taken_s
    assert run.reasons()[SizeReason.PROBE] > 0


def test_a_drafter_that_does_not_pay_is_rarely_asked() -> None:
    """And costs no more than it may, though its drafts take a fifth of a step."""
    run = _Run()
    run.go(4000, lambda rows: 0.01 * rows, _chain(0.1, 6), 0.002)
    asked = [size for size in run.sizes if size is not None]
    assert 10 < len(asked) < 200
    assert sum(run.taken_s) < 4000 * 0.01 * 1.012


losing = st.tuples(st.integers(0, 700), st.sampled_from([0.0, 1e-4, 2e-3, 1e-2]), st.integers(1, 9))


@given(losing)
def test_how_many_steps_have_no_draft_is_known_before(case: tuple[int, float, int]) -> None:
    num_steps, draft_s, step_ms = case
    run, seconds = _Run(), lambda rows: 0.001 * step_ms * rows
    run.go(num_steps, seconds, _chain(0.1, 6), draft_s)
    for left in reversed(range(run.policy.num_plain())):
        assert not run.policy.should_draft()
        run.policy.record(seconds(1))
        assert run.policy.num_plain() >= left - 1
    assert run.policy.num_plain() <= 8, "those planned may come in between"


@given(losing, st.integers(1, 40))
def test_steps_recorded_together_are_those_recorded_one_by_one(
    case: tuple[int, float, int], num_steps: int
) -> None:
    num_before, draft_s, step_ms = case
    together, apart = _Run(), _Run()
    for run in (together, apart):
        run.go(num_before, lambda rows: 0.001 * step_ms * rows, _chain(0.1, 6), draft_s)
        run.policy.record(0.001 * step_ms)
        run.policy.record(0.001 * step_ms)
    together.policy.went_on(num_steps, 0.001 * step_ms * num_steps)
    for _ in range(num_steps):
        apart.policy.went_on(1, 0.001 * step_ms)
    assert abs(together.policy.num_plain() - apart.policy.num_plain()) <= 1
    assert together.times.seconds(1) == pytest.approx(apart.times.seconds(1))
    assert together.times.age(1) == apart.times.age(1)


def test_explorations_pay_for_the_plain_step_after_them() -> None:
    """It takes twice as long, as it is not launched while another one runs."""
    policy, passed_s, was_drafted = SizePolicy(RowTimes()), 0.0, False
    for _ in range(4000):
        size = policy.choose(_chain(0.1, 6), 0.002) if policy.should_draft() else None
        step_s = 0.01 * (1 + (size.num_nodes if size else was_drafted))
        policy.record(step_s, size, size.tokens if size and size.num_nodes else 1.0)
        passed_s += step_s + (size.draft_s if size else 0.0)
        was_drafted = size is not None
    assert passed_s < 4000 * 0.01 * 1.012


def test_a_drafter_that_pays_again_is_used_again() -> None:
    run = _Run()
    seconds: Seconds = lambda rows: 0.01 + 0.001 * (rows - 1)  # noqa: E731
    run.go(2000, seconds, _chain(0.02, 6), 0.002)
    assert not run.policy.pays
    run.go(100, seconds, _chain(0.8, 6), 0.002)
    assert run.policy.pays
    assert all(
        size is not None and size.num_nodes >= 4
        for size in run.sizes[-16:]
        if size and size.reason is SizeReason.FASTEST
    )
    assert run.sizes[-1] is not None


def test_steps_that_make_what_others_use_neither_count_nor_are_paid_for() -> None:
    """They take thirty steps' time; here the first twelve with a draft."""
    policy, times, sizes = SizePolicy(RowTimes()), 0, []
    for _ in range(300):
        size = policy.choose(_chain(0.8, 6), 0.001) if policy.should_draft() else None
        rows = 1 + (size.num_nodes if size else 0)
        times += rows > 1
        is_usual = rows == 1 or times > 12
        policy.record(
            0.01 + 0.001 * (rows - 1) + (0.0 if is_usual else 0.3),
            size,
            size.tokens if size and size.num_nodes else 1.0,
            is_usual=is_usual,
        )
        sizes.append(rows - 1)
    assert policy.pays
    assert sum(each >= 3 for each in sizes[-60:]) > 50


def test_explorations_pay_for_what_a_device_makes_in_them() -> None:
    run = _Run()
    run.go(600, lambda rows: 0.01 * rows, _chain(0.1, 6), 0.002)
    assert not run.policy.pays
    size = TreeSize(1, SizeReason.FASTEST, 50.0, 50.0, 1.1, 0.002, is_exploration=True)
    run.policy.record(0.3, size, 1.0, is_usual=False)
    assert 5000 < run.policy.num_plain() < 6000, "0.28 seconds at half a percent of steps of 0.01"


def test_probes_pay_for_what_a_device_makes_in_them() -> None:
    """Each number of rows takes thirty steps' time when it comes first."""
    policy, passed_s, made = SizePolicy(RowTimes()), 0.0, {1}
    spent_s = 0.0
    for step in range(6000):
        size = policy.choose(_chain(0.85, 12), 0.001) if policy.should_draft() else None
        rows = 1 + (size.num_nodes if size else 0)
        step_s = 0.01 + 0.002 * (rows - 1) + (0.0 if rows in made else 0.3)
        if step > 200 and rows not in made:
            assert size is not None
            assert size.reason is SizeReason.PROBE
            assert spent_s <= 0.005 * passed_s
            spent_s += 0.3
        policy.record(step_s, size, size.tokens if size and rows > 1 else 1.0, is_usual=rows in made)
        made.add(rows)
        passed_s += step_s
    assert spent_s > 0


@pytest.mark.sharded(of="models on the CPU")
def test_stale_times_are_found_out() -> None:
    """Long steps were slow for a while, with something else on the machine."""
    run = _Run()
    run.go(500, lambda rows: 0.01 * rows, _chain(0.9, 7), 0.0005)
    assert {size.num_nodes for size in run.sizes[-50:] if size} <= {0, 1}
    run.go(6000, lambda rows: 0.01 + 0.0005 * (rows - 1), _chain(0.9, 7), 0.0005)
    assert Counter(size.num_nodes for size in run.sizes[-200:] if size).most_common(1)[0][0] >= 5


def test_the_best_size_is_no_probe_though_its_time_is_stale() -> None:
    policy = SizePolicy(_known(lambda rows: 0.01, [1, 2]))
    for _ in range(300):
        policy.record(0.01)
    assert policy.choose([0.9], 0.0).reason is SizeReason.FASTEST


@pytest.mark.sharded(of="models on the CPU")
def test_probes_visit_every_range_of_rows() -> None:
    """Plain steps are also measured without them."""
    run = _Run()
    run.go(20000, lambda rows: 0.01 + 0.002 * (rows - 1), _chain(0.7, 24), 0.001)
    probed = {size.num_nodes for size in run.sizes if size and size.reason is SizeReason.PROBE}
    best = Counter(size.num_nodes for size in run.sizes if size and size.reason is SizeReason.FASTEST)
    visited = {0, *probed, best.most_common(1)[0][0]}
    assert visited == {*range(8), 11, 15, 23, 24}, "of those that take equally long the one with most tokens"


def test_a_cheap_drafter_without_a_draft_is_asked_often() -> None:
    """That of repeated text: it costs nothing, and most of the time it has nothing."""
    run = _Run()
    run.go(1000, lambda rows: 0.01 + 0.001 * (rows - 1), [], 2e-5)
    assert sum(size is not None for size in run.sizes) > 900


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_it_is_a_pure_function_of_what_was_recorded(seed: int) -> None:
    runs = [_Run(seed, noise=0.5) for _ in range(2)]
    for run in runs:
        run.go(300, lambda rows: 0.01 + 0.002 * (rows - 1), _chain(0.6, 9), 0.002)
    assert runs[0].sizes == runs[1].sizes


def test_the_best_size_of_equal_ones_is_the_smallest() -> None:
    times = _known(lambda rows: 0.01 * rows, range(1, 9))
    assert SizePolicy(times).choose([1.0] * 7, 0.0).num_nodes == 0


def test_bounded_drafts_grow_once_they_have_gained_as_much_as_their_stake() -> None:
    """Although more is forecast to pay: each draft gains 0.3 of a plain step here, and the stake is three."""
    policy, sizes = SizePolicy(RowTimes(), bound=LossBound()), []
    for _ in range(20):
        policy.went_on(1, 0.02)
    for _ in range(24):
        sizes.append(policy.num_asked(40))
        size = policy.choose(_chain(0.97, sizes[-1]), 1e-6)
        policy.record(0.022, size, 1.4)
    assert set(sizes[:8]) == {3}
    assert min(sizes[-8:]) > 3


def test_as_many_nodes_are_asked_for_as_fill_the_rows_of_a_range() -> None:
    """A step with more rows of it takes as long, and a device captures steps by their rows."""
    policy, asked = SizePolicy(_known(lambda rows: 0.01 + 0.0002 * rows)), set()
    for _ in range(60):
        num_asked = policy.num_asked(40)
        asked.add(num_asked)
        size = policy.choose(_chain(0.97, num_asked), 0.0001 * num_asked)
        policy.record(0.01 + 0.0002 * size.num_nodes, size, size.tokens)
    assert {4, 5, 6, 7, 11, 15, 23, 31} <= asked <= {4, 5, 6, 7, 11, 15, 23, 31, 40}
