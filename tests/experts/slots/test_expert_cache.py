"""The guarantees of the cache, one a test; other files test random orders of events."""

import numpy as np
import pytest
from cache_cases import POLICIES, drifting, eager, hit_rate, settle
from fake_device import Caller
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts import ExpertCache
from coldstream.placement.policies import (
    DecayedFrequency,
    Lru,
    Policy,
    numbers,
    simulate,
)
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace
from random_residency import RandomResidency


@pytest.mark.sharded(6)
@pytest.mark.parametrize("kind", POLICIES)
@given(seed=st.integers(0, 1000), capacity=st.integers(1, 24))
def test_with_time_between_steps_it_holds_what_the_policy_would(kind: str, seed: int, capacity: int) -> None:
    trace = drifting(seed, 3, 8, 2, 40)
    profile = drifting(seed + 1, 3, 8, 2, 40).counts() / 40
    caller = Caller([1, 1, 1], 8, {1: capacity}, POLICIES[kind](), profile=profile)
    caller.load(np.argsort(-profile.ravel(), kind="stable")[:capacity].tolist())
    settle(caller)
    loaded = caller.cache.counters.copies.copy()
    for used in numbers(trace):
        caller.step(used)
        settle(caller, 2)
    expected, counters = simulate(trace, POLICIES[kind](), capacity, profile), caller.cache.counters
    for name in ("hits", "misses", "evictions"):
        assert np.array_equal(getattr(counters, name), getattr(expected, name)), name
    assert np.array_equal(counters.copies - loaded, expected.copies)


def test_each_size_holds_what_a_cache_of_its_own_would() -> None:
    """Only the limits of copies are common to them."""
    trace = drifting(5, 4, 8, 2, 150)
    sizes, slots = np.array([3, 5, 5, 3]), {3: 5, 5: 4}
    caller = Caller(sizes.tolist(), 8, slots, DecayedFrequency())
    for used in numbers(trace):
        caller.step(used)
        settle(caller, 2)
    for size, num_slots in slots.items():
        part = RoutingTrace(RoutedModel("0" * 32, 2, 8, 2), trace.topk_ids[:, sizes == size])
        expected = simulate(part, DecayedFrequency(), num_slots)
        assert np.array_equal(caller.cache.counters.hits[sizes == size], expected.hits)
        assert np.array_equal(caller.cache.counters.copies[sizes == size], expected.copies)
        assert expected.evictions.sum() > 10


def test_the_same_calls_give_the_same_answers() -> None:
    def answers() -> list[str]:
        caller = Caller([3, 5], 8, {3: 3, 5: 2}, DecayedFrequency(), max_bytes_per_step=9)
        starts = []
        for used in numbers(drifting(1, 2, 8, 2, 60)):
            starts.append(repr(caller.step(used)))
        return starts

    assert answers() == answers()


def test_random_residency_changes_at_nearly_every_step() -> None:
    caller = Caller([1] * 4, 8, {1: 16}, RandomResidency(3))
    caller.load(range(16))
    seen = []
    for used in numbers(drifting(0, 4, 8, 2, 100)):
        caller.step(used)
        seen.append(frozenset(caller.readable))
    assert len(set(seen)) > 80
    assert set.union(*map(set, seen)) == set(range(32))


@pytest.mark.sharded
@pytest.mark.parametrize("seed", range(3))
def test_with_steps_launched_ahead_late_copies_ask_for_slower_recency(seed: int) -> None:
    def run(policy: Policy) -> ExpertCache:
        caller = Caller([1] * 4, 32, {1: 32}, policy)
        caller.launch()
        for used in numbers(drifting(seed, 4, 32, 4, 400)):
            caller.launch()
            caller.end_copies()
            caller.finish(used)
        return caller.cache

    usual, late, lru = map(run, (DecayedFrequency(), DecayedFrequency.for_late_copies(), Lru()))
    rates = [hit_rate(cache) for cache in (usual, late, lru)]
    assert rates[1] > 0.02 + max(rates[0], rates[2])
    assert late.counters.copies.sum() < 0.3 * usual.counters.copies.sum()


# ---- copies that fail, are late, or are reported twice


def test_ex01_a_failed_copy_is_begun_again_once() -> None:
    caller = Caller([1], 4, {1: 1}, eager())
    caller.step([2])
    (first,) = caller.launch().copies
    assert caller.copied(first, ok=False)
    (second,) = caller.launch().copies
    assert (second.expert, second.slot) == (first.expert, first.slot)
    assert second.generation > first.generation
    assert caller.copied(second)
    caller.copied_again(first, ok=True)  # late news of the first changes nothing
    caller.launch()
    assert caller.readable == {2}
    assert caller.cache.counters.copies.sum() == 2
    assert caller.cache.counters.failed_copies.sum() == 1


