"""While nothing is drafted, the speculative loop launches its steps as the loop ahead of the host does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from test_speculative import VOCAB, RandomDrafts, Run

from coldstream.decoding import NO_DRAFT, SamplingParams, TokenTree

PLAIN, EMPTY, NODE = "no draft", "a draft without nodes", "a draft with a node"
NEVER_CHOSEN = VOCAB


@dataclass
class PlannedDrafts(RandomDrafts):
    """What is drafted before each step, as planned; every step gives one token, as no node is right."""

    plan: Sequence[str] = ()
    events: list[str] = field(default_factory=list)  # what was asked and told, in order
    is_usual: list[bool] = field(default_factory=list)  # of each step without nodes

    def planned(self, step: int) -> str:
        return self.plan[step] if step < len(self.plan) else PLAIN

    def will_draft(self, most: int) -> bool:
        """Of the step after the one under way, which was not told yet."""
        self.events.append("asked")
        return most > 0 and self.planned(len(self.told) + 1) != PLAIN

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        self.events.append("drafted")
        has_node = most > 0 and self.planned(len(self.told)) == NODE
        return TokenTree((NEVER_CHOSEN,), (-1,), (0.0,)) if has_node else NO_DRAFT

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
        super().went_on(num_steps, seconds, is_usual=is_usual)
        self.events.append("told")
        self.is_usual.append(is_usual)


def run_of(drafts: PlannedDrafts, num_steps: int) -> Run:
    return Run([2], drafts, SamplingParams(), max_tokens=1 + num_steps, is_far=True)


plans = st.lists(st.sampled_from([PLAIN, PLAIN, PLAIN, EMPTY, NODE]), min_size=1, max_size=20)


def test_without_drafts_all_steps_but_the_first_are_launched_before_their_tokens_are_known() -> None:
    drafts = PlannedDrafts(0, 0)
    run = run_of(drafts, 12)
    assert run.other.launched == [False] + [True] * 11
    assert run.results[1] == run.results[0]


@given(plans)
def test_a_step_is_launched_ahead_of_its_token_exactly_if_nothing_may_be_drafted_for_it(
    plan: list[str],
) -> None:
    """And there is a step of one row before it, which chooses the token."""
    run = run_of(PlannedDrafts(0, 0, plan=plan), len(plan))
    plan = [*plan[:-1], PLAIN]  # nothing may follow the last token
    expected = [
        each == PLAIN and before != NODE
        for before, each in zip([NODE, *plan], plan, strict=False)
        if each != NODE
    ]
    assert run.other.launched == expected
    assert run.results[1] == run.results[0]
    assert run.other.token_ids == run.plain.token_ids


@given(plans)
def test_the_time_of_a_step_is_usual_if_others_were_under_way_before_and_after_it(plan: list[str]) -> None:
    drafts = PlannedDrafts(0, 0, plan=plan)
    run_of(drafts, len(plan))
    plan = [*plan[:-1], PLAIN]
    is_ahead = [each == PLAIN and before != NODE for before, each in zip([NODE, *plan], plan, strict=False)]
    assert drafts.is_usual == [
        ahead and follows
        for each, ahead, follows in zip(plan, is_ahead, [*is_ahead[1:], False], strict=True)
        if each != NODE
    ]


def test_whether_the_next_step_has_a_draft_is_asked_once_before_the_last_is_told() -> None:
    """Nothing else may be asked or told in between; and a step is told before its token is given out."""
    drafts = PlannedDrafts(0, 0, plan=[PLAIN, PLAIN, EMPTY, PLAIN])
    run_of(drafts, 6)
    first = ["drafted", "asked", "told", "asked", "told"]
    assert drafts.events == [*first, "drafted", *["asked", "told"] * 3, "told"]
