"""Missing experts are divided by what the last tokens took, whatever a plan's times say."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from coldstream.experts.copies_ahead import CopiesAhead
from coldstream.experts.miss_shares import STEPS_OF_AN_UPDATE, MissShares, Seen, likely_misses
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS
from coldstream.kernels.experts.split import BY_FETCHES, BY_MISSES, NUM_WORDS, MissTimes
from coldstream.kernels.experts.stamps import SUMS
from coldstream.placement.controls import Controls, Moves

LAYERS, RANKS = 6, 8
ALL_LAYERS = (RANKS,) * 40
TRUE = MissTimes(bus=60_000, cpu=tuple(30_000 + 500 * rows for rows in range(MAX_MAILBOX_ROWS)), answer=9_000)
UPDATES = 100 // STEPS_OF_AN_UPDATE


class Steps:
    """Steps of one row, whose layers miss so many experts, stamped as a GPU and the CPU do.

    request_ns: the CPU's for any request, besides those of its experts. most: that the layers miss, by layer.
    seen: of the bus's time, what stamps show of it. noise: of both places' times in a layer. held_up: layers
    of the CPU's that take a hundred times as long, as a share of all. slowed: the CPU by each expert that is
    copied ahead meanwhile, as a share of its time.
    """

    def __init__(
        self,
        seed: int = 0,
        request_ns: int = 0,
        most: Sequence[int] = (RANKS,) * LAYERS,
        seen: float = 1.0,
        noise: float = 0.0,
        held_up: float = 0.0,
        slowed: float = 0.0,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._request_ns, self.most, self._seen, self._noise = request_ns, most, seen, noise
        self.least = 1  # that a layer misses
        self.held_up, self._slowed, self._misses = held_up, slowed, 0
        self._cpu = [[0, 0, 0.0] for _ in most]
        self._sums = np.zeros((len(most), 2, len(SUMS)), np.uint64)
        self._sums += np.uint64(2**64 - 10**6)  # they overflow, as sums of a clock do
        self._sums[:, :, 0] = 0
        self._bus_pairs = np.zeros(len(most), np.uint64)
        self._now = 2**63

    def seen(self) -> Seen:
        cpu, sums, bus_pairs = np.array(self._cpu).T, self._sums.copy(), self._bus_pairs.copy()
        return Seen(cpu, sums, bus_pairs, (self._misses, self._misses), self._misses)

    def run(self, shares: MissShares, times: MissTimes, count: int = STEPS_OF_AN_UPDATE) -> float:
        """Seconds that missing experts take, in an update divided by `shares`. times: true."""
        words, tried = shares.words()
        elapsed = 0
        for _ in range(count):
            for layer in range(len(self.most)):
                elapsed += self._layer(layer, tried if layer == 0 else words, times)
        return elapsed / 1e9

    def _layer(self, layer: int, table: np.ndarray, times: MissTimes) -> int:
        misses = int(self._rng.integers(self.least, self.most[layer] + 1))
        self._misses += misses
        num_fetched = int(table[BY_FETCHES][misses])
        misses -= num_fetched
        on_bus = int(table[BY_MISSES][misses])
        assert 0 <= on_bus <= misses
        on_cpu = misses - on_bus
        slow = np.exp(self._noise * self._rng.normal(size=2)) * (1 + self._slowed * num_fetched, 1)
        cpu_ns = int(slow[0] * (self._request_ns + on_cpu * times.cpu[0]))
        if self._rng.random() < self.held_up:
            cpu_ns *= 100
        bus_ns = int(slow[1] * on_bus * (times.row_bus or times.bus))
        answered = times.answer + cpu_ns if on_cpu else 0
        if on_cpu:
            self._cpu[layer][0] += 1
            self._cpu[layer][1] += on_cpu
            self._cpu[layer][2] += cpu_ns / 1e9
        ends = max(int(self._seen * bus_ns), 15_000)
        answered_at = 5_000 + max(15_000, bus_ns, answered)
        stamps = (0, 5_000, 5_000 + ends, answered_at, 4_000 + answered_at)
        sums = self._sums[layer, int(on_bus > 0)]
        sums += np.array([1, *(np.uint64(self._now + each) for each in stamps)], np.uint64)
        self._bus_pairs[layer] += np.uint64(on_bus)
        self._now += stamps[-1]
        return max(bus_ns, answered)


def moving(times: MissTimes, controls: Controls | None = None) -> MissShares:
    return MissShares(times, 8, controls or Controls(Moves.ALWAYS))


def scaled(times: MissTimes, cpu: float, bus: float) -> MissTimes:
    return replace(
        times,
        cpu=tuple(max(1, round(cpu * each)) for each in times.cpu),
        bus=max(1, round(bus * times.bus)),
        row_bus=max(1, round(bus * (times.row_bus or times.bus))),
    )


def learnt(shares: MissShares, steps: Steps, times: MissTimes, updates: int) -> float:
    """Seconds of the last of so many updates together, from the middle on."""
    elapsed = []
    for _ in range(updates):
        elapsed.append(steps.run(shares, times))
        shares.learn(steps.seen())
    return sum(elapsed[updates // 2 :])


@pytest.mark.parametrize("cpu", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("bus", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    "true", [TRUE, scaled(TRUE, 8, 1), scaled(TRUE, 1, 8)], ids=["even", "slow CPU", "slow bus"]
)
def test_times_that_are_ten_times_wrong_are_right_after_some_tens_of_tokens(
    true: MissTimes, cpu: float, bus: float
) -> None:
    shares, steps = moving(scaled(true, cpu, bus)), Steps()
    shares.begin(steps.seen())
    learnt(shares, steps, true, UPDATES)
    assert shares.times.by_misses(RANKS) == pytest.approx(true.by_misses(RANKS), abs=1)
    found = learnt(shares, steps, true, 4 * UPDATES)
    best, fixed = moving(true), Steps()
    best_s = sum(fixed.run(best, true) for _ in range(4 * UPDATES)) / 2
    assert found <= 1.1 * best_s
    statistics = shares.statistics(RANKS)
    assert statistics is not None
    assert statistics.updates == 5 * UPDATES
    assert statistics.by_bus == shares.times.by_misses(RANKS)[1:]
    assert statistics.threads == 8


def test_a_cpu_that_others_take_gets_less_and_later_as_much_again() -> None:
    shares, steps = moving(TRUE), Steps()
    shares.begin(steps.seen())
    for times in (TRUE, scaled(TRUE, 4, 1), TRUE):
        learnt(shares, steps, times, UPDATES)
        assert shares.times.by_misses(RANKS) == pytest.approx(times.by_misses(RANKS), abs=1)


def test_stamps_of_other_steps_are_left_out() -> None:
    """Of another number of steps, and those of a device whose sums were cleared."""
    shares, steps = moving(TRUE), Steps()
    assert not shares.learn(steps.seen()), "nothing is known of what came before"
    slow = scaled(TRUE, 50, 1)
    for count in (0, 1, STEPS_OF_AN_UPDATE + 1):
        steps.run(shares, slow, count)
        assert not shares.learn(steps.seen())
    steps.run(shares, slow)
    cleared = Steps().seen()
    assert not shares.learn(cleared._replace(sums=0 * cleared.sums))
    assert shares.times == replace(TRUE, row_bus=TRUE.bus)
    assert shares.statistics(RANKS).updates == 0  # type: ignore[union-attr]


def test_absurd_stamps_make_no_absurd_table() -> None:
    shares, rng = moving(TRUE), np.random.default_rng(0)
    for _ in range(200):
        sums = rng.integers(0, 2**64, (LAYERS, 2, len(SUMS)), np.uint64)
        sums[:, 0, 0], sums[:, 1, 0] = 0, STEPS_OF_AN_UPDATE * (1 + rng.integers(0, 2))
        work = [
            (1, int(rng.integers(0, 9)), float(rng.choice([math.inf, math.nan, -1, 0, 1e300])))
            for _ in range(LAYERS)
        ]
        shares.begin(Steps().seen()._replace(sums=0 * sums))
        shares.learn(Seen(np.array(work).T, sums, rng.integers(0, 2**64, LAYERS, np.uint64)))
        for words in shares.words():
            assert words.shape == (NUM_WORDS,)
            table = words[BY_MISSES]
            assert ((table >= 0) & (table <= np.arange(MAX_RANKS + 1))).all()


def test_what_was_planned_by_sound_rates_stays_until_it_is_contradicted() -> None:
    """By a place that takes longer than it did at first, not by rates that are not the forecast's."""
    shares, steps = moving(scaled(TRUE, 0.5, 2), Controls(Moves.IF_CONTRADICTED, Moves.NEVER)), Steps()
    shares.begin(steps.seen())
    learnt(shares, steps, TRUE, 4 * UPDATES)
    assert shares.statistics(RANKS) is None
    assert shares.times.by_misses(RANKS) == scaled(TRUE, 0.5, 2).by_misses(RANKS)
    slow = scaled(TRUE, 4, 1)
    learnt(shares, steps, slow, UPDATES)
    assert shares.times.by_misses(RANKS) == pytest.approx(slow.by_misses(RANKS), abs=1)
    assert shares.statistics(RANKS) is not None


