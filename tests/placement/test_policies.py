"""Policies: what each keeps, that none breaks a rule of residency or beats the offline optimum."""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from coldstream.placement.policies import (
    Belady,
    DecayedFrequency,
    Lfu,
    Lru,
    Policy,
    Static,
    num_numbers,
    numbers,
    simulate,
)
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace
from random_residency import RandomResidency

ONLINE: dict[str, Callable[[int | None], Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "static": lambda _: Static(),
    "ours": DecayedFrequency,
    "random": lambda max_copies: RandomResidency(5, max_copies),
}
NUM_EXPERTS = 12


def make_trace(
    seed: int, num_layers: int = 3, num_experts: int = 8, num_experts_per_tok: int = 2, num_steps: int = 60
) -> RoutingTrace:
    """Skewed and drifting, so that policies differ."""
    rng = np.random.default_rng(seed)
    likes = rng.normal(size=(num_layers, num_experts)) * 1.5
    topk_ids = np.empty((num_steps, num_layers, num_experts_per_tok), np.uint16)
    for step in range(num_steps):
        likes += rng.normal(size=likes.shape) * 0.3
        order = np.argsort(likes + rng.normal(size=likes.shape), axis=1)
        topk_ids[step] = order[:, -num_experts_per_tok:]
    return RoutingTrace(RoutedModel("0" * 32, num_layers, num_experts, num_experts_per_tok), topk_ids)


def from_numbers(steps: list[list[int]], num_experts: int) -> RoutingTrace:
    """A trace of one layer."""
    topk_ids = np.array(steps, np.uint16)[:, None, :]
    return RoutingTrace(RoutedModel("0" * 32, 1, num_experts, len(steps[0])), topk_ids)


class Residency(RuleBasedStateMachine):
    """One policy and its twin over arbitrary steps, of any size."""

    @initialize(
        kind=st.sampled_from(sorted(ONLINE)),
        capacity=st.integers(1, NUM_EXPERTS),
        max_copies=st.sampled_from((None, 0, 1, 3)),
        profile=st.lists(st.sampled_from((0.0, 0.25, 1.0)), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
        full=st.booleans(),
    )
    def begin(
        self, kind: str, capacity: int, max_copies: int | None, profile: list[float], full: bool
    ) -> None:
        self.capacity, self.max_copies, self.kind = capacity, max_copies, kind
        self.policy, self.twin = (ONLINE[kind](max_copies) for _ in range(2))
        for policy in (self.policy, self.twin):
            policy.start(np.array(profile))
        self.resident = np.zeros(NUM_EXPERTS, bool)
        self.resident[: capacity if full else 0] = True

    @rule(used=st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=6, unique=True))
    def step(self, used: list[int]) -> None:
        before = self.resident.copy()
        changes = self.policy.step(np.array(used), self.resident, self.capacity)
        assert np.array_equal(before, self.resident)
        again = self.twin.step(np.array(used), self.resident, self.capacity)
        assert np.array_equal(changes.admitted, again.admitted)
        assert np.array_equal(changes.evicted, again.evicted)
        admitted, evicted = changes.admitted.tolist(), changes.evicted.tolist()
        assert len({*admitted, *evicted}) == len(admitted) + len(evicted)
        assert set(admitted) <= {expert for expert in used if not before[expert]}
        assert set(evicted) <= set(np.flatnonzero(before).tolist()) - set(used)
        assert len(admitted) <= (len(used) if self.max_copies is None else self.max_copies)
        assert self.kind != "static" or not admitted
        self.resident[evicted] = False
        self.resident[admitted] = True
        assert self.resident.sum() == before.sum() + len(admitted) - len(evicted)
        assert self.resident.sum() <= self.capacity
        assert not evicted or self.resident.sum() == self.capacity  # nothing leaves while there is room


TestResidency = Residency.TestCase


@pytest.mark.sharded(6)
@pytest.mark.parametrize("kind", [*ONLINE, "belady"])
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 24), warm=st.booleans())
def test_counters_add_up_in_every_layer(kind: str, seed: int, capacity: int, warm: bool) -> None:
    trace = make_trace(seed)
    policy = Belady(trace) if kind == "belady" else ONLINE[kind](None)
    profile = make_trace(seed + 1).counts() / 60 if warm else None
    result = simulate(trace, policy, capacity, profile)
    uses = trace.num_steps * trace.model.num_experts_per_tok
    assert (result.hits + result.misses == uses).all()
    assert (result.copies <= result.misses).all()
    at_first = capacity if warm else 0
    assert 0 <= at_first + result.copies.sum() - result.evictions.sum() <= capacity
    assert result.hit_rate == result.hits.sum() / (3 * uses)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(
            vars(result).values(), vars(simulate(trace, policy, capacity, profile)).values(), strict=True
        )
    ), "a policy that has run starts anew"


