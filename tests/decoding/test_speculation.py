"""Drafts of one sequence: their sizes, when the drafter rests, and the statistics of a request."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import NO_DRAFT, FixedSizes, SizesByCost, Speculation, TokenTree, TriedDraft
from coldstream.decoding.rest import TOLD_STEPS
from coldstream.decoding.round_sizes import FixedRounds, RoundsByCost
from coldstream.kernels.rounds.reference import Accepted

PLAIN_S, CHOOSE_S, BUILD_S = 0.01, 0.001, 0.0001


class Chains:
    """Proposes chains of as many nodes as are asked for."""

    name = "chains"
    wants_hidden = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.asked: list[int] = []

    def cut(self, length: int) -> None: ...

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None: ...

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        self.asked.append(budget)
        log_probs = tuple(-0.1 * i for i in range(budget))
        return TokenTree((7,) * budget, tuple(range(-1, budget - 1)), log_probs, BUILD_S)


def _go(speculation: Speculation, num_steps: int, accepted: int, row_s: float) -> list[int]:
    """Sizes of so many steps, of which each accepts at most `accepted` nodes."""
    sizes = []
    for _ in range(num_steps):
        tree = speculation.draft([1, 2, 3], 100)
        sizes.append(len(tree))
        path = range(min(accepted, len(tree)))
        if tree:
            speculation.verified(path, PLAIN_S + row_s * len(tree), CHOOSE_S, is_cut=False)
        else:
            speculation.went_on(1, PLAIN_S, is_usual=True)
    return sizes


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 63])
def test_fixed_sizes_have_so_many_nodes_as_far_as_there_is_room(num_nodes: int) -> None:
    speculation = Speculation(Chains(), FixedSizes(num_nodes))
    assert len(speculation.draft([1], 100)) == num_nodes
    assert len(speculation.draft([1], 3)) == min(num_nodes, 3)
    assert speculation.draft([1], 0) == NO_DRAFT


def test_no_tree_has_more_rows_than_one_may_have() -> None:
    assert len(Speculation(Chains(), FixedSizes(500)).draft([1], 1000)) == 63


def test_drafts_that_pay_are_long_and_those_that_do_not_are_rare() -> None:
    paying, losing = (Speculation(Chains(), SizesByCost("chains")) for _ in range(2))
    sizes = _go(paying, 600, accepted=9, row_s=0.0005)[-100:]
    assert sum(size >= 6 for size in sizes) > 90
    sizes = _go(losing, 600, accepted=0, row_s=0.005)
    assert sizes[-500:].count(0) > 480
    assert not paying.is_idle


def test_sp10_a_drafter_that_does_not_pay_rests_and_wakes() -> None:
    drafter = Chains()
    speculation = Speculation(drafter, SizesByCost("chains"))
    _go(speculation, 100, accepted=0, row_s=0.005)
    idle, asked = [], []
    for _ in range(9000):
        drafter.asked.clear()
        _go(speculation, 1, accepted=0, row_s=0.005)
        idle.append(speculation.is_idle)
        asked.append(bool(drafter.asked))
    assert 0.8 < sum(idle) / len(idle) < 0.9
    for was_idle, was_asked in zip(idle, asked[1:], strict=False):
        assert not (was_idle and was_asked)
    assert any(asked[4000:])
    while speculation.is_idle:
        _go(speculation, 1, accepted=0, row_s=0.005)
    assert max(_go(speculation, 500, accepted=9, row_s=0.0005)) >= 6
    assert not speculation.is_idle


def test_whether_it_is_idle_is_looked_up_once_a_step_and_is_what_the_sizes_say() -> None:
    class Asked(SizesByCost):
        num_asked = 0

        def is_idle(self, num_sequences: int = 1) -> bool:
            self.num_asked += 1
            return super().is_idle(num_sequences)

        def is_really_idle(self) -> bool:
            return super().is_idle()

    sizes = Asked("chains")
    speculation, seen = Speculation(Chains(), sizes), set()
    for step in range(1200):
        found = {speculation.is_idle for _ in range(3)}
        assert sizes.num_asked == 1 + step
        assert found == {sizes.is_really_idle()}
        seen |= found
        _go(speculation, 1, accepted=0, row_s=0.005)
    assert seen == {False, True}


def test_statistics_are_those_of_a_request() -> None:
    speculation = Speculation(Chains(), FixedSizes(4))
    _go(speculation, 3, accepted=1, row_s=0.001)
    speculation.start()
    _go(speculation, 2, accepted=3, row_s=0.001)
    speculation.draft([1], 0)
    speculation.went_on(1, PLAIN_S, is_usual=True)
    found = speculation.statistics()
    assert (found.drafter, found.steps, found.drafted_steps, found.drafted) == ("chains", 3, 2, 8)
    assert (found.accepted_by_depth, found.sizes) == ((2, 2, 2), ((0, 1), (4, 2)))
    assert (found.accepted, found.tokens_per_step, found.accepted_per_draft) == (6, 3.0, 3.0)
    assert found.verify_s == pytest.approx(2 * (PLAIN_S + 0.004) + PLAIN_S)
    assert found.choose_s == pytest.approx(2 * CHOOSE_S)
    assert found.build_s == pytest.approx(2 * BUILD_S)
    assert found.draft_s > 0
    assert found.size_s > 0
    assert (found.experts, found.cold_experts, found.experts_per_draft) == (None, None, None)


def test_drafts_that_are_not_used_do_not_pay_where_a_step_after_one_is_unusual() -> None:
    """As on a device, where it is not launched while another one runs."""
    speculation = Speculation(Chains(), SizesByCost("chains"))
    _go(speculation, 40, accepted=0, row_s=1.0)
    num_drafts = 0
    for _ in range(400):
        was_asked = speculation.will_draft(9)
        num_drafts += was_asked
        if tree := speculation.draft([1, 2, 3], 9):
            speculation.verified((), PLAIN_S + 1.0 * len(tree), CHOOSE_S, is_cut=False)
        else:
            speculation.went_on(1, PLAIN_S * (1 + was_asked), is_usual=not was_asked)
    assert num_drafts < 40


class ToldRounds(FixedRounds):
    """Remembers which rounds took as long as others of their size."""

    def __init__(self) -> None:
        super().__init__(3)
        self.usual: list[bool] = []

    def record(self, accepted: Accepted, seconds: float, *, is_usual: bool = True) -> None:
        self.usual.append(is_usual)


def test_steps_while_rounds_rest_are_told_to_rounds_alone() -> None:
    speculation = Speculation(Chains(), SizesByCost("chains"))
    speculation.rounds = rounds = RoundsByCost()
    assert not speculation.rests()
    while not rounds.rests():
        rounds.start()
        rounds.next()
        rounds.record(Accepted((7,), 0, 0, is_last=False), PLAIN_S)
        rounds.next()
        rounds.record(Accepted((7,), 0, 1, is_last=False), 9 * PLAIN_S)
    assert speculation.rests()
    assert speculation.is_idle
    assert not speculation.will_draft(9)
    assert speculation.num_together() == 1
    while speculation.is_idle:
        speculation.went_on(1, PLAIN_S, is_usual=True)
    assert not speculation.will_draft(9)
    for _ in range(TOLD_STEPS):
        assert speculation.rests()
        speculation.went_on(1, PLAIN_S, is_usual=True)
    assert speculation.will_draft(9)
    assert not speculation.rests()
    assert speculation.sizes.num_together() == SizesByCost("chains").num_together()  # was told of none
    found = speculation.statistics()
    assert found.steps == found.sizes[0][1] > 3000
    assert (found.rounds, found.drafted) == (0, 0)


def test_rounds_in_which_anything_was_captured_say_nothing_of_their_time() -> None:
    """Also what was captured before the first round counts for none."""
    captured = [1, 1, 2, 2, 3, 4, 4]  # when rounds begin, and when each has ended
    speculation = Speculation(Chains(), SizesByCost("chains"), None, lambda: None, lambda: captured.pop(0))
    speculation.rounds = told = ToldRounds()
    speculation.begin_rounds()
    while captured:
        speculation.round_ended(Accepted((7,), 0, 3, is_last=False), PLAIN_S)
    assert told.usual == [True, False, True, False, False, True]


def test_steps_that_follow_a_draft_without_being_asked_for_one_have_none() -> None:
    """As where they are launched ahead; the first has a draft of which nothing was worth a row."""
    speculation = Speculation(Chains(), SizesByCost("chains"))
    _go(speculation, 60, accepted=0, row_s=1.0)
    speculation.start()
    while not speculation.will_draft(9):
        _go(speculation, 1, accepted=0, row_s=1.0)
    assert speculation.draft([1], 9) == NO_DRAFT
    before = speculation.statistics()
    for _ in range(3):
        speculation.will_draft(9)
        speculation.went_on(1, PLAIN_S, is_usual=True)
    after = speculation.statistics()
    assert dict(after.reasons)["plain"] == dict(before.reasons).get("plain", 0) + 1
    assert dict(after.reasons)["not_asked"] == dict(before.reasons).get("not_asked", 0) + 2
    assert after.drafted_steps == before.drafted_steps
    once = Speculation(Chains(), FixedSizes(2))
    once.draft([1], 9)
    once.verified((), PLAIN_S, CHOOSE_S, is_cut=False)
    draft_s = once.statistics().draft_s
    once.went_on(1, PLAIN_S, is_usual=True)
    assert once.statistics().draft_s == draft_s
    assert once.statistics().drafted == 2


@given(st.integers(0, 400), st.integers(-1, 3))
def test_whether_a_step_is_drafted_is_what_the_draft_then_does(num_steps: int, most: int) -> None:
    """Asking changes nothing."""
    speculation = Speculation(Chains(), SizesByCost("chains"))
    _go(speculation, num_steps, accepted=num_steps % 3, row_s=0.002)
    asked = speculation.will_draft(most)
    assert speculation.will_draft(most) == asked
    drafter = speculation.drafter
    assert isinstance(drafter, Chains)
    drafter.asked.clear()
    speculation.draft([1], most)
    assert bool(drafter.asked) == asked


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_experts_are_those_of_steps_with_nodes(steps: list[tuple[bool, int, int]]) -> None:
    """Each: whether it has some, and its experts in fast memory and others; drafting may use some too."""
    uses = [0, 0]

    class Using(Chains):
        def propose(self, context: Sequence[int], budget: int) -> TokenTree:
            uses[0] += 100
            return super().propose(context, budget)

    speculation = Speculation(Using(), FixedSizes(3), expert_uses=lambda: (uses[0], uses[1]))
    hits = misses = num_drafted = 0
    for is_drafted, of_step, cold in steps:
        tree = speculation.draft([1], 9 * is_drafted)
        uses[0], uses[1] = uses[0] + of_step, uses[1] + cold
        if tree:
            speculation.verified((), PLAIN_S, CHOOSE_S, is_cut=False)
            hits, misses, num_drafted = hits + of_step, misses + cold, num_drafted + 1
        else:
            speculation.went_on(1, PLAIN_S, is_usual=True)
    found = speculation.statistics()
    if hits + misses == 0:
        assert (found.experts, found.cold_experts, found.experts_per_draft) == (None, None, None)
        return
    assert (found.experts, found.cold_experts) == (hits + misses, misses)
    assert found.experts_per_draft == ((hits + misses) / num_drafted, misses / num_drafted)


def test_deciding_the_size_is_part_of_the_time_that_a_draft_takes() -> None:
    told: list[float] = []

    class Noting(FixedSizes):
        def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
            told.append(seconds)

        def went_on(self, num_steps: int, seconds: float, *, is_usual: bool = True) -> None:
            told.append(seconds)

    speculation = Speculation(Chains(), Noting(3))
    speculation.draft([1], 9)
    speculation.verified((), PLAIN_S, CHOOSE_S, is_cut=False)
    speculation.went_on(1, PLAIN_S, is_usual=True)
    assert told == [PLAIN_S + speculation.statistics().size_s, PLAIN_S]
    assert told[0] > told[1]


def test_steps_in_which_a_device_made_what_others_use_are_told_so() -> None:
    told: list[bool] = []
    captured = 0

    class Noting(FixedSizes):
        def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
            told.append(is_usual)

    class Capturing(Chains):
        def propose(self, context: Sequence[int], budget: int) -> TokenTree:
            nonlocal captured
            captured += context[0]
            return super().propose(context, budget)

    speculation = Speculation(Capturing(), Noting(3), num_captured=lambda: captured)
    for in_draft, in_step in ((0, 0), (1, 0), (0, 1), (0, 0)):
        speculation.draft([in_draft], 9)
        captured += in_step
        speculation.verified((), PLAIN_S, CHOOSE_S, is_cut=False)
    assert told == [True, False, False, True]


def test_statistics_of_no_step() -> None:
    found = Speculation(Chains(), FixedSizes(4)).statistics()
    assert (found.steps, found.tokens_per_step, found.accepted_per_draft) == (0, 0.0, 0.0)