@pytest.mark.parametrize("moves", [Moves.NEVER, Moves.ALWAYS])
def test_copies_ahead_end_while_guesses_are_wrong_and_begin_again(moves: Moves) -> None:
    """Whether times move or not. The bus then reads missing experts in place."""
    true, steps, guesses = replace(TRUE, layer=60_000, cpu_left=800), Steps(), [0, 0]
    shares = MissShares(true, 8, Controls(moves), CopiesAhead(RANKS, RANKS, RANKS))
    shares.begin(steps.seen())
    by_guesses = []
    for recall in (0.9, 0.05, 0.9):
        has_moved = False
        for _ in range(UPDATES):
            steps.run(shares, true)
            guesses[0] += 120
            guesses[1] += round(120 * recall)
            has_moved |= shares.learn(steps.seen()._replace(guesses=tuple(guesses)))
        table, _ = shares.words()
        by_guesses.append((bool(table[BY_FETCHES].any()), bool(table[BY_MISSES].any()), has_moved))
    assert [each[:2] for each in by_guesses] == [(True, False), (False, True), (True, False)]
    assert all(has_moved for *_, has_moved in by_guesses[1:]), "the tables are written anew"
    without = MissShares(true, 8, Controls(moves)).words()[0]
    assert not without[BY_FETCHES].any()