@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 24), warm=st.booleans())
def test_no_policy_beats_the_offline_optimum(seed: int, capacity: int, warm: bool) -> None:
    trace = make_trace(seed)
    profile = make_trace(seed + 1).counts() / 60 if warm else None
    best = simulate(trace, Belady(trace), capacity, profile).hits.sum()
    for make in ONLINE.values():
        for max_copies in (None, 2):
            assert simulate(trace, make(max_copies), capacity, profile).hits.sum() <= best


@given(
    data=st.data(),
    num_experts_per_tok=st.integers(1, 3),
    capacity=st.integers(1, 4),
)
def test_the_offline_optimum_is_the_best_of_all_choices(
    data: st.DataObject, num_experts_per_tok: int, capacity: int
) -> None:
    step = st.lists(
        st.integers(0, 4), min_size=num_experts_per_tok, max_size=num_experts_per_tok, unique=True
    )
    steps = data.draw(st.lists(step, min_size=1, max_size=7))

    @cache
    def most_hits(index: int, resident: frozenset[int]) -> int:
        if index == len(steps):
            return 0
        reachable = sorted(resident | set(steps[index]))
        kept = combinations(reachable, min(capacity, len(reachable)))
        hits = len(resident & set(steps[index]))
        return hits + max(most_hits(index + 1, frozenset(choice)) for choice in kept)

    trace = from_numbers(steps, 5)
    assert simulate(trace, Belady(trace), capacity).hits.sum() == most_hits(0, frozenset())


@given(seed=st.integers(0, 10_000), capacity=st.integers(6, 24))
def test_lru_is_the_textbooks(seed: int, capacity: int) -> None:
    trace = make_trace(seed)
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for used in numbers(trace).tolist():
        hits += sum(expert in resident for expert in used)
        for expert in used:
            resident[expert] = None
            resident.move_to_end(expert)
        while len(resident) > capacity:
            resident.popitem(last=False)
    assert simulate(trace, Lru(), capacity).hits.sum() == hits


@given(seed=st.integers(0, 10_000), warm=st.booleans())
def test_more_slots_of_lru_hold_what_fewer_do(seed: int, warm: bool) -> None:
    """From as many slots as a step uses: below, protecting the step comes first."""
    trace = make_trace(seed)
    profile = make_trace(seed + 1).counts() / 60
    sizes = range(6, 25)
    residents = []
    for capacity in sizes:
        policy = Lru()
        policy.start(profile.ravel())
        resident = np.zeros(24, bool)
        if warm:
            resident[np.argsort(-profile.ravel(), kind="stable")[:capacity]] = True
        history = []
        for used in numbers(trace):
            changes = policy.step(used, resident, capacity)
            resident[changes.evicted] = False
            resident[changes.admitted] = True
            history.append(resident.copy())
        residents.append(np.array(history))
    for fewer, more in pairwise(residents):
        assert not (fewer & ~more).any()


