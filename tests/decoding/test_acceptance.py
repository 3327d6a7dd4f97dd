"""What is expected to be accepted becomes what is accepted, for drafters that are over- or underconfident."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.acceptance import AcceptanceModel
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree


def _chain(*probabilities: float) -> TokenTree:
    logs = [math.log(each) for each in probabilities]
    sums = tuple(sum(logs[: i + 1]) for i in range(len(logs)))
    return TokenTree(tuple(range(len(logs))), tuple(range(-1, len(logs) - 1)), sums)


def _siblings(*probabilities: float) -> TokenTree:
    logs = tuple(math.log(each) for each in probabilities)
    return TokenTree(tuple(range(len(logs))), (-1,) * len(logs), logs)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents: list[int] = []
    values: list[float] = []
    for node in range(draw(st.integers(0, 12))):
        parents.append(draw(st.integers(-1, node - 1)))
        before = 0.0 if parents[node] < 0 else values[parents[node]]
        values.append(before + draw(st.sampled_from([0.0, -0.01, -0.3, -1.0, -5.0, -1e9])))
    return TokenTree(tuple(range(len(parents))), tuple(parents), tuple(values))


@st.composite
def verified(draw: st.DrawFn) -> tuple[TokenTree, list[int]]:
    tree, path, node = draw(trees()), list[int](), -1
    while children := [i for i, parent in enumerate(tree.parents) if parent == node]:
        node = draw(st.sampled_from([*children, -1]))
        if node < 0:
            break
        path.append(node)
    return tree, path


def _given_parent(model: AcceptanceModel, tree: TokenTree) -> list[float]:
    by_node = model.expected("d", tree)
    return [
        each / (1.0 if parent < 0 else by_node[parent])
        for each, parent in zip(by_node, tree.parents, strict=True)
    ]


@given(st.lists(verified(), max_size=12), trees(), st.integers(0, 12))
def test_expectations_are_probabilities_of_a_tree(
    steps: list[tuple[TokenTree, list[int]]], tree: TokenTree, count: int
) -> None:
    model, again = AcceptanceModel(), AcceptanceModel()
    for step in steps:
        model.record("d", *step)
        again.record("d", *step)
    by_node = model.expected("d", tree)
    assert len(by_node) == len(tree)
    assert all(0.0 <= each <= 1.0 for each in by_node)
    for parent in {-1, *range(len(tree))}:
        together = sum(by_node[i] for i in range(len(tree)) if tree.parents[i] == parent)
        assert together <= (1.0 if parent < 0 else by_node[parent]) + 1e-12, "only one sibling is accepted"
    assert model.expected("d", tree.first(count)) == by_node[:count]
    assert again.expected("d", tree) == by_node == model.expected("d", tree), "pure"


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8))
def test_a_new_drafter_is_believed(probabilities: list[float]) -> None:
    expected = [math.prod(probabilities[: i + 1]) for i in range(len(probabilities))]
    assert AcceptanceModel().expected("new", _chain(*probabilities)) == pytest.approx(expected)


Truth = Callable[[int, float], float]  # the true probability, by depth and the drafter's
TRUTHS: dict[str, Truth] = {
    "calibrated": lambda depth, claimed: claimed,
    "overconfident": lambda depth, claimed: claimed**3,
    "underconfident": lambda depth, claimed: claimed**0.4,
    "worse the deeper": lambda depth, claimed: claimed * 0.85 ** (depth - 1),
    "the same for all": lambda depth, claimed: 0.4,
}


@pytest.mark.sharded
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_expectations_converge_to_the_true_shares(truth: Truth) -> None:
    """Of chains whose nodes' scores are drawn anew in every step, over the whole range of scores."""
    model, draws = AcceptanceModel(memory=4000.0), random.Random(1)
    for _ in range(12000):
        claimed = [draws.choice([0.96, 0.85, 0.65, 0.45, 0.25]) for _ in range(5)]
        accepted = 0
        while accepted < 5 and draws.random() < truth(accepted + 1, claimed[accepted]):
            accepted += 1
        model.record("d", _chain(*claimed), range(accepted))
    for score in (0.96, 0.85, 0.65, 0.45, 0.25):
        given_parent = _given_parent(model, _chain(score, score, score))
        for depth, each in enumerate(given_parent, 1):
            assert each == pytest.approx(truth(depth, score), abs=0.06)


def test_siblings_are_calibrated_each_for_itself() -> None:
    """The second of two is a trial as well when the first was accepted: then it was not."""
    model, draws = AcceptanceModel(memory=4000.0), random.Random(2)
    tree = _siblings(0.55, 0.25, 0.15)
    for _ in range(8000):
        draw = draws.random()
        model.record("d", tree, [0] if draw < 0.4 else [1] if draw < 0.75 else [])
    assert model.expected("d", tree) == pytest.approx((0.4, 0.35, 0.0), abs=0.03)