@pytest.mark.parametrize("moves", [Moves.NEVER, Moves.ALWAYS])
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("slowed", [0.0, 0.6])
def test_copies_ahead_are_kept_where_steps_take_less_with_them(
    slowed: float, first: int, moves: Moves
) -> None:
    true = replace(TRUE, layer=40_000, cpu_left=800)
    ahead = CopiesAhead(0, 3, first)
    shares, steps = MissShares(true, 8, Controls(moves), ahead), Steps(2, 0, ALL_LAYERS, slowed=slowed)
    assert shares.copies_ahead == (first > 0)
    shares.begin(steps.seen())
    for _ in range(2 * UPDATES):
        steps.run(shares, true)
        shares.learn(steps.seen())
        assert shares.copies_ahead == (ahead.count > 0)
        assert bool(shares.words()[0][BY_FETCHES].any()) == shares.copies_ahead
    assert (ahead.best > 0) == (slowed == 0.0)


def test_a_number_of_copies_ahead_that_is_tried_contradicts_nothing() -> None:
    """Though the CPU takes much longer for an expert beside three copies."""
    true = replace(TRUE, layer=40_000, cpu_left=800)
    shares = MissShares(true, 8, Controls(Moves.IF_CONTRADICTED, Moves.NEVER), CopiesAhead(0, 3, 0))
    steps, counts = Steps(2, 0, ALL_LAYERS, slowed=0.6), []
    shares.begin(steps.seen())
    for _ in range(40):
        steps.run(shares, true)
        shares.learn(steps.seen())
        counts.append(bool(shares.words()[0][BY_FETCHES].any()))
    assert True in counts
    assert shares.statistics(RANKS).updates == 0  # type: ignore[union-attr]


SLOW_BUS = MissTimes(300_000, (44_000,) * MAX_MAILBOX_ROWS, 20_000, cpu_left=800, layer=60_000)