def test_lfu_keeps_the_most_used_and_lets_every_miss_in() -> None:
    steps = [[0], [0], [1], [2], [0], [1], [1], [2]]
    result = simulate(from_numbers(steps, 3), Lfu(), 2)
    # 2 replaces 1 and 1 replaces 2, never 0; at the end 1 goes, as often used as 0 and of the higher number.
    assert (result.hits[0], result.copies[0], result.evictions[0]) == (3, 5, 3)
    assert simulate(from_numbers(steps, 3), Lru(), 2).hits[0] == 2


def test_ties_go_to_the_lower_number() -> None:
    policy = DecayedFrequency(payback=0.0)
    policy.start(np.zeros(8))
    resident = np.array([1, 1, 1, 1, 0, 0, 0, 0], bool)
    changes = policy.step(np.array([7, 5, 6]), resident, 4)
    assert (changes.admitted.tolist(), changes.evicted.tolist()) == ([5, 6, 7], [3, 2, 1])
    policy = DecayedFrequency(1)
    policy.start(np.zeros(8))
    changes = policy.step(np.array([7, 5, 6]), resident, 4)
    assert (changes.admitted.tolist(), changes.evicted.tolist()) == ([5], [3])


def test_hysteresis_and_payback_hold_a_replacement_back() -> None:
    def steps_until_replaced(**constants: float) -> int:
        policy = DecayedFrequency(recency_weight=0.0, decay=1 - 1e-9, **constants)
        policy.start(np.zeros(2))
        resident = np.array([True, False])
        for _ in range(10):
            assert policy.step(np.array([0]), resident, 1).admitted.size == 0
        for step in range(1, 30):
            if policy.step(np.array([1]), resident, 1).admitted.size:
                return step
        raise AssertionError("never replaced")

    assert steps_until_replaced(hysteresis=1.05, payback=0.0) == 11
    assert steps_until_replaced(hysteresis=1.55, payback=0.0) == 16
    assert steps_until_replaced(hysteresis=1.0, payback=3.5) == 14


def test_a_copy_that_does_not_pay_still_fills_a_free_slot() -> None:
    result = simulate(from_numbers([[0], [1], [0], [1]], 2), DecayedFrequency(payback=1e9), 2)
    assert (result.hits[0], result.copies[0], result.evictions[0]) == (2, 2, 0)


def test_a_candidate_that_finds_a_free_slot_evicts_no_expert() -> None:
    policy = DecayedFrequency()
    policy.start(np.zeros(3))
    resident = np.array([True, False, False])
    for _ in range(30):
        policy.step(np.array([0]), resident, 2)
    changes = policy.step(np.array([2, 1]), resident, 2)
    assert (changes.admitted.tolist(), changes.evicted.tolist()) == ([1], [])


def test_frequency_decays() -> None:
    policy = DecayedFrequency(decay=0.5, recency_weight=0.0)
    policy.start(np.array([0.0, 1.0, 0.0]))
    assert policy.scores.tolist() == [0.0, 2.0, 0.0]
    policy.observe(np.array([0, 2]))
    policy.observe(np.array([0]))
    assert policy.scores.tolist() == [1.5, 0.5, 0.5]


def test_what_was_used_long_ago_does_not_become_subnormal() -> None:
    policy = DecayedFrequency(decay=0.9, recency_decay=0.8)
    policy.start(np.full(3, 0.1))
    used = np.array([0])
    for _ in range(8000):
        policy.observe(used)
        assert policy.scores[1] == 0.0 or policy.scores[1] >= np.finfo(np.float64).tiny
    assert policy.scores[1] == policy.scores[2] == 0.0
    assert policy.scores[0] > 80.0


def test_recency_decides_between_equally_frequent_experts() -> None:
    policy = DecayedFrequency(decay=1 - 1e-9)
    policy.start(np.zeros(2))
    for used in (0, 0, 1, 1):
        policy.observe(np.array([used]))
    assert policy.scores[1] > policy.scores[0] + 1


