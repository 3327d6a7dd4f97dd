"""The drafter over a block's rows: which rows there are after any calls, what it proposes, and its errors."""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from coldstream import kvcache
from coldstream.decoding.drafters.mtp import MtpDrafter
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import Candidates, top_log_probs
from coldstream.errors import GenerationFault, OutOfMemoryError
from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.sample.settings import RowSettings

VOCAB = 12
Row = tuple[int, bytes]  # a token, and the state before it
MAX_WAITING = 9
TEXT = FusedText(3, 0, 9, RowSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 0, 0), frozenset())
COUNTS = st.sampled_from((1, 1, 2, 3, MAX_WAITING, MAX_WAITING + 1, 30))


def state_of(token_ids: Sequence[int]) -> np.ndarray:
    """The trunk's hidden state after all these tokens, [2]."""
    return np.random.default_rng([1, *token_ids]).normal(size=2).astype(np.float32)


class HashBlock:
    """A block whose output is a hash of all rows, so that every row shows in what it predicts."""

    def __init__(self, branching: int) -> None:
        self.branching = branching
        self.rows: list[Row] = []
        self.capacity = 10_000
        self.runs: list[int] = []  # rows of each call
        self.device = object()  # in place of fused steps
        self.logits_of: dict[bytes, np.ndarray] = {}  # by output, in place of the hash

    @property
    def length(self) -> int:
        return len(self.rows)

    @property
    def room(self) -> int:
        return self.capacity - self.length

    def keep(self, hidden: np.ndarray) -> list[np.ndarray]:
        return list(hidden.copy())

    def append(self, token_ids: Sequence[int], states: Sequence[np.ndarray]) -> None:
        assert 0 < len(token_ids) == len(states)
        hidden = np.stack(states)
        if len(token_ids) > self.room:
            raise OutOfMemoryError("rows of a draft")
        if not np.isfinite(hidden).all():
            raise GenerationFault("not finite")
        self.runs.append(len(token_ids))
        self.rows += [(token, state.tobytes()) for token, state in zip(token_ids, hidden, strict=True)]

    def chain(self, num_steps: int) -> Generator[Candidates, None, None]:
        num_rows = self.length
        try:
            for step in range(num_steps):
                output = output_of(self.rows)
                candidates = self._candidates(output)
                yield candidates
                if step + 1 == num_steps or not self.room:
                    return
                self.append(candidates[0][:1], [output])
        finally:
            self.truncate(num_rows)

    def _candidates(self, output: np.ndarray) -> Candidates:
        logits = self.logits_of.get(output.tobytes(), logits_of(output))
        (token_ids,), (log_probs,) = top_log_probs(logits[None], self.branching)
        return token_ids.tolist(), log_probs.tolist()

    has_fused_steps = True

    def begin_fused(self, sequence: kvcache.Sequence, text: FusedText) -> Any:
        assert text is TEXT
        return self.device

    def truncate(self, length: int) -> None:
        assert length <= self.length
        del self.rows[length:]


def output_of(rows: Sequence[Row]) -> np.ndarray:
    seed = [crc32(state, token) for token, state in rows]
    return np.random.default_rng(seed).normal(size=2).astype(np.float32)


def logits_of(output: np.ndarray) -> np.ndarray:
    return np.random.default_rng(list(output.tobytes())).normal(0, 2, VOCAB).astype(np.float32)


def expected_chain(rows: list[Row], depth: int) -> tuple[list[int], list[float]]:
    """The likeliest token at each depth, and the log-probability of the path to it."""
    rows, tokens, log_probs = list(rows), [], []
    for _ in range(depth):
        output = output_of(rows)
        logits = logits_of(output).astype(np.float64)
        tokens.append(int(logits.argmax()))
        normalised = logits.max() - np.log(np.exp(logits).sum())
        log_probs.append((log_probs[-1] if log_probs else 0.0) + float(normalised))
        rows.append((tokens[-1], output.tobytes()))
    return tokens, log_probs