def cost_of_first_tokens(shares: MissShares, steps: Steps, times: MissTimes) -> float:
    """What 64 tokens take over as many without copies ahead."""
    shares.begin(steps.seen())
    found = []
    for _ in range(64 // STEPS_OF_AN_UPDATE):
        found.append(steps.run(shares, times))
        shares.learn(steps.seen())
    fixed, others = Steps(2, 0, steps.most), MissShares(times, 8, Controls(Moves.NEVER))
    fixed.least = steps.least
    return sum(found) / sum(fixed.run(others, times) for _ in found)


@pytest.mark.parametrize("misses", [8, 7])
@pytest.mark.parametrize("bus", [1.0, 2.0, 4.0])
def test_where_no_copy_would_come_in_time_the_first_tokens_try_none(bus: float, misses: int) -> None:
    """Nearly all experts of a token are missing. Some number that no layer misses would have a copy."""
    times = replace(SLOW_BUS, bus=round(bus * SLOW_BUS.bus), row_bus=round(bus * SLOW_BUS.bus / 2))
    steps = Steps(2, 0, ALL_LAYERS)
    steps.least = misses
    ahead = CopiesAhead(0, 3, 0)
    shares = MissShares(times, 8, Controls(Moves.NEVER), ahead, RANKS)
    assert cost_of_first_tokens(shares, steps, times) <= 1.01
    assert ahead.best == 0


@pytest.mark.parametrize("first", [0, 3])
def test_the_first_tokens_do_not_try_what_is_much_slower_by_forecast(first: int) -> None:
    """A bus that reads as fast as the CPU computes: with copies ahead it would read none in place."""
    times = replace(TRUE, bus=70_000, row_bus=90_000, cpu=(140_000,) * MAX_MAILBOX_ROWS, layer=60_000)
    steps, counts = Steps(2, 0, ALL_LAYERS), set()
    steps.least = RANKS
    ahead = CopiesAhead(0, 3, first)
    shares = MissShares(times, 8, Controls(Moves.NEVER), ahead, RANKS)
    shares.begin(steps.seen())
    for _ in range(64 // STEPS_OF_AN_UPDATE):
        steps.run(shares, times)
        shares.learn(steps.seen())
        counts.add(ahead.count)
    assert ahead.best == 0
    assert first or counts == {0}


@pytest.mark.parametrize(
    ("mean", "least", "most"), [(8.0, 8, 8), (0.0, 0, 0), (7.9, 7, 8), (4.0, 1, 7), (0.04, 0, 1), (9.5, 8, 8)]
)
def test_most_layers_miss_about_as_many_experts_as_the_mean(mean: float, least: int, most: int) -> None:
    assert likely_misses(mean, RANKS) == (least, most)


REQUEST_NS = 60_000  # about two experts' time
WITH_REQUEST = replace(TRUE, answer=TRUE.answer + REQUEST_NS)


def test_what_each_request_takes_the_cpu_besides_its_experts_is_found() -> None:
    """So that layers which miss few experts and those which miss many are both divided well."""
    shares, steps = moving(scaled(TRUE, 10, 1)), Steps(0, REQUEST_NS, (1, 2, 3, 5, 8, 8))
    shares.begin(steps.seen())
    learnt(shares, steps, TRUE, 2 * UPDATES)
    assert shares.times.answer == pytest.approx(WITH_REQUEST.answer, rel=0.4)
    assert shares.times.by_misses(RANKS) == pytest.approx(WITH_REQUEST.by_misses(RANKS), abs=1)


def test_a_text_that_misses_fewer_experts_than_at_first_contradicts_nothing() -> None:
    """A request of one expert takes the CPU more time for it than a request of many."""
    shares, steps = moving(TRUE, Controls(Moves.IF_CONTRADICTED, Moves.IF_CONTRADICTED)), Steps(0, REQUEST_NS)
    shares.begin(steps.seen())
    for most in (8, 2):
        steps.most = tuple(max(1, most - layer % 2) for layer in range(LAYERS))
        learnt(shares, steps, TRUE, UPDATES)
        assert shares.statistics(RANKS) is None


def best_fixed(true: MissTimes) -> float:
    """Seconds of an update with the best of many divisions that stay."""
    found = []
    for times_as_long in np.geomspace(0.25, 4, 17):
        shares, steps = moving(scaled(true, 1, float(times_as_long))), Steps(9, most=ALL_LAYERS)
        found.append(np.mean([steps.run(shares, true) for _ in range(20)]))
    return float(min(found))


@pytest.mark.parametrize("seen", [0.65, 0.8, 1.0, 1.25])
def test_a_bus_that_costs_more_or_less_than_its_stamps_show_is_spared_or_used(seen: float) -> None:
    """By what all missing experts took, within a hundred and fifty tokens."""
    shares, steps = moving(TRUE), Steps(1, most=ALL_LAYERS, seen=seen, noise=0.1)
    shares.begin(steps.seen())
    learnt(shares, steps, TRUE, 3 * UPDATES // 2)
    found = learnt(shares, steps, TRUE, 4 * UPDATES) / (2 * UPDATES)
    assert found <= 1.06 * best_fixed(TRUE)


def test_layers_whose_thread_has_lost_its_core_do_not_give_all_to_the_bus() -> None:
    """Two in a hundred take a hundred times as long: the mean would be three times that of the others."""
    shares, steps = moving(TRUE), Steps(1, most=ALL_LAYERS, held_up=0.02)
    shares.begin(steps.seen())
    learnt(shares, steps, TRUE, UPDATES)
    assert shares.times.by_misses(RANKS) == pytest.approx(TRUE.by_misses(RANKS), abs=1)


@pytest.mark.parametrize("moves", Moves)
def test_threads_are_tried_only_where_they_may_move(moves: Moves) -> None:
    shares, steps = moving(TRUE, Controls(Moves.NEVER, moves)), Steps()
    shares.begin(steps.seen())
    counts = set()
    for _ in range(UPDATES):
        steps.run(shares, TRUE)
        assert not shares.learn(steps.seen()), "the division stays"
        counts.add(shares.num_threads)
    assert (len(counts) > 1) == (moves is Moves.ALWAYS)
    assert (shares.statistics(RANKS) is None) == (moves is not Moves.ALWAYS)


def prompt(rows: np.ndarray, times: MissTimes, request_ns: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The CPU's work in a prompt whose experts have rows [layers, experts], and its experts."""
    ns = np.array([request_ns + sum(map(times.cpu_time, layer)) for layer in rows.tolist()], np.float64)
    work = np.stack([np.ones(len(rows)), rows.sum(axis=1), ns / 1e9])
    return work.astype(np.float64), np.full(len(rows), rows.shape[1], np.float64)


@pytest.mark.parametrize("moves", [Moves.ALWAYS, Moves.IF_CONTRADICTED])
@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("most", [3, 12, 200])
def test_prompts_say_what_the_cpu_takes_for_experts_of_several_rows(
    moves: Moves, slower: float, most: int
) -> None:
    shares, rng = moving(TRUE, Controls(moves)), np.random.default_rng(most)
    true = scaled(TRUE, slower, 1.0)
    for _ in range(8):
        rows = rng.integers(max(2, most // 2), most + 1, size=(LAYERS, 40))
        assert shares.learn_prompt(*prompt(rows, true))
    several = rng.integers(max(2, most // 2), most + 1, size=60).tolist()
    assert shares.times.num_streamed(several) == pytest.approx(true.num_streamed(several), abs=2)
    assert shares.times.cpu[0] == TRUE.cpu[0], "a prompt says nothing about one row"


def test_prompts_move_nothing_where_nothing_may_move_or_layers_are_held_up() -> None:
    rows = np.full((LAYERS, 40), 6)
    work, experts = prompt(rows, scaled(TRUE, 3.0, 1.0))
    fixed = moving(TRUE, Controls(Moves.NEVER, Moves.ALWAYS))
    assert not fixed.learn_prompt(work, experts)
    assert fixed.times.cpu == TRUE.cpu
    shares = moving(TRUE)
    work, experts = prompt(rows, TRUE)
    work[2, :2] *= 100
    for _ in range(5):
        assert shares.learn_prompt(work, experts)
    assert shares.times.cpu[5] == pytest.approx(TRUE.cpu[5], rel=0.01)


@pytest.mark.parametrize("absurd", [0.0, -1.0, math.inf, math.nan])
def test_absurd_prompts_are_left_out(absurd: float) -> None:
    shares = moving(TRUE)
    work, experts = prompt(np.full((LAYERS, 40), 6), TRUE)
    for row in (1, 2):
        changed = work.copy()
        changed[row] = absurd if row == 2 else 0.0
        assert not shares.learn_prompt(changed, experts)
    assert not shares.learn_prompt(work, 0.0 * experts)
    assert shares.times.cpu == TRUE.cpu