def test_the_profile_chooses_who_is_resident_at_first() -> None:
    profile = np.array([[0.1, 0.5], [0.5, 0.2]])
    topk_ids = np.array([[[1], [0]]], np.uint16)
    trace = RoutingTrace(RoutedModel("0" * 32, 2, 2, 1), topk_ids)
    assert simulate(trace, Static(), 2, profile).hits.tolist() == [1, 1]
    assert simulate(trace, Static(), 1, profile).hits.tolist() == [1, 0]
    assert simulate(trace, Static(), 2).misses.tolist() == [1, 1]


def test_candidates_of_a_callers_own_are_chosen_best_first() -> None:
    policy = DecayedFrequency(2, payback=0.0, hysteresis=1.0)
    candidates, residents = np.array([3, 5, 4]), np.array([2, 0, 1])
    policy.start(np.array([0.1, 0.2, 0.3, 0.4, 0.9, 0.35]))
    for num_free, evicted in ((1, [0]), (0, [0, 1]), (5, [])):
        changes = policy.choose(candidates, residents, num_free)
        assert (changes.admitted.tolist(), changes.evicted.tolist()) == ([4, 3], evicted)
    policy.start(np.array([0.1, 0.2, 0.3, 0.4, 0.4, 0.4]))
    assert policy.choose(candidates, residents, 0).admitted.tolist() == [3, 4]
    policy.start(np.array([0.1, 0.2, 0.3, 0.0, 0.0, 0.0]))
    assert not policy.choose(candidates, residents, 0).admitted.size


@given(seed=st.integers(0, 1000), late=st.booleans())
def test_weights_multiply_what_is_compared(seed: int, late: bool) -> None:
    trace = make_trace(seed)
    profile, weights = (
        trace.counts().reshape(-1) / trace.num_steps,
        2.0 ** (np.arange(num_numbers(trace)) % 4),
    )
    make = DecayedFrequency.for_late_copies if late else DecayedFrequency
    plain, weighted = make(), make(weights=weights)
    for policy in (plain, weighted):
        policy.start(profile)
    for used in numbers(trace):
        assert np.array_equal(weighted.scores, weights * plain.scores)
        for policy in (plain, weighted):
            policy.observe(used)


def test_trap_18_a_weighted_expert_stays_longer_and_leaves_for_what_is_used_more() -> None:
    def uses_until_replaced(weight: float) -> int:
        policy = DecayedFrequency(
            recency_weight=0.0, decay=1 - 1e-9, hysteresis=1.0, payback=0.5, weights=np.array([weight, 1.0])
        )
        policy.start(np.zeros(2))
        resident = np.array([True, False])
        for _ in range(4):
            assert not policy.step(np.array([0]), resident, 1).evicted.size
        for uses in range(1, 20):
            if policy.step(np.array([1]), resident, 1).evicted.tolist() == [0]:
                return uses
        raise AssertionError("never replaced")

    assert [uses_until_replaced(weight) for weight in (0.5, 1.0, 1.5, 3.0)] == [3, 5, 7, 13]


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        simulate(make_trace(0), Lru(), 0)


@pytest.mark.parametrize(
    ("hysteresis", "payback", "candidate", "victim", "pays"),
    [
        (1.5, 0.0, 3.0, 2.0, False),  # as much as the hysteresis asks is not enough
        (1.5, 0.0, 3.25, 2.0, True),
        (1.0, 2.0, 4.0, 2.0, True),  # as much as the copy costs is
        (1.0, 2.0, 3.75, 2.0, False),
        (1.5, 2.0, 100.0, 97.0, False),  # pays the copy back, and is hardly better
        (1.5, 2.0, 2.0, 1.0, False),  # twice as good, and does not
        (1.5, 2.0, 3.0, 0.0, True),
        (1.5, 2.0, 2.0, 3.0, False),
        (1.5, 2.0, 0.0, -np.inf, True),  # a free slot
    ],
)
def test_a_copy_pays_if_it_is_better_by_a_share_and_by_what_it_costs(
    hysteresis: float, payback: float, candidate: float, victim: float, pays: bool
) -> None:
    policy = DecayedFrequency(hysteresis=hysteresis, payback=payback)
    assert policy.pays(np.array([candidate]), np.array([victim])).tolist() == [pays]
