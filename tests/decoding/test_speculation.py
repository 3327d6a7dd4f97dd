"""The statistics of what drafts brought to a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import DraftCounts, SizeReason, StepCosts
from coldstream.kernels.fused.reference import FusedResult


def test_statistics_are_the_sums_of_steps() -> None:
    counts = DraftCounts("chains")
    for num_accepted in (3, 1):
        counts.count(4, num_accepted, SizeReason.FIXED, StepCosts(0.014, 0.002, 0.0001, 0.0003, 0.001))
    counts.count(0, 0, SizeReason.NOT_ASKED, StepCosts(0.01))
    found = counts.statistics()
    assert (found.drafter, found.steps, found.drafted_steps, found.drafted) == ("chains", 3, 2, 8)
    assert (found.accepted_by_depth, found.sizes) == ((2, 1, 1), ((0, 1), (4, 2)))
    assert found.accepted == 4
    assert found.tokens_per_step == pytest.approx(1 + 4 / 3)
    assert found.accepted_per_draft == 2.0
    assert found.verify_s == pytest.approx(0.038)
    assert found.draft_s == pytest.approx(0.004)
    assert found.build_s == pytest.approx(0.0002)
    assert found.size_s == pytest.approx(0.0006)
    assert found.choose_s == pytest.approx(0.002)
    assert dict(found.reasons) == {"fixed": 2, "not_asked": 1}
    assert (found.fused_steps, found.experts, found.cold_experts, found.experts_per_draft) == (
        0,
        None,
        None,
        None,
    )


def test_fused_steps_count_their_whole_time_and_no_reason() -> None:
    counts = DraftCounts("mtp")
    counts.count_fused(FusedResult((7, 8, 9), 0, 3, is_last=False), 0.02)
    counts.count_fused(FusedResult((), 5, 2, is_last=True), 0.01)
    found = counts.statistics()
    assert (found.steps, found.fused_steps, found.drafted, found.accepted_by_depth) == (2, 2, 5, (1, 1))
    assert found.verify_s == pytest.approx(0.03)
    assert found.reasons == ()


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)))))
def test_experts_are_those_of_steps_with_nodes(steps: list[tuple[int, tuple[int, int] | None]]) -> None:
    """Each: its nodes, and its experts in fast memory and others, if they are counted."""
    counts = DraftCounts("chains")
    for num_nodes, uses in steps:
        counts.count(num_nodes, 0, SizeReason.FIXED, StepCosts(0.01, expert_uses=uses))
    drafted = [uses for num_nodes, uses in steps if num_nodes and uses is not None]
    total, cold = sum(map(sum, drafted)), sum(misses for _, misses in drafted)
    found, num_drafted = counts.statistics(), sum(num_nodes > 0 for num_nodes, _ in steps)
    if total == 0:
        assert (found.experts, found.cold_experts, found.experts_per_draft) == (None, None, None)
        return
    assert (found.experts, found.cold_experts) == (total, cold)
    assert found.experts_per_draft == (total / num_drafted, cold / num_drafted)


def test_statistics_of_no_step() -> None:
    found = DraftCounts("chains").statistics()
    assert (found.steps, found.tokens_per_step, found.accepted_per_draft) == (0, 0.0, 0.0)
