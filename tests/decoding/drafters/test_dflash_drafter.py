"""The drafter over a context of rows: what it proposes of a lattice, which rows it has, and its errors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.drafters.ngram import NgramDrafter
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.errors import GenerationFault, OutOfMemoryError
from coldstream.models.dflash.spec import DflashSpec, DraftLattice
from dflash_cases import ALL_SLIDING, CASES, MIXED, VOCAB, config, features, open_model, spec_of


@dataclass
class ScriptedContext:
    """A context that counts its rows and drafts `lattice`."""

    lattice: DraftLattice
    spec: DflashSpec = field(default_factory=lambda: spec_of(config()))
    length: int = 0
    has_last: bool = False
    failure: Exception | None = None
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def append(self, rows: np.ndarray) -> None:
        if self.failure is not None:
            raise self.failure
        self.length += len(rows)
        self.has_last = True

    def truncate(self, length: int) -> None:
        self.has_last = self.has_last and 0 < length <= self.length
        self.length = length

    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        self.calls.append((anchor, num_rows, num_candidates))
        if self.failure is not None:
            raise self.failure
        return self.lattice


def observed(context: ScriptedContext, count: int = 3, **options: Any) -> DflashDrafter:
    drafter = DflashDrafter(context, **options)
    drafter.extend(list(range(count)), np.zeros((count, 2), np.float32))
    return drafter


def marginal(probs: Sequence[Sequence[float]], first_id: int = 10) -> DraftLattice:
    values = np.log(np.array(probs))
    return DraftLattice(first_id + np.arange(values.size).reshape(values.shape), values)


MARGINAL = marginal([[0.6, 0.35], [0.5, 0.4]])  # tokens 10, 11 at the first position, 12, 13 at the second


def test_a_marginal_lattice_gives_the_likeliest_paths() -> None:
    tree = observed(ScriptedContext(MARGINAL)).propose([0, 1, 2, 3], 5)
    assert tree.token_ids == (10, 11, 12, 13, 12)
    assert tree.parents == (-1, -1, 0, 0, 1)
    assert np.allclose(np.exp(tree.log_probs), [0.6, 0.35, 0.3, 0.24, 0.175])


def test_a_conditional_lattice_gives_other_tokens_after_other_parents() -> None:
    """Candidates are ranked by what follows the parent, wherever they stand in the lattice."""
    first = [[0.3, 0.7], [0.9, 0.1]]  # its first row alone counts
    second = [[0.8, 0.2], [0.1, 0.9]]
    lattice = DraftLattice(np.array([[10, 11], [12, 13]]), np.log(np.array([first, second])))
    tree = observed(ScriptedContext(lattice)).propose([0, 1, 2, 3], 6)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    found = dict(zip(paths, np.exp(tree.log_probs), strict=True))
    expected = {(11,): 0.7, (11, 13): 0.63, (10,): 0.3, (10, 12): 0.24, (11, 12): 0.07, (10, 13): 0.06}
    assert found == pytest.approx(expected)
    assert paths == list(expected)


def test_a_candidate_that_the_head_excludes_ends_a_list() -> None:
    lattice = DraftLattice(np.array([[10, 11]]), np.array([[0.0, -np.inf]]))
    assert observed(ScriptedContext(lattice)).propose([0, 1, 2, 3], 6).token_ids == (10,)


def test_the_block_is_as_long_as_was_given_whatever_the_budget() -> None:
    context = ScriptedContext(MARGINAL)
    assert observed(context).propose([0, 1, 2, 7], 1).token_ids == (10,)
    assert context.calls == [(7, 8, 8)]
    context = ScriptedContext(MARGINAL)
    observed(context, num_rows=4, branching=3).propose([0, 1, 2, 7], 60)
    assert context.calls == [(7, 4, 3)]


def test_a_causal_block_has_no_more_rows_than_the_tree_may_be_deep() -> None:
    context = ScriptedContext(MARGINAL, spec_of(config(is_causal=True)))
    drafter = observed(context, num_rows=6)
    for budget in (1, 4, 5, 60):
        drafter.propose([0, 1, 2, 7], budget)
    assert [call[1] for call in context.calls] == [2, 5, 6, 6]


@pytest.mark.parametrize("case", ["mixed, causal", "second, causal"])
def test_a_shorter_causal_block_gives_the_same_tree(case: str) -> None:
    values = CASES.get(case) or config(True, **ALL_SLIDING, is_causal=True)
    model = open_model(values)
    whole, short = (DflashDrafter(model.new_sequence()) for _ in range(2))
    rows = features(model.spec, 30)
    for drafter in (whole, short):
        drafter.extend(list(range(30)), rows)
    for budget in (1, 3, 6):
        expected = whole.propose([*range(30), 5], 60).first(budget)
        check_same(short.propose([*range(30), 5], budget), expected)


def test_nothing_is_proposed_without_the_last_row_or_for_another_context() -> None:
    context = ScriptedContext(MARGINAL)
    drafter = DflashDrafter(context)
    assert drafter.propose([1], 8) == NO_DRAFT
    drafter.extend([0, 1, 2], np.zeros((3, 2), np.float32))
    for other in ([0, 1, 2], [0, 1, 2, 3, 4], []):
        assert drafter.propose(other, 8) == NO_DRAFT
    assert drafter.propose([0, 1, 2, 3], 8) != NO_DRAFT
    drafter.truncate(5)  # two more that it did not observe
    assert drafter.propose([0, 1, 2, 3, 4, 5], 8) == NO_DRAFT
    drafter.extend([], np.zeros((0, 2), np.float32))
    drafter.extend([6], np.zeros((1, 2), np.float32))
    assert drafter.propose([0, 1, 2, 3, 4, 6, 7], 8) != NO_DRAFT


@pytest.mark.parametrize("anchor", [-1, VOCAB, 10**9])
def test_trap_32_an_anchor_that_is_no_token_has_no_draft(anchor: int) -> None:
    context = ScriptedContext(MARGINAL)
    drafter = observed(context)
    assert drafter.propose([0, 1, 2, anchor], 8) == NO_DRAFT
    assert not context.calls
    assert drafter.propose([0, 1, 2, 3], 8) != NO_DRAFT


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["marginal", "conditional"])
def test_a_draft_that_is_not_finite_stops_it_until_a_truncation(bad: float, kind: str) -> None:
    values = MARGINAL.log_probs.copy()
    values[1, 0] = bad
    if kind == "conditional":
        values = np.stack([values, values])
    context = ScriptedContext(DraftLattice(MARGINAL.token_ids, values))
    drafter = observed(context)
    assert drafter.propose([0, 1, 2, 3], 8) == NO_DRAFT
    context.lattice = MARGINAL
    assert drafter.propose([0, 1, 2, 3], 8) == NO_DRAFT
    drafter.extend([3], np.zeros((1, 2), np.float32))
    assert drafter.propose([0, 1, 2, 3, 4], 8) == NO_DRAFT
    assert context.length == 3
    drafter.truncate(4)  # of which the last was observed while it was off
    assert drafter.propose([0, 1, 2, 3, 4], 8) == NO_DRAFT
    drafter.extend([4], np.zeros((1, 2), np.float32))
    assert drafter.propose([0, 1, 2, 3, 4, 5], 8) != NO_DRAFT


@pytest.mark.parametrize("error", [OutOfMemoryError("rows"), GenerationFault("failed")])
@pytest.mark.parametrize("where", ["extend", "propose"])
def test_a_failure_stops_it_until_a_truncation(error: Exception, where: str) -> None:
    context = ScriptedContext(MARGINAL)
    drafter = observed(context)
    context.failure = error
    if where == "extend":
        drafter.extend([3], np.zeros((1, 2), np.float32))
        drafter.truncate(4)
        drafter.extend([4], np.zeros((1, 2), np.float32))
        assert drafter.propose([0, 1, 2, 3, 4, 5], 8) == NO_DRAFT
    else:
        assert drafter.propose([0, 1, 2, 3], 8) == NO_DRAFT
    context.failure = None
    drafter.truncate(2)
    drafter.extend([2], np.zeros((1, 2), np.float32))
    assert drafter.propose([0, 1, 2, 3], 8) != NO_DRAFT


def test_drafters_say_which_layers_they_read() -> None:
    context = ScriptedContext(MARGINAL)
    drafter: Drafter = DflashDrafter(context)
    assert (drafter.name, drafter.wants_hidden, drafter.aux_layers) == ("dflash", False, (1, 3, 6))
    assert NgramDrafter().aux_layers == MtpDrafter.aux_layers == ()


class AnyCalls(RuleBasedStateMachine):
    """After any calls a drafter proposes what a fresh one does that observed the same at once."""

    values = config(**MIXED | {"sliding_window": 10_000})

    def __init__(self) -> None:
        super().__init__()
        self.model = open_model(self.values)
        self.drafter = DflashDrafter(self.model.new_sequence())
        self.tokens: list[int] = []
        self.rows = np.empty((0, self.model.spec.feature_size), np.float32)
        self.seed = 0

    @rule(count=st.sampled_from((1, 1, 2, 5, 13, 40)))
    def extend(self, count: int) -> None:
        self.seed += 1
        token_ids = [(7 * self.seed + i) % VOCAB for i in range(count)]
        rows = features(self.model.spec, count, self.seed)
        self.tokens += token_ids
        self.rows = np.concatenate((self.rows, rows))
        passed_rows = rows.copy()
        self.drafter.extend(token_ids, passed_rows)
        passed_rows[:] = np.nan  # valid during the call only

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        last = len(self.tokens)
        length = data.draw(st.sampled_from(sorted({0, last // 2, max(0, last - 3), max(0, last - 1), last})))
        self.drafter.truncate(length)
        del self.tokens[length:]
        self.rows = self.rows[:length]

    @rule(root=st.integers(0, VOCAB - 1), budget=st.sampled_from((1, 4, 15)))
    def propose(self, root: int, budget: int) -> None:
        tree = self.drafter.propose([*self.tokens, root], budget)
        fresh = DflashDrafter(self.model.new_sequence())
        fresh.extend(self.tokens, self.rows)
        expected = fresh.propose([*self.tokens, root], budget)
        assert (expected == NO_DRAFT) == (not self.tokens)
        check_same(tree, expected)


def check_same(tree: TokenTree, expected: TokenTree) -> None:
    """But for what rounding in runs of other sizes may change."""
    assert np.allclose(tree.log_probs, expected.log_probs, atol=1e-4)
    if np.diff(expected.log_probs, prepend=0, append=-99).max(initial=-1) < -1e-3:
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)


class AnyCallsOfTheSecondKind(AnyCalls):
    values = CASES["second, full"]


TestAnyCalls = AnyCalls.TestCase
TestAnyCallsOfTheSecondKind = AnyCallsOfTheSecondKind.TestCase
for machine in (TestAnyCalls, TestAnyCallsOfTheSecondKind):
    machine.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def test_trap_34_a_truncation_to_nothing_is_a_fresh_drafter() -> None:
    model = open_model(config(**ALL_SLIDING))
    drafter = DflashDrafter(model.new_sequence())
    rows = features(model.spec, 60)
    drafter.extend(list(range(40)), rows[:40])
    drafter.propose([*range(40), 5], 8)
    drafter.truncate(0)
    drafter.extend([1, 2, 3], rows[57:])
    fresh = DflashDrafter(model.new_sequence())
    fresh.extend([1, 2, 3], rows[57:])
    assert drafter.propose([1, 2, 3, 4], 8) == fresh.propose([1, 2, 3, 4], 8) != NO_DRAFT