def test_ex01_after_a_second_failure_the_expert_stays_out_and_its_slot_serves_others() -> None:
    caller = Caller([1], 4, {1: 1}, eager())
    caller.step([2])
    for goes_on in (True, False):
        (copy,) = caller.launch().copies
        assert caller.copied(copy, ok=False) is goes_on
        caller.finish()
    for _ in range(5):
        assert not caller.step([2]).copies
    caller.step([2, 3])
    caller.step([])
    caller.step([])
    assert caller.readable == {3}
    caller.quiesce()


def test_ex01_a_failure_long_ago_does_not_count() -> None:
    caller = Caller([1], 4, {1: 1}, eager())
    for expert in (2, 3, 2, 3):
        caller.step([expert])
        (copy,) = caller.launch().copies
        assert caller.copied(copy, ok=False)
        caller.finish(trains=False)
        settle(caller)
        assert caller.readable == {expert}


def test_ex01_a_copy_that_was_loading_when_its_slot_was_taken_away_never_arrives() -> None:
    for ok in (True, False):
        caller = Caller([1], 4, {1: 2}, eager())
        caller.load([0, 1])
        caller.resize(1, 1)
        assert not caller.cache.reclaimed(1)
        caller.copied(caller.device.writing[1], ok)
        assert caller.cache.reclaimed(1)
        caller.end_copies()
        caller.launch()
        assert caller.readable == {0}
        caller.check()


def test_stale_news_cannot_free_the_slot_of_a_later_copy() -> None:
    caller = Caller([1], 4, {1: 1}, eager())
    caller.load([0])
    first = caller.device.writing[0]
    caller.copied(first, ok=False)
    (second,) = caller.launch().copies
    for ok in (True, False):
        caller.copied_again(first, ok)
        caller.check()
    assert caller.device.writing == [second]


# ---- working sets, and slots that are still read


@pytest.mark.parametrize("num_slots", [0, 1, 2, 5])
def test_ex02_a_step_that_uses_more_than_there_are_slots(num_slots: int) -> None:
    caller = Caller([1, 1], 8, {1: num_slots}, eager())
    caller.launch()
    for _ in range(30):
        caller.launch()
        caller.end_copies()
        caller.finish(range(16))
        assert len(caller.readable) <= num_slots
    assert len(caller.readable) == num_slots
    assert caller.cache.counters.evictions.sum() == 0
    caller.quiesce()


def test_trap_13_the_working_set_of_a_launched_step_stays_until_the_step_has_ended() -> None:
    caller = Caller([1], 16, {1: 4}, eager())
    caller.load([0, 1, 2, 3])
    settle(caller)
    launched = dict(caller.device.launched)
    caller.launch()  # reads 0 to 3
    caller.launch()  # and so does this one
    first, second = sorted(set(caller.device.launched) - set(launched))
    caller.finish([8, 9, 10, 11])
    start = caller.launch()
    assert start.withdrawn.tolist() == [3, 2, 1, 0]
    assert [copy.after_step for copy in start.copies] == [second] * 4
    assert set(caller.device.launched[second]) == {0, 1, 2, 3}
    assert not caller.device.writing
    caller.finish([0, 1])  # the second: all hits, as launched
    assert caller.cache.counters.hits.sum() == 2
    assert len(caller.device.writing) == 4
    assert first < second


def test_trap_13_what_the_last_step_used_is_not_replaced() -> None:
    caller = Caller([1], 8, {1: 2}, Lru())
    caller.load([0, 1])
    settle(caller)
    caller.step([0, 1, 5])
    for _ in range(3):
        assert not caller.step([0, 1, 5]).withdrawn.size
    caller.step([1, 5])
    assert caller.launch().withdrawn.tolist() == [0]


def test_trap_14_a_slot_is_not_written_while_a_step_may_read_it() -> None:
    """A slow step, and copies that would begin at once."""
    caller = Caller([1], 4, {1: 1}, Lru())
    caller.load([0])
    settle(caller)
    caller.launch()
    slow = caller.launch().step
    caller.finish([3])
    start = caller.launch()
    assert start.withdrawn.tolist() == [0]
    assert [copy.after_step for copy in start.copies] == [slow]
    assert not caller.device.writing
    caller.finish(trains=False)
    assert [copy.expert for copy in caller.device.writing] == [3]


