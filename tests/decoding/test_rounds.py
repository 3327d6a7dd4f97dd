"""Rounds give the plain loop's tokens, whatever they draft, and leave the same model."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import (
    Continuation,
    SamplingParams,
    TokenChooser,
    TokenTree,
    generate_in_rounds,
    generate_tokens_speculatively,
)
from coldstream.decoding.speculative import begin_picks
from coldstream.errors import GenerationFault
from coldstream.kernels.rounds.reference import Accepted, RoundState, accept

VOCAB = 4  # so few that random drafts are often right
ENDS = frozenset({3})
PARAMS = SamplingParams(temperature=1.0)


def logits_after(token_ids: Sequence[int], dies_at: int | None) -> np.ndarray:
    values = np.random.default_rng(list(token_ids)).normal(size=VOCAB).astype(np.float32)
    if len(token_ids) == dies_at:
        values[3] = np.nan
    return values


def chosen_after(token_ids: Sequence[int], dies_at: int | None) -> tuple[int, int]:
    """What a device makes of it: the token, and how many logits are not finite."""
    logits = logits_after(token_ids, dies_at)
    num_bad = int((~np.isfinite(logits)).sum())
    return (0, num_bad) if num_bad else (TokenChooser(PARAMS, 7, 1, ())(logits, token_ids).token_id, 0)


@dataclass
class HashRounds:
    """Rounds over logits that are a function of all tokens, with random drafts, as a device computes them:
    ahead of what is taken.
    """

    held: list[int]  # tokens of the model
    root: int
    left: int
    seed: int
    dies_at: int | None = None
    most_ahead: int = 0
    ended: int | None = None  # rows that were wanted
    _results: list[Accepted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = len(self.held)
        self._state = RoundState(len(self.held), len(self.held), self.left, self.root)

    def launch(self, num_nodes: int) -> None:
        assert len(self._results) < 2
        rng = np.random.default_rng([self.seed, self._state.length, self._state.left])
        draft = rng.integers(0, VOCAB, num_nodes).tolist()
        rows = [self._state.root, *draft]
        chosen = [chosen_after([*self.held, *rows[: row + 1]], self.dies_at) for row in range(len(rows))]
        accepted, self._state = accept(self._state, draft, chosen, ENDS)
        self.held += rows[: len(accepted.token_ids)]
        self._results.append(accepted)
        self.most_ahead = max(self.most_ahead, len(self._results))

    def take(self) -> Accepted:
        return self._results.pop(0)

    def end(self, num_kept: int) -> None:
        assert self.ended is None
        self._results.clear()
        assert self.first + num_kept <= len(self.held)
        self.ended = num_kept
        del self.held[self.first + num_kept :]


@dataclass
class Sizes:
    """Rounds of any sizes, and what was told of them."""

    sizes: list[int]  # in turn
    num_launched: int = 0
    told: list[Accepted] = field(default_factory=list)

    def begin_rounds(self) -> None:
        assert self.num_launched == 0

    def rests(self) -> bool:
        return False

    def next_round(self) -> int:
        self.num_launched += 1
        return self.sizes[self.num_launched % len(self.sizes)]

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        assert seconds >= 0
        size = self.sizes[(1 + len(self.told)) % len(self.sizes)]
        assert len(accepted.token_ids) - 1 <= accepted.num_drafted <= size
        self.told.append(accepted)


def plain(prompt: list[int], max_tokens: int, dies_at: int | None) -> tuple[list[int], bool]:
    """The tokens after the first one, and whether the last could not be chosen."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token, fault = chosen_after(tokens, dies_at)
        if fault:
            return tokens[len(prompt) :], True
        tokens.append(token)
        if token in ENDS:
            break
    return tokens[len(prompt) :], False


sizes = st.lists(st.integers(0, 5), min_size=1, max_size=3)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)


@given(prompts, st.integers(2, 24), sizes, st.integers(0, 9), st.none() | st.integers(3, 12))
def test_rounds_are_the_plain_loop(
    prompt: list[int], max_tokens: int, sizes: list[int], seed: int, dies_at: int | None
) -> None:
    expected, fails = plain(prompt, max_tokens, dies_at)
    if not expected or expected[0] in ENDS:
        return
    tokens = Continuation(prompt, end_ids=ENDS, max_tokens=max_tokens)
    tokens.append(expected[0], VOCAB)
    rounds = HashRounds(list(prompt), expected[0], max_tokens - 1, seed, dies_at)
    drafts, found = Sizes(sizes), [expected[0]]
    with pytest.raises(GenerationFault) if fails else nullcontext():
        for chosen in generate_in_rounds(rounds, tokens, drafts, VOCAB):
            found.append(chosen.token_id)
    assert found == expected
    assert tokens.ids == [*prompt, *expected]
    # Of a text that fails, the last token's row is not held either: none could be chosen after it.
    assert rounds.held == [*prompt, *expected[:-1]]
    assert [token for each in drafts.told for token in each.token_ids] == expected[1:]
    assert [each.is_last for each in drafts.told] == [False] * (len(drafts.told) - 1) + [True]
    assert max_tokens <= 2 or rounds.most_ahead == 2


