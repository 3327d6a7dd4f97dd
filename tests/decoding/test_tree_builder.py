"""The best tree of a size, against every path there is and against a builder that looks at all of them."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding import tree_builder
from coldstream.decoding.token_tree import NO_DRAFT, TokenTree
from coldstream.decoding.tree_builder import (
    NO_CANDIDATES,
    Candidates,
    Path,
    Source,
    build_tree,
    conditional_source,
    marginal_source,
    top_log_probs,
)

# Few values, so that there are ties; sums of them are exact, so that ties are ties.
log_probs = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0])
odd_log_probs = log_probs | st.sampled_from([math.nan, math.inf, -math.inf, 0.5])
budgets = st.integers(0, 24)


def _ranked(values: Sequence[float]) -> list[float]:
    return sorted(values, reverse=True)


@st.composite
def marginals(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    depth, width = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    rows = st.lists(log_probs, min_size=width, max_size=width).map(_ranked)
    values = np.array(draw(st.lists(rows, min_size=depth, max_size=depth))).reshape(depth, width)
    ids = st.permutations(range(10, 10 + width))
    token_ids = np.array(draw(st.lists(ids, min_size=depth, max_size=depth)), np.int64).reshape(depth, width)
    return token_ids, values


@st.composite
def conditionals(draw: st.DrawFn) -> Callable[[int, int], Candidates]:
    """Lists by depth and parent, over three tokens."""
    depth = draw(st.integers(0, 4))
    lists = st.lists(log_probs, max_size=3).map(_ranked)
    table = {
        (at, parent): (draw(st.permutations(range(3))), draw(lists))
        for at, parent in product(range(1, depth + 1), range(3))
    }

    def children(at: int, parent: int) -> Candidates:
        token_ids, values = table.get((at, parent), NO_CANDIDATES)
        return token_ids[: len(values)], values

    return children


sources = st.one_of(
    marginals().map(lambda arrays: marginal_source(*arrays)),
    conditionals().map(lambda children: conditional_source(children, 0)),
)


def _all_paths(source: Source, path: Path = (), weight: float = 0.0) -> dict[Path, float]:
    paths: dict[Path, float] = {}
    for token_id, value in zip(*source(path), strict=True):
        below = (*path, token_id)
        paths |= {below: weight + value} | _all_paths(source, below, weight + value)
    return paths


def _paths(tree: TokenTree) -> list[Path]:
    paths: list[Path] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(() if parent < 0 else paths[parent]), token_id))
    return paths


def _by_definition(source: Source, budget: int, line: int) -> list[Path]:
    """Again and again the first of what may come next, by (weight, depth, rank, the earliest offer)."""
    weights: dict[Path, float] = {(): 0.0}
    offers: list[tuple[float, int, int, int, Path]] = []
    taken: list[Path] = []
    num_offers = 0

    def offer(parent: Path, rank: int) -> None:
        nonlocal num_offers
        token_ids, values = source(parent)
        if rank < len(values):
            path = (*parent, token_ids[rank])
            weights[path] = weights[parent] + values[rank]
            offers.append((-weights[path], len(path), rank, num_offers, path))
            num_offers += 1

    path: Path = ()
    while len(taken) < min(line, budget) and source(path)[0]:
        token_ids, values = source(path)
        weights[(*path, token_ids[0])] = weights[path] + values[0]
        path = (*path, token_ids[0])
        taken.append(path)
    for each in taken:
        offer(each[:-1], 1)
    offer(path, 0)
    while offers and len(taken) < budget:
        best = min(offers)
        offers.remove(best)
        taken.append(best[-1])
        offer(best[-1][:-1], best[2] + 1)
        offer(best[-1], 0)
    return taken


def _check_is_a_tree(tree: TokenTree) -> None:
    paths = _paths(tree)
    assert len(set(paths)) == len(paths), "no two siblings have the same token"
    for node, (parent, value) in enumerate(zip(tree.parents, tree.log_probs, strict=True)):
        assert -1 <= parent < node
        assert value <= (0.0 if parent < 0 else tree.log_probs[parent])


@given(sources, budgets)
def test_it_is_the_likeliest_tree_of_its_size(source: Source, budget: int) -> None:
    tree = build_tree(source, budget)
    _check_is_a_tree(tree)
    every = _all_paths(source)
    assert len(tree) == min(budget, len(every))
    assert list(tree.log_probs) == _ranked(list(every.values()))[: len(tree)]
    assert {path: every[path] for path in _paths(tree)} == dict(
        zip(_paths(tree), tree.log_probs, strict=True)
    )


@settings(max_examples=200)
@given(sources, budgets, st.booleans())
def test_the_order_of_equal_nodes_is_defined(source: Source, budget: int, chain_first: bool) -> None:
    tree = build_tree(source, budget, chain_first=chain_first)
    assert _paths(tree) == _by_definition(source, budget, budget if chain_first else 0)


@given(sources, budgets, budgets, st.booleans())
def test_the_first_nodes_are_the_tree_of_the_smaller_budget(
    source: Source, budget: int, smaller: int, chain_first: bool
) -> None:
    tree = build_tree(source, budget, chain_first=chain_first)
    expected = build_tree(source, min(budget, smaller), chain_first=chain_first)
    assert tree.first(smaller) == expected


@given(sources, budgets)
def test_the_greedy_line_first_then_the_likeliest_others(source: Source, budget: int) -> None:
    tree = build_tree(source, budget, chain_first=True)
    _check_is_a_tree(tree)
    line: list[Path] = []
    while len(line) < budget and source(path := line[-1] if line else ())[0]:
        line.append((*path, source(path)[0][0]))
    assert _paths(tree)[: len(line)] == line
    others = _ranked([value for path, value in _all_paths(source).items() if path not in line])
    assert list(tree.log_probs)[len(line) :] == others[: max(0, budget - len(line))]


@given(marginals(), budgets)
def test_a_marginal_source_is_a_conditional_one_that_ignores_the_token(
    arrays: tuple[np.ndarray, np.ndarray], budget: int
) -> None:
    token_ids, values = arrays

    def children(depth: int, parent_token: int) -> Candidates:
        return (token_ids[depth - 1], values[depth - 1]) if depth <= len(values) else NO_CANDIDATES

    assert build_tree(marginal_source(*arrays), budget) == build_tree(conditional_source(children, 7), budget)


@given(
    st.dictionaries(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), odd_log_probs), max_size=5)),
    budgets,
    st.booleans(),
)
def test_no_source_makes_an_invalid_tree(
    lists: dict[int, list[tuple[int, float]]], budget: int, chain_first: bool
) -> None:
    """Whatever is wrong with its lists: in no order, a token twice, not probabilities."""

    def source(path: Path) -> Candidates:
        pairs = lists.get(path[-1] if path else 0, []) if len(path) < 4 else []
        return [token_id for token_id, _ in pairs], [value for _, value in pairs]

    tree = build_tree(source, budget, chain_first=chain_first)
    _check_is_a_tree(tree)
    assert all(map(math.isfinite, tree.log_probs))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.1, -0.5])
def test_a_candidate_that_is_no_probability_or_out_of_order_ends_its_list(bad: float) -> None:
    lists: dict[Path, Candidates] = {(): ([1, 2, 3, 4], [-0.5, -1.0, bad, -2.0])}
    tree = build_tree(lambda path: lists.get(path, NO_CANDIDATES), 9)
    assert tree == TokenTree((1, 2), (-1, -1), (-0.5, -1.0))


def test_a_token_counts_once_in_a_list_and_lists_of_its_parents_do_not_matter() -> None:
    lists: dict[Path, Candidates] = {(): ([5, 5, 6], [-0.1, -0.2, -3.0]), (5,): ([5], [-0.3])}
    tree = build_tree(lambda path: lists.get(path, NO_CANDIDATES), 9)
    assert tree == TokenTree((5, 5, 6), (-1, 0, -1), (-0.1, -0.1 - 0.3, -3.0))


def test_the_time_of_building_is_without_that_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    def source(path: Path) -> Candidates:
        nonlocal now
        now += 1000.0
        return ([7, 8], [-0.1, -0.2])

    monkeypatch.setattr(tree_builder.time, "perf_counter", clock)
    tree = build_tree(source, 9)
    assert 0 < tree.build_s < 1000
    assert tree.first(4).build_s == tree.build_s
    assert tree == TokenTree(tree.token_ids, tree.parents, tree.log_probs)


def test_nodes_are_numbers_of_python() -> None:
    tree = build_tree(lambda path: (np.array([3]), np.array([-1.0], np.float32)), 2)  # type: ignore[arg-type, return-value]
    assert tree == TokenTree((3, 3), (-1, 0), (-1.0, -2.0))
    assert {type(each) for each in (*tree.token_ids, *tree.log_probs)} == {int, float}


@given(sources, budgets, st.booleans())
def test_a_source_is_not_asked_for_what_no_budget_has_room_for(
    source: Source, budget: int, chain_first: bool
) -> None:
    """A step of the drafter may be behind every question."""
    asked: list[Path] = []

    def counted(path: Path) -> Candidates:
        asked.append(path)
        return source(path)

    tree = build_tree(counted, budget, chain_first=chain_first)
    assert len(set(asked)) == len(asked)
    assert set(asked) <= {(), *_paths(tree)}
    assert all(path[:-1] in asked[: asked.index(path)] for path in asked if path), "parents first"
    if budget:
        assert len(tree) < budget or _paths(tree)[-1] not in asked


def test_a_conditional_source_is_asked_once_for_a_depth_and_token() -> None:
    asked: list[tuple[int, int]] = []

    def children(depth: int, parent_token: int) -> Candidates:
        asked.append((depth, parent_token))
        return ((1, 2), (-0.5, -1.0)) if depth <= 3 else NO_CANDIDATES

    tree = build_tree(conditional_source(children, 9), 100)
    assert len(tree) == 2 + 4 + 8
    assert sorted(asked) == [(1, 9), *((depth, token) for depth in (2, 3, 4) for token in (1, 2))]


@pytest.mark.parametrize("chain_first", [False, True])
def test_trap_42_any_budget_any_depth_and_more_candidates_than_the_vocabulary(chain_first: bool) -> None:
    """Budgets of 0 and below, of less and more than a line of 15, and beyond all there is."""
    values = np.random.default_rng(0).normal(size=(15, 4)).astype(np.float32)
    assert top_log_probs(values, 8)[0].shape == (15, 4)
    whole = marginal_source(*top_log_probs(values, 8))
    for budget in (-1, 0):
        assert build_tree(whole, budget, chain_first=chain_first) == NO_DRAFT
    for budget in (*range(1, 17), 22, 23, 64, 15 * 4 + 1):
        tree = build_tree(whole, budget, chain_first=chain_first)
        _check_is_a_tree(tree)
        assert len(tree) == budget
        if chain_first:
            assert tree.depths[:15] == tuple(range(1, 1 + min(15, budget)))
    line = marginal_source(*top_log_probs(values, 1))
    assert build_tree(line, 22, chain_first=chain_first).parents == tuple(range(-1, 14))
    for empty in (values[:0], values[:, :0]):
        assert build_tree(marginal_source(*top_log_probs(empty, 8)), 5, chain_first=chain_first) == NO_DRAFT


finite = st.floats(-80, 80, width=32) | st.integers(-3, 3).map(float)
logit_rows = st.lists(finite | st.just(-math.inf), min_size=1, max_size=12)


@given(logit_rows, st.integers(0, 14), st.sampled_from([0.1, 1.0, 2.5]))
def test_top_log_probs_are_those_of_the_whole_vocabulary(
    row: list[float], k: int, temperature: float
) -> None:
    logits = np.array([row, [0.0] * len(row)], np.float32)
    token_ids, values = top_log_probs(logits, k, temperature)
    assert token_ids.shape == values.shape == (2, min(k, len(row)))
    assert token_ids[1].tolist() == list(range(len(row)))[:k], "of equal ones the lowest"
    if max(row) == -math.inf:
        assert np.isnan(values[0]).all()
        return
    order = sorted(range(len(row)), key=lambda i: (-logits[0, i], i))
    assert token_ids[0].tolist() == order[:k]
    weights = [math.exp((float(each) - float(logits[0].max())) / temperature) for each in logits[0]]
    with np.errstate(divide="ignore"):
        expected = (logits[0, order[:k]].astype(float) - float(logits[0].max())) / temperature
    np.testing.assert_allclose(values[0], expected - math.log(sum(weights)), rtol=1e-12, atol=1e-12)
    assert (values[0] <= 0).all()
    assert (np.diff(values[0][np.isfinite(values[0])]) <= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_trap_49_a_damaged_row_of_logits_drafts_nothing_from_there_on(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[:, 4] = 1.0
    logits[1, 2] = bad
    tree = build_tree(marginal_source(*top_log_probs(logits, 2)), 8)
    assert tree.token_ids == (4, 0)
    assert tree.depths == (1, 1)


def test_a_temperature_near_0_leaves_the_best_alone() -> None:
    token_ids, values = top_log_probs(np.array([[1.0, 3.0, 2.0]], np.float32), 3, 1e-310)
    assert token_ids.tolist() == [[1, 2, 0]]
    assert values.tolist() == [[0.0, -math.inf, -math.inf]]
