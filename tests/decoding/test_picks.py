"""Tokens along draft trees are those that are chosen one by one, and a walk says which nodes they accept."""

from collections.abc import Sequence

import numpy as np
import pytest
from far_logits import FarStep
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import (
    NO_DRAFT,
    AnyLogits,
    Continuation,
    SamplingParams,
    TokenChooser,
    TokenTree,
    TreeWalk,
    begin_all_picks,
)
from coldstream.errors import GenerationFault

VOCAB = 4  # so few that random drafts are often right
ROOT_AND_MORE = st.integers(1, 8)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Of any shape."""
    nodes = draw(st.lists(st.tuples(st.integers(-1, 7), st.integers(0, VOCAB - 1)), max_size=8))
    parents = tuple(min(parent, row - 1) for row, (parent, _) in enumerate(nodes))
    return TokenTree(tuple(token for _, token in nodes), parents, (0.0,) * len(nodes))


def logits_after(seed: int, token_ids: Sequence[int]) -> np.ndarray:
    return np.random.default_rng([seed, *token_ids]).normal(size=VOCAB).astype(np.float32)


def path_of(tree: TokenTree, node: int) -> list[int]:
    return [] if node < 0 else [*path_of(tree, tree.parents[node]), tree.token_ids[node]]


def rows_of(tree: TokenTree, seed: int, context: list[int], is_far: bool) -> list[AnyLogits]:
    values = np.stack([logits_after(seed, [*context, *path_of(tree, node)]) for node in range(-1, len(tree))])
    step = FarStep(values)
    return [step[row] if is_far else values[row] for row in range(len(values))]


def plain_tokens(
    chooser: TokenChooser, seed: int, context: list[int], end_ids: frozenset[int], most: int
) -> list[int]:
    tokens = Continuation(context, end_ids=end_ids, max_tokens=most)
    while not tokens.has_ended:
        tokens.append(chooser(logits_after(seed, tokens.ids), tokens.ids).token_id, VOCAB)
    return tokens.ids[len(context) :]


@given(
    trees(),
    st.integers(0, 99),
    st.sampled_from(
        [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, frequency_penalty=0.7)]
    ),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    ROOT_AND_MORE,
    st.booleans(),
    st.none() | st.integers(1, 8),
)
def test_trap_45_a_walk_takes_the_plain_tokens_and_leaves_the_last_one_pending(
    tree: TokenTree,
    seed: int,
    params: SamplingParams,
    end_ids: frozenset[int],
    most: int,
    is_far: bool,
    taken: int | None,
) -> None:
    context = [3, 1]
    chooser = TokenChooser(params, seed, len(context), ())
    wanted = plain_tokens(chooser, seed, context, end_ids, most)
    (pick,) = begin_all_picks({0: (chooser, rows_of(tree, seed, context, is_far), tree, context)}).values()
    tokens, walk = Continuation(context, end_ids=end_ids, max_tokens=most), TreeWalk(tree)
    found = list[int]()
    for chosen in walk.take(tokens, pick, VOCAB):
        found.append(chosen.token_id)
        if len(found) == taken:
            break
    assert found == wanted[: len(found)]
    assert tokens.ids == [*context, *found]
    assert len(walk.rows) == len(found)
    was_left = len(found) == taken
    # The rows behind which tokens were chosen are the root's and those of accepted nodes, in order.
    assert walk.rows == [0, *(1 + node for node in walk.accepted)][: len(walk.rows)]
    assert [tree.token_ids[node] for node in walk.accepted] == found[: len(walk.accepted)]
    if not was_left:
        deepest = walk.accepted[-1] if walk.accepted else -1
        assert len(found) == 1 + len(walk.accepted)
        assert tokens.has_ended or tree.child(deepest, found[-1]) is None
        assert walk.is_truncated == tokens.has_ended


@pytest.mark.parametrize("end", range(1, 9))
def test_trap_43_an_end_within_an_accepted_run_ends_the_walk_there(end: int) -> None:
    chooser = TokenChooser(SamplingParams(temperature=0.0), 0, 1, ())
    wanted = plain_tokens(chooser, 5, [2], frozenset(), 12)
    tree = TokenTree(tuple(wanted[:-1]), tuple(range(-1, len(wanted) - 2)), (0.0,) * (len(wanted) - 1))
    (pick,) = begin_all_picks({0: (chooser, rows_of(tree, 5, [2], False), tree, [2])}).values()
    tokens, walk = Continuation([2], end_ids=(), max_tokens=end), TreeWalk(tree)
    assert [each.token_id for each in walk.take(tokens, pick, VOCAB)] == wanted[:end]
    assert walk.accepted == list(range(end - 1))
    assert walk.rows == list(range(end))
    assert walk.is_truncated


def test_trap_44_nodes_on_a_device_have_penalties_for_the_root_too() -> None:
    rows = FarStep(np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32))
    tree = TokenTree((1, 2, 0), (-1, 0, -1), (0.0, 0.0, 0.0))
    params = SamplingParams(frequency_penalty=0.5, repeat_last_n=2)
    chooser = TokenChooser(params, 3, 2, ())
    pick = begin_all_picks({0: (chooser, [rows[row] for row in range(4)], tree, [3, 3])})[0]
    assert rows.chosen == [[0, 1, 2, 3]]
    assert [list(each.recent) for each in rows.observed] == [[3, 3], [3, 1], [1, 2], [3, 0]]
    assert [each.position for each in rows.observed] == [2, 3, 4, 3]
    assert pick(1, [3, 3, 1, 2]) == chooser(rows.values[2], [3, 3, 1, 2])


@pytest.mark.parametrize("is_far", [False, True])
def test_a_fault_beside_the_path_does_not_matter_and_one_on_it_leaves_its_row_out(is_far: bool) -> None:
    values = np.random.default_rng(3).normal(size=(3, VOCAB)).astype(np.float32)
    values[2] = np.nan
    step = FarStep(values)
    rows: list[AnyLogits] = [step[row] if is_far else values[row] for row in range(3)]
    chooser = TokenChooser(SamplingParams(temperature=0.0), 3, 1, ())
    best = int(np.argmax(values[0]))
    beside = TokenTree((best, (best + 1) % VOCAB), (-1, -1), (0.0, 0.0))
    on_path = TokenTree(((best + 1) % VOCAB, best), (-1, -1), (0.0, 0.0))
    for tree, num_tokens in ((beside, 2), (on_path, 1)):
        (pick,) = begin_all_picks({0: (chooser, rows, tree, [3])}).values()
        walk, found = TreeWalk(tree), list[int]()
        tokens = walk.take(Continuation([3], end_ids=(), max_tokens=9), pick, VOCAB)
        if tree is on_path:
            with pytest.raises(GenerationFault, match="at position 2"):
                found += (each.token_id for each in tokens)
        else:
            found += (each.token_id for each in tokens)
        assert len(walk.rows) == num_tokens


def test_no_draft_is_an_empty_tree() -> None:
    assert not NO_DRAFT
    assert NO_DRAFT.child(-1, 0) is None
    assert NO_DRAFT.depths == ()
