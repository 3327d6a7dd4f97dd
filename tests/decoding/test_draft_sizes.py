"""How much of the trees of one sequence or several is verified."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import NO_DRAFT, FixedSizes, SizesByCost, TokenTree, TriedDraft
from coldstream.decoding.draft_sizes import _likeliest_first

probabilities = st.lists(st.floats(0.0, 1.0), max_size=6)


def chain(num_nodes: int, log_prob: float = -0.1) -> TokenTree:
    """Each node so much less likely than the one before."""
    log_probs = tuple(log_prob * (1 + i) for i in range(num_nodes))
    return TokenTree((7,) * num_nodes, tuple(range(-1, num_nodes - 1)), log_probs)


@given(st.lists(probabilities, max_size=5))
def test_nodes_of_several_trees_come_in_the_order_of_each(expected: list[list[float]]) -> None:
    """And at every place it is the likeliest of those that may come next."""
    left = [list(enumerate(nodes)) for nodes in expected]
    for tree, node in _likeliest_first(expected):
        best = max(nodes[0][1] for nodes in left if nodes)
        assert left[tree].pop(0) == (node, best)
        first = next(
            i for i, nodes in enumerate(expected) if i == tree or (left[i] and left[i][0][1] == best)
        )
        assert first == tree
    assert not any(left)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 63))
def test_fixed_trees_are_verified_whole(sizes: list[int], num_nodes: int) -> None:
    fixed = FixedSizes(num_nodes)
    assert fixed.sizes([chain(size) for size in sizes], 0.1) == sizes
    assert fixed.budget(20, len(sizes)) == min(20, num_nodes)
    assert not fixed.is_idle(len(sizes))


def go(
    sizes: SizesByCost, trees: Sequence[TokenTree], steps: int, *, accepted: int, row_s: float
) -> list[list[int]]:
    """Sizes of so many steps; of each tree at most so many nodes are accepted."""
    chosen = []
    for _ in range(steps):
        counts = [0] * len(trees)
        if (budget := sizes.budget(63 // len(trees), len(trees))) > 0:
            counts = sizes.sizes([tree.first(budget) for tree in trees], 1e-4)
        chosen.append(counts)
        tried = [
            TriedDraft(tree.first(count), range(min(accepted, count)))
            for tree, count in zip(trees, counts, strict=True)
        ]
        sizes.record(tried, 0.01 + row_s * sum(counts))
    return chosen


def test_likelier_trees_get_more_nodes() -> None:
    """Before anything was tried, as their drafters say."""
    sizes = SizesByCost("chains")
    trees = [chain(8, -1.5), chain(8, -0.02), NO_DRAFT]
    for counts in go(sizes, trees, 24, accepted=0, row_s=0.0):
        assert counts == [0, 0, 0]
    sizes.budget(20, 3)
    unlikely, likely, none = sizes.sizes(trees, 1e-4)
    assert likely >= 4
    assert unlikely < likely
    assert none == 0


@pytest.mark.parametrize("num", [2, 4])
def test_what_pays_is_learned_by_the_number_of_sequences(num: int) -> None:
    """Drafts that lose beside others do not end those of an answer that is alone, nor vice versa."""
    sizes = SizesByCost("chains")
    alone = go(sizes, [chain(8)], 300, accepted=8, row_s=0.0001)
    together = go(sizes, [chain(8)] * num, 900, accepted=0, row_s=0.01)
    assert sum(counts[0] >= 6 for counts in alone[-100:]) > 80
    assert sum(max(counts) == 0 for counts in together[-300:]) > 290
    assert sizes.is_idle(num)
    assert not sizes.is_idle(1)
    again = go(sizes, [chain(8)], 100, accepted=8, row_s=0.0001)
    assert sum(counts[0] > 0 for counts in again) > 80


@pytest.mark.parametrize("row_s", [0.003, 0.01, 0.03])
def test_a_drafter_observes_at_least_64_tokens_before_it_is_asked_again(row_s: float) -> None:
    """And of few others, where a draft takes as long as a step."""
    sizes, observed, num_reported = SizesByCost("chains"), 0, 0
    for step in range(6000):
        is_idle = sizes.is_idle()
        observed, num_reported = (0 if is_idle else observed + 1), num_reported + (not is_idle)
        if (budget := sizes.budget(63)) > 0:
            assert observed > min(step, 64)
            sizes.sizes([chain(budget)], 0.01)
            sizes.record([TriedDraft(chain(3), ())], 0.01 + 3 * row_s)
        else:
            sizes.record([TriedDraft(NO_DRAFT, ())], 0.01)
    assert num_reported < 2000


@pytest.mark.parametrize("num", [1, 3, 9])
def test_drafts_of_several_that_pay_are_used(num: int) -> None:
    chosen = go(SizesByCost("chains"), [chain(6)] * num, 400, accepted=6, row_s=0.0001)
    assert sum(min(counts) >= 1 for counts in chosen[-100:]) > 80
    assert all(sum(counts) + num <= 64 for counts in chosen)


def test_a_step_whose_texts_end_says_nothing_of_what_follows() -> None:
    """Of nodes that were not tried since the answer had ended."""
    ended, tried = SizesByCost("chains"), SizesByCost("chains")
    for sizes, is_truncated in ((ended, True), (tried, False)):
        go(sizes, [chain(4)], 30, accepted=4, row_s=0.0)
        for _ in range(40):
            sizes.record([TriedDraft(chain(4), (), is_truncated)], 0.01)
    assert ended._acceptance.expected("chains", chain(1)) > tried._acceptance.expected("chains", chain(1))


def test_drafts_that_are_free_and_not_used_do_not_keep_a_drafter_awake() -> None:
    """Steps vary so much that they may have paid, though in the mean they have not."""
    sizes = SizesByCost("test")
    for step in range(700):
        step_s = 0.0081 if step % 2 else 0.012
        if sizes.budget(9):
            sizes.sizes([NO_DRAFT], 1e-6)
            sizes.record([TriedDraft(NO_DRAFT, ())], step_s)
        else:
            sizes.record([TriedDraft(NO_DRAFT, ())], 0.01)
    assert sizes.is_idle()