def test_trap_17_an_unfinished_copy_is_not_read() -> None:
    caller = Caller([1], 4, {1: 2}, Lru())
    caller.step([3])
    assert len(caller.launch().copies) == 1
    caller.launch()
    assert not caller.readable
    caller.finish([3])
    assert caller.cache.counters.misses.sum() == 2
    caller.end_copies()
    assert not caller.readable, "not before a step starts"
    assert caller.launch().arrived.tolist() == [3]


def test_ex03_an_expert_on_its_way_is_neither_asked_for_again_nor_replaced() -> None:
    caller = Caller([1], 4, {1: 1}, eager())
    caller.launch()
    caller.launch()
    caller.finish([2])
    caller.finish([2])
    assert [copy.expert for copy in caller.launch().copies] == [2]
    caller.finish([2, 1])
    start = caller.launch()
    assert not start.copies
    assert not start.withdrawn.size
    caller.check()


def test_ex03_an_expert_may_come_back_while_its_old_slot_is_still_read() -> None:
    caller = Caller([1], 8, {1: 2}, Lru())
    caller.load([0, 1])
    settle(caller)
    caller.launch()
    caller.launch()
    caller.finish([7, 1])
    start = caller.launch()
    assert start.withdrawn.tolist() == [0]
    assert [copy.expert for copy in start.copies] == [7]
    caller.finish([0, 1])
    caller.end_copies()
    settle(caller)
    caller.step([0, 1])
    settle(caller)
    assert caller.readable == {0, 1}
    caller.check()


# ---- prefill


def test_ex05_a_prefill_that_uses_every_expert_leaves_the_decode_set_alone() -> None:
    def decode(num_prefills: int) -> tuple[set[int], list[float]]:
        caller = Caller([1] * 2, 8, {1: 6}, DecayedFrequency())
        trace = numbers(drifting(2, 2, 8, 2, 40))
        for used in trace:
            caller.step(used)
        settle(caller)
        before = caller.readable
        for _ in range(num_prefills):
            caller.step(range(16), trains=False)
        assert caller.readable == before
        assert caller.cache.counters.hits.sum() + caller.cache.counters.misses.sum() == trace.size
        for used in trace:
            caller.step(used)
        return caller.readable, caller.cache.counters.hits.tolist()

    assert decode(0) == decode(20)


# ---- policies in bad weather


def weather(kind: str, num_steps: int = 300) -> np.ndarray:
    """16 experts, 4 a step."""
    rng = np.random.default_rng(7)
    if kind == "uniform":
        return np.array([rng.permutation(16)[:4] for _ in range(num_steps)])
    if kind == "one hot":
        return np.array([[0, *(1 + rng.permutation(15)[:3])] for _ in range(num_steps)])
    if kind == "phases":
        return np.array([rng.permutation(6)[:4] + 6 * (step // 50 % 2) for step in range(num_steps)])
    return np.array([np.arange(4) + 4 * (step % 4) for step in range(num_steps)])  # all tied


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kind", ["uniform", "one hot", "phases", "tied"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "ours", "random"])
def test_ex06_never_more_evictions_than_misses(kind: str, policy: str) -> None:
    caller = Caller([1], 16, {1: 6}, POLICIES[policy]())
    for used in weather(kind):
        caller.step(used)
    counters = caller.cache.counters
    assert counters.evictions.sum() <= counters.copies.sum() <= counters.misses.sum()
    if kind == "one hot":
        assert 0 in caller.readable or policy == "random"


def test_trap_16_equal_scores_never_swap() -> None:
    policy = DecayedFrequency(payback=0.0, hysteresis=1.0)
    policy.start(np.ones(2))
    equal = policy.choose(np.array([1]), np.array([0]), 0)
    assert not equal.admitted.size
    caller = Caller([1], 16, {1: 6}, DecayedFrequency(recency_weight=0.0, payback=0.0))
    for used in weather("tied"):
        caller.step(used)
    assert caller.cache.counters.evictions.sum() == 0, "hysteresis outweighs the decay of three steps"


def test_trap_16_scores_decay() -> None:
    caller = Caller([1], 4, {1: 1}, DecayedFrequency())
    for expert in [0] * 30 + [1] * 60:
        caller.step([expert])
        if expert == 0:
            assert caller.readable <= {0}
    assert caller.readable == {1}, "thirty uses long ago weigh less than sixty now"


def test_uses_are_noted_of_steps_that_train_and_of_no_others() -> None:
    cache = ExpertCache([1, 1], 4, {1: 2}, DecayedFrequency())
    for step, (used, trains) in enumerate((([1, 6], True), ([0, 2, 3], False))):
        cache.start_step()
        cache.finish_step(step, np.array(used), trains=trains)
    assert cache.uses.shares().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