def test_only_nodes_whose_parent_was_accepted_are_trials() -> None:
    model, tree = AcceptanceModel(), TokenTree((1, 2, 3), (-1, -1, 1), tuple(map(math.log, (0.6, 0.3, 0.02))))
    untried = AcceptanceModel()
    for _ in range(50):
        model.record("d", tree, [0])
        untried.record("d", tree.first(2), [0])
    assert model.expected("d", tree) == untried.expected("d", tree)
    model.record("d", tree, [1])
    untried.record("d", tree.first(2), [1])
    assert model.expected("d", tree)[:2] == untried.expected("d", tree)[:2]
    assert model.expected("d", tree)[2] < untried.expected("d", tree)[2]


def test_drafters_depths_and_scores_are_distinguished() -> None:
    model = AcceptanceModel()
    for _ in range(200):
        model.record("bad", _chain(0.85, 0.85), [])
        model.record("good", _chain(0.85, 0.85), [0])
    first, second = (_given_parent_of(model, name, _chain(0.85, 0.85)) for name in ("bad", "good"))
    assert first[0] < 0.1 < 0.9 < second[0]
    assert second[1] < 0.2, "never accepted below an accepted one"
    assert model.expected("bad", _chain(0.15)) == pytest.approx((0.15,)), "another score"
    assert model.expected("other", _chain(0.85)) == pytest.approx((0.85,))


def _given_parent_of(model: AcceptanceModel, drafter: str, tree: TokenTree) -> tuple[float, float]:
    first, second = model.expected(drafter, tree)
    return first, second / first


def test_depths_that_were_not_reached_follow_the_others() -> None:
    model = AcceptanceModel()
    for _ in range(200):
        model.record("d", _chain(0.85), [])
    assert _given_parent(model, _chain(0.85, 0.85, 0.85))[2] < 0.15


def test_evidence_fades_with_steps_that_drafted_nothing() -> None:
    """So that a drafter that was given up is tried again, although no trial is made in the meantime."""
    model, tree = AcceptanceModel(), _chain(0.8)
    for _ in range(200):
        model.record("d", tree, [])
    expected = [model.expected("d", tree)[0]]
    for _ in range(4):
        for _ in range(16 * 400):
            model.record("d", NO_DRAFT, [])
        expected += model.expected("d", tree)
    assert expected[0] < 0.02
    assert expected == sorted(expected)
    assert expected[-1] == pytest.approx(0.8, abs=0.1)


def test_a_change_of_the_text_is_followed() -> None:
    model, tree = AcceptanceModel(), _chain(0.8)
    for _ in range(3000):
        model.record("d", tree, [0])
    for _ in range(300):
        model.record("d", tree, [])
    assert model.expected("d", tree)[0] < 0.35


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1.0, 1000.0])
def test_a_drafter_may_say_anything_about_itself(wrong: float) -> None:
    model, tree = AcceptanceModel(), TokenTree((1, 2), (-1, 0), (wrong, wrong))
    for accepted in ([], [0], [0, 1]):
        assert all(0.0 <= each <= 1.0 for each in model.expected("d", tree))
        model.record("d", tree, accepted)


@pytest.mark.parametrize("path", [[1], [0, 0], [0, 2], [1, 0]])
def test_accepted_nodes_must_be_a_path(path: list[int]) -> None:
    with pytest.raises(AssertionError, match="path from the root"):
        AcceptanceModel().record("d", TokenTree((1, 2, 3), (-1, 0, 1), (0.0, 0.0, 0.0)), path)


def test_memory_does_not_grow_with_steps_or_depth() -> None:
    model, draws = AcceptanceModel(), random.Random(3)
    for _ in range(600):
        claimed = [draws.random() for _ in range(40)]
        model.record("d", _chain(*claimed), range(draws.randrange(41)))
    assert len(model._shares) <= 14 * 17


@pytest.mark.parametrize(("with_draft", "without"), [(0, 0), (3, 0), (0, 160), (2, 48)])
def test_evidence_fades_with_drafts_and_a_sixteenth_as_fast_without(with_draft: int, without: int) -> None:
    """By the formula of the module's docstring, with a hit of one trial before."""
    memory, probability = 20.0, 0.25
    tree, other = _chain(probability), _chain(0.9)
    model = AcceptanceModel(memory)
    model.record("d", tree, [0])
    for _ in range(with_draft):
        model.record("d", other, [])
    for _ in range(without):
        model.record("d", NO_DRAFT, [])
    left = (1 - 1 / memory) ** (with_draft + without / 16)
    of_all = (left + 8 * probability) / (left + 8)
    assert model.expected("d", tree) == pytest.approx([(left + 8 * of_all) / (left + 8)])
    assert model.expected("another", tree) == pytest.approx([probability])