@given(prompts, sizes, st.integers(0, 9), st.integers(1, 5))
def test_a_text_that_is_left_is_that_of_the_plain_loop(
    prompt: list[int], sizes: list[int], seed: int, num_taken: int
) -> None:
    expected, _ = plain(prompt, 20, None)
    if len(expected) <= num_taken + 1:
        return
    tokens = Continuation(prompt, end_ids=ENDS, max_tokens=20)
    tokens.append(expected[0], VOCAB)
    rounds = HashRounds(list(prompt), expected[0], 19, seed)
    loop = generate_in_rounds(rounds, tokens, Sizes(sizes), VOCAB)
    found = [next(loop).token_id for _ in range(num_taken)]
    loop.close()
    assert found == expected[1 : 1 + num_taken]
    assert rounds.held == [*prompt, *expected[:num_taken]]


def test_nothing_is_kept_of_rounds_that_fail_to_begin() -> None:
    class Failing(HashRounds):
        def launch(self, num_nodes: int) -> None:
            raise GenerationFault("made to fail")

    tokens = Continuation([1], end_ids=ENDS, max_tokens=5)
    tokens.append(2, VOCAB)
    rounds = Failing([1], 2, 4, 0)
    with pytest.raises(GenerationFault, match="made to fail"):
        list(generate_in_rounds(rounds, tokens, Sizes([2]), VOCAB))
    assert (rounds.ended, rounds.held) == (0, [1])


@given(prompts, sizes, st.integers(0, 9), st.integers(1, 4))
def test_a_few_rounds_lose_nothing(prompt: list[int], sizes: list[int], seed: int, most: int) -> None:
    """All that were launched are taken, and the next ones go on from there."""
    expected, _ = plain(prompt, 20, None)
    if len(expected) < 2:
        return
    tokens = Continuation(prompt, end_ids=ENDS, max_tokens=20)
    tokens.append(expected[0], VOCAB)
    while not tokens.has_ended:
        held = tokens.ids[:-1]
        rounds, drafts = HashRounds(held, tokens.ids[-1], tokens.num_left, seed, None), Sizes(sizes)
        found = [
            each.token_id for each in generate_in_rounds(rounds, tokens, drafts, VOCAB, most_rounds=most)
        ]
        assert found
        assert drafts.num_launched == most or tokens.has_ended
        assert rounds.held == tokens.ids[:-1]
    assert tokens.ids == [*prompt, *expected]


@dataclass
class HashModel:
    """The model of `HashRounds` as the loop without rounds has it."""

    held: list[int]

    def append(self, token_ids: Sequence[int]) -> np.ndarray:
        self.held += token_ids
        return logits_after(self.held, None)

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[np.ndarray]:
        raise AssertionError("the host drafts nothing where a device does")

    commit = append_chosen = settle = verify


@dataclass
class RestingDrafts(Sizes):
    """So many rounds, then so many steps without."""

    awake: int = 2
    asleep: int = 3
    num_steps: int = 0  # rounds that ended, and steps without them
    num_rested: int = 0
    num_texts: int = 0  # how often rounds began

    def begin_rounds(self) -> None:
        self.num_texts += 1

    def rests(self) -> bool:
        return self.num_steps % (self.awake + self.asleep) >= self.awake

    def round_ended(self, accepted: Accepted, seconds: float) -> None:
        self.num_steps += 1

    def will_draft(self, most: int) -> bool:
        return not self.rests()

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        raise AssertionError("the host drafts nothing where a device does")

    def num_together(self) -> int:
        return 1

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
        assert self.rests()
        self.num_steps += num_steps
        self.num_rested += num_steps

    verified = draft


@given(prompts, sizes, st.integers(0, 9), st.integers(1, 4), st.integers(1, 4))
def test_a_text_with_rests_is_that_of_the_plain_loop(
    prompt: list[int], sizes: list[int], seed: int, awake: int, asleep: int
) -> None:
    expected, _ = plain(prompt, 40, None)
    model, drafts = HashModel(list(prompt)), RestingDrafts(sizes, awake=awake, asleep=asleep)
    chooser = TokenChooser(PARAMS, 7, 1, ())

    def begin_rounds(context: Sequence[int], num_left: int) -> HashRounds | None:
        assert not drafts.rests()
        assert model.held == list(context[:-1])
        return None if num_left < 2 else HashRounds(model.held, context[-1], num_left, seed)

    found = generate_tokens_speculatively(
        model,
        logits_after(prompt, None),
        prompt,
        partial(begin_picks, chooser),
        drafts,
        end_ids=ENDS,
        max_tokens=40,
        begin_rounds=begin_rounds,
    )
    assert [chosen.token_id for chosen in found] == expected
    assert model.held == [*prompt, *expected[:-1]]
    # Two rounds may be in flight when a rest begins, which then is shorter by one.
    if drafts.num_steps > 2 * (awake + asleep):
        assert drafts.num_texts > 1
        assert drafts.num_rested > 0 or asleep == 1