class Observing:
    """A drafter, the sequence it observes, and by the contract the rows that its block has to have."""

    def __init__(self, *, branching: int = 1, **options: Any) -> None:
        self.block = HashBlock(branching)
        options = {"max_steps": 3, "min_followed": 0.0, "max_waiting": MAX_WAITING} | options
        self.drafter = MtpDrafter(self.block, **options)
        self.tokens: list[int] = []
        self.missing: set[int] = set()  # rows
        self.first_known: int | None = 0  # the first state that the drafter still has, None: not the last
        self.root: int | None = None  # of the last proposal, until it observes tokens

    def extend(self, token_ids: list[int]) -> None:
        first = len(self.tokens)
        if self.first_known is None:
            self.missing.add(first - 1)
            self.first_known = first
        elif self.root == token_ids[0]:
            self.first_known = first  # the row of the state before is in the block
        self.root = None
        self.tokens += token_ids
        ends = range(first + 1, len(self.tokens) + 1)
        observed = np.stack([state_of(self.tokens[:end]) for end in ends])
        self.drafter.extend(token_ids, observed)
        observed[:] = np.nan  # valid during the call only
        first_kept = max(self.first_known, len(self.tokens) - MAX_WAITING)
        self.missing |= set(range(self.first_known, first_kept))
        self.first_known = first_kept

    def propose(self, root: int, budget: int = 64) -> TokenTree:
        tree = self.drafter.propose([*self.tokens, root], budget)
        if self.tokens and self.first_known is not None:
            self.first_known, self.root = len(self.tokens) - 1, root
        return tree

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)
        self.root = None
        if length < len(self.tokens):
            is_known = self.first_known is not None and self.first_known < length
            if not is_known:
                self.first_known = None if length else 0
                self.missing = {row for row in self.missing if row < length - 1}
            del self.tokens[length:]

    def rows(self, root: int) -> list[Row]:
        context = [*self.tokens, root]
        known = [row for row in range(len(self.tokens)) if row not in self.missing]
        return [(context[row + 1], state_of(context[: row + 1]).tobytes()) for row in known]


