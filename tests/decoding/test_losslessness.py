"""The rule of acceptance, over all random numbers there are: what it makes of a draft has the probabilities
of the model, and rules near it that are wrong have others.

A token is drawn with the random number of its position, and a drafted one is accepted where it is that token.
After each context the numbers of a position fall into as many intervals as there are tokens, and a run for
one number of each is a run for all of them: the sizes of the intervals make exact probabilities.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
from far_logits import FarStep
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coldstream.decoding import (
    AnyLogits,
    Continuation,
    Logits,
    SampledToken,
    SamplingParams,
    TokenChooser,
    TokenTree,
    TreeWalk,
    begin_all_picks,
    sampling,
)
from coldstream.decoding.picks import Pick
from coldstream.decoding.sampling import changed_logits, keep_tokens, token_weights

VOCAB = 3
NUMBERS = 2**64  # random ones
PROMPT = [1]
UNUSED = (0,) * 12  # numbers of nodes beyond the last token
Path = tuple[int, ...]
Measure = dict[Path, Fraction]  # the probability of each path


@cache
def logits_after(seed: int, token_ids: Path) -> Logits:
    return np.random.default_rng([seed, *token_ids]).normal(size=VOCAB).astype(np.float32)


def weights_after(seed: int, params: SamplingParams, path: Path) -> list[int]:
    """By token, of whole numbers; 0 where the settings leave a token out."""
    context = (*PROMPT, *path)
    logits = changed_logits(logits_after(seed, context), context, params, ())
    kept = keep_tokens(logits, params)
    weights = np.zeros(VOCAB, np.int64)
    weights[kept] = token_weights(logits[kept], params.temperature)
    return weights.tolist()


def bounds_at(seed: int, params: SamplingParams, depth: int) -> set[int]:
    """The least number with which each token is drawn, after any path of that length."""
    bounds = {0}
    for path in product(range(VOCAB), repeat=depth):
        sums = np.cumsum(weights_after(seed, params, path)).tolist()
        bounds |= {-(-each * NUMBERS // sums[-1]) for each in sums}
    return bounds - {NUMBERS}


def of_the_model(seed: int, params: SamplingParams, length: int) -> Measure:
    """The product of the probabilities of each token after those before it."""
    measure: Measure = {(): Fraction(1)}
    for _ in range(length):
        longer: Measure = {}
        for path, share in measure.items():
            weights = weights_after(seed, params, path)
            longer |= {(*path, t): share * Fraction(w, sum(weights)) for t, w in enumerate(weights)}
        measure = longer
    return measure


class Model:
    """One whose logits are a function of all tokens so far, and which chooses by `sample_token`."""

    def __init__(self, seed: int) -> None:
        self.seed, self.held = seed, tuple(PROMPT[:-1])

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        self.paths: list[Path] = []
        for token, parent in zip(token_ids, parents, strict=True):
            self.paths.append((*(self.held if parent < 0 else self.paths[parent]), token))
        step = FarStep(np.stack([logits_after(self.seed, path) for path in self.paths]))
        return [step[row] for row in range(len(self.paths))]

    def commit(self, rows: Sequence[int]) -> None:
        self.held = self.paths[rows[-1]]


class Rule:
    """That of the engine: the token after a node is drawn from the node's own logits, by its own number."""

    more_bounds: tuple[int, ...] = ()  # of intervals, beside those of the model

    def __init__(self, chooser: TokenChooser, numbers: list[int]) -> None:
        """numbers: the random one of each token that is generated."""
        self.chooser, self.numbers = chooser, numbers

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        return begin_all_picks({0: (self.chooser, rows, tree, context)})[0]


def measured(
    kind: Callable[[TokenChooser, list[int]], Rule],
    seed: int,
    params: SamplingParams,
    tree: TokenTree,
    bounds: Sequence[set[int]],
) -> Measure:
    """What is generated with that rule and this draft in every step, over all numbers between `bounds`
    of each token.
    """
    numbers: list[int] = []
    chooser, measure = TokenChooser(params, 0, len(PROMPT), ()), dict[Path, Fraction]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            sampling, "random_bits", lambda _, position: (*numbers, *UNUSED)[position - len(PROMPT)]
        )
        rule = kind(chooser, numbers)
        splits = [sorted(each | set(rule.more_bounds)) for each in bounds]
        for cell in product(*splits):
            numbers[:] = cell
            share = Fraction(1)
            for number, starts in zip(cell, splits, strict=True):
                following = [*starts, NUMBERS][bisect_right(starts, number)]
                share *= Fraction(following - number, NUMBERS)
            tokens = Continuation(PROMPT, end_ids=frozenset(), max_tokens=len(bounds))
            model = Model(seed)
            parents = (-1, *(1 + parent for parent in tree.parents))
            while not tokens.has_ended:
                rows, walk = model.verify((tokens.ids[-1], *tree.token_ids), parents), TreeWalk(tree)
                list(walk.take(tokens, rule.begin(rows, tree, tokens.ids), VOCAB))
                model.commit(walk.rows)
            path = tuple(tokens.ids[len(PROMPT) :])
            measure[path] = measure.get(path, Fraction(0)) + share
    assert sum(measure.values()) == 1
    return measure


