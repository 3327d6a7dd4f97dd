"""The drafter of repeated text, against its definition on the whole context."""

import itertools
from collections.abc import Sequence
from functools import partial
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.drafters.drafter import Drafter
from coldstream.decoding.drafters.ngram import NgramDrafter
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import build_tree

contexts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
)
budgets = st.integers(1, 12)
orders = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


def _extended(
    token_ids: Sequence[int], min_n: int = 1, max_n: int = 4, most_matches: int = 16
) -> NgramDrafter:
    drafter = NgramDrafter(min_n=min_n, max_n=max_n, most_matches=most_matches)
    drafter.extend(token_ids, None)
    return drafter


def _by_definition(
    context: list[int],
    budget: int,
    min_n: int,
    max_n: int,
    most_matches: int = 16,
    observed: int | None = None,
) -> TokenTree:
    """observed: how many of the context's tokens the drafter observed."""
    end_of_all = len(context) if observed is None else observed + 1
    for n in range(max_n, min_n - 1, -1):
        ends = [end for end in range(n, end_of_all) if context[end - n : end] == context[-n:]]
        if ends:
            return build_tree(partial(_after, context, ends[::-1][:most_matches], n), budget)
    return NO_DRAFT


def _after(context: list[int], ends: list[int], n: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
    """What follows `path` at those ends, reading the path itself as what follows the context."""
    text, depth = [*context, *path], len(path) + 1
    following = [text[end + depth - 1] for end in ends if text[end : end + depth - 1] == list(path)]
    ranked = sorted(
        dict.fromkeys(following), key=lambda token: (-following.count(token), following.index(token))
    )
    mass = len(following) + 10 / (n + depth - 1) ** 2
    return ranked, [log(following.count(token) / mass) for token in ranked]


def test_it_is_a_drafter_that_needs_no_hidden_states() -> None:
    drafter: Drafter = NgramDrafter()
    assert (drafter.name, drafter.wants_hidden) == ("ngram", False)
    assert drafter.propose([1], 4) == NO_DRAFT


@given(contexts, budgets, orders, st.integers(1, 4))
def test_it_proposes_what_its_definition_says(
    context: list[int], budget: int, order: tuple[int, int], most_matches: int
) -> None:
    drafter = _extended(context[:-1], *order, most_matches)
    assert drafter.propose(context, budget) == _by_definition(context, budget, *order, most_matches)


@given(st.data())
def test_however_it_was_extended_and_truncated_it_is_like_a_new_one(data: st.DataObject) -> None:
    drafter, token_ids = NgramDrafter(max_n=3), list[int]()
    for _ in range(data.draw(st.integers(0, 5))):
        length = data.draw(st.integers(0, len(token_ids)))
        more = data.draw(st.lists(st.integers(0, 2), max_size=12))
        drafter.truncate(length)
        for piece in (more[:4], more[4:]):
            drafter.extend(piece, None)
        token_ids = token_ids[:length] + more
    anew = _extended(token_ids, max_n=3)
    assert (drafter._token_ids, drafter._latest) == (anew._token_ids, anew._latest)
    assert drafter._earlier == anew._earlier
    for root in range(3):
        context = [*token_ids, root]
        draft = drafter.propose(context, 8)
        assert (
            draft
            == anew.propose(context, 8)
            == drafter.propose(context, 8)
            == _by_definition(context, 8, 1, 3)
        )


@given(contexts, contexts, st.integers(-3, 3), budgets)
def test_the_context_decides_whatever_was_observed(
    context: list[int], observed: list[int], shift: int, budget: int
) -> None:
    """Too much, too little or something else: a draft is a continuation that the context has."""
    for token_ids in (observed, context[: max(0, len(context) + shift)], [*context, *observed]):
        tree = _extended(token_ids).propose(context, budget)
        paths: list[list[int]] = []
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token_id])
        for path in paths:
            text = [*context, *path]
            ends = range(1, len(context))
            assert any(
                text[end - 1] == context[-1] and text[end : end + len(path)] == path for end in ends
            ), "what followed the root before"


@given(contexts, st.integers(0, 40), budgets)
def test_what_it_did_not_observe_is_not_looked_at(context: list[int], length: int, budget: int) -> None:
    """A sequence whose first tokens come from a cache starts with less: it drafts from the rest alone."""
    length = min(length, len(context) - 1)
    tree = _extended(context[:length]).propose(context, budget)
    assert tree == _by_definition(context, budget, 1, 4, observed=length)


def test_the_longest_run_goes_before_later_and_more_frequent_shorter_ones() -> None:
    context = [1, 2, 3, 7, 9, 3, 8, 9, 3, 8, 1, 2, 3]
    assert _extended(context[:-1]).propose(context, 1).token_ids == (7,)
    assert _extended(context[:-1], max_n=1).propose(context, 1).token_ids == (8,)
    assert _extended(context[:-1], min_n=4).propose(context, 1) == NO_DRAFT


def test_different_continuations_are_a_tree_the_frequent_and_the_latest_first() -> None:
    context = [5, 1, 8, 5, 2, 8, 5, 3, 8, 5, 1, 9, 4, 5]
    tree = _extended(context[:-1]).propose(context, 12)
    children = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent < 0]
    assert children == [1, 3, 2]
    below = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == 0]
    assert (tree.token_ids[0], below) == (1, [9, 8])


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_continued_beyond_the_end_of_the_context(period: int) -> None:
    endless = itertools.cycle(range(period))
    context = [next(endless) for _ in range(2 * period + 1)]
    tree = _extended(context[:-1]).propose(context, 20)
    assert tree.token_ids == tuple(next(endless) for _ in range(20))
    assert tree.parents == tuple(range(-1, 19))


def test_longer_agreement_is_more_certain() -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    context_of = {n: [*text, *text[4 - n : 4]] for n in (1, 2, 3)}
    lines = [_extended(context[:-1]).propose(context, 3).log_probs for context in context_of.values()]
    conditional = [[line[0], line[1] - line[0], line[2] - line[1]] for line in lines]
    assert [each[0] for each in conditional] == sorted(each[0] for each in conditional)
    for each in conditional:
        assert each == sorted(each), "a node deeper in agrees over one more token"


@pytest.mark.parametrize(("min_n", "max_n", "matches"), [(0, 3, 1), (3, 2, 1), (1, 1, 0)])
def test_settings_without_a_meaning_are_refused(min_n: int, max_n: int, matches: int) -> None:
    with pytest.raises(AssertionError):
        NgramDrafter(min_n=min_n, max_n=max_n, most_matches=matches)


def test_cutting_and_growing_again_leaves_nothing_behind() -> None:
    """Memory is a function of the sequence's length, however often a draft was rejected."""
    drafter = _extended([1, 2, 3, 1, 2])
    sizes = set()
    for attempt in range(50):
        drafter.extend([1000 + attempt, 2000 + attempt], None)
        sizes.add((len(drafter._latest), *(len(each) for each in drafter._earlier.values())))
        drafter.truncate(5)
    assert len(sizes) == 1
    drafter.truncate(0)
    assert not drafter._latest