class AnyCalls(RuleBasedStateMachine):
    """In any order of calls the block has the rows of a drafter that observed the same at once."""

    def __init__(self) -> None:
        super().__init__()
        self.observed = Observing()
        self.random = np.random.default_rng(5)

    @rule(count=COUNTS)
    def extend(self, count: int) -> None:
        self.observed.extend(self.random.integers(0, VOCAB, count).tolist())

    @rule(root=st.integers(0, VOCAB - 1), data=st.data())
    def propose_and_accept(self, root: int, data: st.DataObject) -> None:
        """Or reject the whole draft, root included."""
        observed = self.observed
        tree = observed.propose(root)
        if not observed.tokens or observed.first_known is None:
            assert tree == NO_DRAFT
            return
        assert observed.block.rows == observed.rows(root)
        tokens, log_probs = expected_chain(observed.rows(root), 3)
        assert list(tree.token_ids) == tokens
        assert np.allclose(tree.log_probs, log_probs)
        assert tree.parents == (-1, 0, 1)
        accepted = data.draw(st.integers(-1, 3))
        if accepted >= 0:
            observed.extend([root, *tokens[:accepted]])

    @rule(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), is_known=st.booleans())
    def fused(self, tokens: list[int], is_known: bool) -> None:
        """A device computes rows of all tokens but the last, which is the next root."""
        observed, (root, *following) = self.observed, tokens
        fused = observed.drafter.begin_fused([*observed.tokens, root], kvcache.Sequence(None), TEXT)
        if not observed.tokens or observed.first_known is None:
            assert fused is None
            return
        assert fused is observed.block.device
        assert observed.block.rows == observed.rows(root)
        observed.first_known, observed.root = len(observed.tokens) - 1, root
        for token, after in pairwise(tokens):
            observed.tokens.append(token)
            observed.block.rows.append((after, state_of(observed.tokens).tobytes()))
        observed.drafter.end_fused(len(following), state_of(observed.tokens) if is_known else None)
        if following:
            observed.first_known, observed.root = len(observed.tokens) - 1 if is_known else None, None

    @precondition(lambda self: self.observed.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        last = len(self.observed.tokens)
        self.observed.truncate(
            data.draw(st.sampled_from(sorted({0, 1, last // 2, max(0, last - 2), last - 1, last})))
        )


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_step_after_a_verified_one_computes_its_rows_and_the_root_in_one_run() -> None:
    observed = Observing()
    observed.extend([3])
    observed.extend([1, 2, 5, 7])
    assert observed.block.runs == []
    observed.propose(4)
    assert observed.block.runs == [5, 1, 1]
    observed.extend([4, 8, 9])  # the root, which has been computed, and two that were accepted
    observed.propose(0)
    assert observed.block.runs[3:] == [3, 1, 1]


@pytest.mark.parametrize("counts", [[100], [1] * 100, [60, 1, 39]])
def test_the_last_rows_wait_for_a_proposal_and_those_before_are_left_out(counts: list[int]) -> None:
    observed = Observing()
    for count in counts:
        observed.extend(list(range(10)) * (count // 10) + [3] * (count % 10))
    assert observed.block.runs == []
    observed.propose(3)
    assert observed.block.runs == [MAX_WAITING, 1, 1]
    assert observed.block.rows == observed.rows(3)
    assert observed.missing == set(range(100 - MAX_WAITING))
    observed.extend([3, 4])
    observed.propose(5)
    assert observed.block.runs[3:] == [2, 1, 1]
    assert len(observed.block.rows) == MAX_WAITING + 2


def test_another_root_replaces_the_row_of_the_first() -> None:
    observed = Observing()
    observed.extend([1, 2])
    observed.propose(3)
    observed.propose(4)
    assert observed.block.rows == observed.rows(4)
    observed.extend([5, 6])
    observed.propose(7)
    assert observed.block.rows == observed.rows(7)


@pytest.mark.parametrize("branching", [1, 2, 5, VOCAB + 3])
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_the_tree_is_the_likeliest_of_the_chain_and_its_siblings(branching: int, budget: int) -> None:
    observed = Observing(max_steps=4, branching=branching)
    observed.extend([1, 2, 3])
    tree = observed.propose(4, budget)
    nodes: list[tuple[float, tuple[int, ...]]] = []
    chain, before, rows = (), 0.0, observed.rows(4)
    for _ in range(4):
        output = output_of(rows)
        logits = logits_of(output).astype(np.float64)
        log_probs = before + logits - np.log(np.exp(logits).sum())
        best = np.argsort(-log_probs, kind="stable")[:branching]
        nodes += [(log_probs[token], (*chain, int(token))) for token in best]
        chain, before = (*chain, int(best[0])), log_probs[best[0]]
        rows = [*rows, (chain[-1], output.tobytes())]
    nodes = sorted(nodes, reverse=True)[:budget]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token))
    assert paths == [path for _, path in nodes]
    assert np.allclose(tree.log_probs, [log_prob for log_prob, _ in nodes])
    assert len(observed.block.runs) <= 1 + max(len(path) for path in paths)


def test_a_row_is_computed_only_if_the_tree_has_room_for_what_it_predicts() -> None:
    observed = Observing(max_steps=8)
    observed.extend([1])
    for budget in (1, 2, 5):
        observed.block.runs.clear()
        assert len(observed.propose(2, budget)) == budget
        assert len(observed.block.runs) == budget


@pytest.mark.parametrize("min_followed", [0.9, 0.2, 0.02])
def test_unlikely_paths_are_not_followed(min_followed: float) -> None:
    observed = Observing(max_steps=8, branching=3, min_followed=min_followed)
    every = Observing(max_steps=8, branching=3)
    for each in (observed, every):
        each.extend([1, 2])
    tree, whole = observed.propose(3), every.propose(3)
    nodes = zip(whole.token_ids, whole.parents, whole.log_probs, strict=True)
    followed = [-1, *(i for i, log_prob in enumerate(whole.log_probs) if log_prob >= np.log(min_followed))]
    expected = [(token, log_prob) for token, parent, log_prob in nodes if parent in followed]
    assert list(zip(tree.token_ids, tree.log_probs, strict=True)) == expected
    assert 3 <= len(expected) < len(whole)
    assert len(observed.block.runs) == max(tree.depths)


def test_nothing_is_proposed_before_a_state_is_known_and_for_another_context() -> None:
    observed = Observing()
    assert observed.propose(1) == NO_DRAFT
    observed.extend([1, 2])
    for context in ([1, 2], [1, 2, 3, 4]):
        assert observed.drafter.propose(context, 8) == NO_DRAFT
    assert observed.propose(3) != NO_DRAFT
    observed.truncate(1)  # whose state has been used
    assert observed.propose(2) == NO_DRAFT
    observed.extend([2])
    assert observed.propose(3) != NO_DRAFT
    assert observed.block.rows == observed.rows(3)
    assert observed.missing == {0}


def test_a_truncation_within_what_waits_loses_nothing() -> None:
    observed = Observing()
    observed.extend([1, 2, 3, 4])
    observed.truncate(2)
    assert observed.propose(9) != NO_DRAFT
    assert observed.block.rows == observed.rows(9)
    assert not observed.missing


def test_a_drafter_may_begin_within_a_sequence() -> None:
    """Such as one whose first tokens were computed for another request."""
    observed = Observing()
    observed.drafter.truncate(5)
    observed.tokens, observed.first_known, observed.missing = [1, 2, 3, 4, 5], None, {0, 1, 2, 3}
    assert observed.propose(6) == NO_DRAFT
    observed.extend([6, 7])
    assert observed.propose(8) != NO_DRAFT
    assert observed.block.rows == observed.rows(8)
    observed.extend([8])
    observed.drafter.truncate(12)  # four more that it did not observe
    observed.tokens += [0, 1, 2, 3]
    observed.first_known, observed.missing = None, observed.missing | {7, 8, 9, 10}
    observed.extend([4, 5])
    assert observed.propose(6) != NO_DRAFT
    assert observed.block.rows == observed.rows(6)
    observed.truncate(7)
    observed.extend([1])
    assert observed.propose(2) != NO_DRAFT
    assert observed.block.rows == observed.rows(2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, MAX_WAITING], ids=["step", "prompt"])
def test_states_that_are_not_finite_stop_it_until_a_truncation(bad: float, count: int) -> None:
    observed = Observing()
    observed.extend([1, 2, 3])
    observed.propose(4)
    observed.extend([4])
    states = np.zeros((count, 2), np.float32)
    states[count // 2, 1] = bad
    observed.drafter.extend([5] * count, states)
    observed.tokens += [5] * count
    for _ in range(2):
        assert observed.propose(6) == NO_DRAFT
        observed.drafter.extend([6], np.zeros((1, 2), np.float32))
        observed.tokens.append(6)
    observed.first_known = None  # of a state that was observed while it was off
    observed.truncate(4)
    observed.extend([7, 8])
    assert observed.propose(9) != NO_DRAFT
    assert observed.block.rows == observed.rows(9)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_stop_it_until_a_truncation(bad: float, depth: int) -> None:
    observed = Observing()
    observed.extend([1, 2])
    rows = observed.rows(3)
    tokens, _ = expected_chain(rows, 3)
    for token in tokens[:depth]:
        rows.append((token, output_of(rows).tobytes()))
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = bad
    observed.block.logits_of[output_of(rows).tobytes()] = logits
    assert observed.propose(3) == NO_DRAFT
    observed.block.logits_of.clear()
    assert observed.propose(3) == NO_DRAFT
    observed.first_known = None
    observed.drafter.extend([3], state_of([1, 2, 3])[None])
    observed.tokens.append(3)
    observed.truncate(2)
    assert observed.propose(3) == NO_DRAFT
    observed.extend([3])
    assert observed.propose(4) != NO_DRAFT
    assert observed.block.rows == observed.rows(4)


def test_it_stops_where_the_block_has_no_room() -> None:
    observed = Observing(max_steps=8)
    observed.extend([1, 2, 3])
    observed.block.capacity = 5
    assert (
        len(observed.propose(4)) == 3
    )  # rows: three computed, then two of the draft, and what those predict
    observed.extend([4, 5, 6])
    assert observed.propose(7) == NO_DRAFT
    assert observed.propose(7) == NO_DRAFT
    observed.block.capacity = 100
    observed.truncate(0)
    observed.extend([1, 2])
    assert observed.propose(3) != NO_DRAFT
    assert observed.block.rows == observed.rows(3)