def distance(one: Measure, other: Measure) -> float:
    """Total variation."""
    return float(sum(abs(one.get(path, 0) - other.get(path, 0)) for path in {*one, *other}) / 2)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Of any shape; siblings may be alike, which no drafter should do."""
    nodes = draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, VOCAB - 1)), min_size=1, max_size=4))
    parents = tuple(min(parent, row - 1) for row, (parent, _) in enumerate(nodes))
    return TokenTree(tuple(token for _, token in nodes), parents, (0.0,) * len(nodes))


PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALISED = SamplingParams(
    temperature=1.0, frequency_penalty=0.9, repetition_penalty=1.5, presence_penalty=0.5, repeat_last_n=2
)
PARAMS = {
    "plain": PLAIN,
    "top_k": SamplingParams(temperature=0.6, top_k=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.4),
    "penalties": PENALISED,
}


# Two siblings that are alike, each with a child, one of which has another.
DEEP = TokenTree((0, 1, 1, 2, 0, 1, 2), (-1, -1, -1, 1, 2, 3, 0), (0.0,) * 7)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@given(tree=trees(), seed=st.integers(0, 99))
@example(tree=DEEP, seed=1)
@settings(max_examples=2)
def test_sp05_what_is_generated_has_exactly_the_probabilities_of_the_model(
    params: SamplingParams, tree: TokenTree, seed: int
) -> None:
    bounds = [bounds_at(seed, params, depth) for depth in range(3)]
    found = measured(Rule, seed, params, tree, bounds)
    assert distance(found, of_the_model(seed, params, 3)) < 1e-12


class Biased(Rule):
    """Accepts one draft in twenty whatever the model says."""

    more_bounds = (NUMBERS // 20,)

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        pick = super().begin(rows, tree, context)

        def chosen(node: int, path: Sequence[int]) -> SampledToken:
            if node in tree.parents and self.numbers[len(path) - len(PROMPT)] < NUMBERS // 20:
                return SampledToken(tree.token_ids[tree.parents.index(node)])
            return pick(node, path)

        return chosen


class Reusing(Rule):
    """Draws all tokens of a step by the number of the first."""

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        numbers = list(self.numbers)
        self.numbers[:] = [numbers[len(context) - len(PROMPT)]] * len(numbers)
        pick = super().begin(rows, tree, context)
        self.numbers[:] = numbers
        return pick


class BonusOfTheDrafter(Rule):
    """Draws the token after the last accepted node as a drafter without knowledge does."""

    more_bounds = tuple(-(-NUMBERS * token // VOCAB) for token in range(1, VOCAB))

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        pick = super().begin(rows, tree, context)

        def chosen(node: int, path: Sequence[int]) -> SampledToken:
            if node >= 0 and node not in tree.parents:
                return SampledToken(self.numbers[len(path) - len(PROMPT)] * VOCAB // NUMBERS)
            return pick(node, path)

        return chosen


class WrongParent(Rule):
    """Takes the logits of the row before each node's own."""

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        return super().begin([rows[-1], *rows[:-1]], tree, context)


class GreedyWalk(Rule):
    """Accepts the likeliest tokens, and draws only the one behind them."""

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        pick = super().begin(rows, tree, context)

        def chosen(node: int, path: Sequence[int]) -> SampledToken:
            best = int(np.argmax(np.asarray(rows[1 + node])))
            return pick(node, path) if tree.child(node, best) is None else SampledToken(best)

        return chosen


class WithoutTheRoot(Rule):
    """Has penalties for another token than the root, which the model does not hold yet."""

    def begin(self, rows: Sequence[AnyLogits], tree: TokenTree, context: Sequence[int]) -> Pick:
        def chosen(node: int, path: Sequence[int]) -> SampledToken:
            observed = list(path)
            observed[len(context) - 1] = (observed[len(context) - 1] + 1) % VOCAB
            return self.chooser(rows[1 + node], observed)

        return chosen


ALL_OF_TWO = TokenTree((0, 1, 2, 0, 1), (-1, -1, -1, 0, 1), (0.0,) * 5)


def check_mutant(kind: type[Rule], params: SamplingParams) -> None:
    """It is noticed where the engine's own rule, measured alike, is exact."""
    bounds = [bounds_at(5, params, 0) | bounds_at(5, params, 1)] * 2
    wanted = of_the_model(5, params, 2)
    assert distance(measured(Rule, 5, params, ALL_OF_TWO, bounds), wanted) < 1e-12
    assert distance(measured(kind, 5, params, ALL_OF_TWO, bounds), wanted) > 1e-3


@pytest.mark.parametrize("kind", [Biased, Reusing, BonusOfTheDrafter, WrongParent])
def test_sp05_a_wrong_rule_is_noticed(kind: type[Rule]) -> None:
    check_mutant(kind, PLAIN)


def test_trap_44_accepting_the_likeliest_and_drawing_what_follows_is_not_exact() -> None:
    check_mutant(GreedyWalk, PLAIN)


def test_trap_44_penalties_without_the_root_are_noticed() -> None:
    check_mutant(WithoutTheRoot, PENALISED)
