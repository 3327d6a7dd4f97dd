"""Whatever is drafted, the speculative loop gives the plain loop's tokens and leaves the same model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from far_logits import FarDevice, FarStep
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import (
    NO_DRAFT,
    AnyLogits,
    Chosen,
    Logits,
    SamplingParams,
    StartedChoices,
    TokenChooser,
    TokenTree,
    begin_choices,
    begin_picks,
    generate_tokens,
    generate_tokens_speculatively,
)
from coldstream.errors import GenerationFault
from coldstream.kvcache import ChosenToken

VOCAB = 4  # so few that random drafts are often right


class HashModel:
    """Logits are a pure function of all tokens so far; NaN after so many."""

    def __init__(self, prompt: Sequence[int], dies_at: int | None, is_far: bool) -> None:
        self.token_ids = list(prompt)
        self.num_steps = 0
        self.device = FarDevice()
        self.launched: list[bool] = []  # of each step of one row: whether its token was not known yet
        self._dies_at = dies_at
        self._is_far = is_far
        self._pending: tuple[Sequence[int], Sequence[int]] | None = None
        self._unsettled: int | None = None  # the token of the device

    def append(self, token_ids: Sequence[int]) -> AnyLogits:
        self.launched.append(False)
        return self._append(token_ids)

    def append_chosen(self, token: ChosenToken) -> AnyLogits:
        assert token.index == len(self.device.results) - 1 == self.device.num_known, "the choice under way"
        id_, fault = self.device.results[token.index]
        self.launched.append(True)
        if fault or id_ in token.end_ids:
            self._check_nothing_pends()
            self._unsettled = -1
            return self._rows([np.full(VOCAB, np.nan, np.float32)])[0]
        logits = self._append([id_])
        self._unsettled = id_
        return logits

    def settle(self, token_id: int | None) -> None:
        assert self._unsettled == (-1 if token_id is None else token_id)
        self._unsettled = None

    def _append(self, token_ids: Sequence[int]) -> AnyLogits:
        self._check_nothing_pends()
        self.num_steps += 1
        self.token_ids += token_ids
        return self.logits()

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        self._check_nothing_pends()
        assert parents[0] == -1
        assert all(0 <= parent < row for row, parent in enumerate(parents) if row)
        self.num_steps += 1
        self._pending = (token_ids, parents)
        return self._rows([self._values([*self.token_ids, *self._path(row)]) for row in range(len(parents))])

    def commit(self, rows: Sequence[int]) -> None:
        assert self._pending is not None
        if rows:
            path = self._path(rows[-1])
            assert path == [self._pending[0][row] for row in rows]
            self.token_ids += path
        self._pending = None

    @property
    def is_settled(self) -> bool:
        return self._pending is None

    def logits(self) -> AnyLogits:
        return self._rows([self._values(self.token_ids)])[0]

    def _check_nothing_pends(self) -> None:
        assert self._pending is None
        assert self._unsettled is None

    def _path(self, row: int) -> list[int]:
        assert self._pending is not None
        token_ids, parents = self._pending
        return [] if row < 0 else [*self._path(parents[row]), token_ids[row]]

    def _values(self, token_ids: Sequence[int]) -> Logits:
        values = np.random.default_rng(token_ids).normal(size=VOCAB).astype(np.float32)
        if len(token_ids) == self._dies_at:
            values[3] = np.nan
        return values

    def _rows(self, rows: list[Logits]) -> Sequence[AnyLogits]:
        if not self._is_far:
            return rows
        step = FarStep(np.stack(rows), self.device)
        return [step[row] for row in range(len(rows))]


@dataclass
class RandomDrafts:
    """Trees of random tokens, up to a number of nodes."""

    seed: int
    most: int
    told: list[int] = field(default_factory=list)  # accepted nodes of each step
    sizes: list[int] = field(default_factory=list)
    num_cut: int = 0
    together: int = 1

    def will_draft(self, most: int) -> bool:
        return (
            most > 0
            and self.most > 0
            and bool(np.random.default_rng([self.seed, len(self.told)]).integers(3))
        )

    def draft(self, context: Sequence[int], most: int) -> TokenTree:
        rng = np.random.default_rng([self.seed, *context])
        pairs: list[tuple[int, int]] = []
        for _ in range(min(most, int(rng.integers(0, self.most + 1)))):
            pair = (int(rng.integers(-1, len(pairs))), int(rng.integers(VOCAB)))
            if pair not in pairs:
                pairs.append(pair)
        parents, token_ids = zip(*pairs, strict=True) if pairs else ((), ())
        self.sizes.append(len(pairs))
        return TokenTree(token_ids, parents, (0.0,) * len(pairs))

    def verified(self, nodes: Sequence[int], seconds: float, choose_s: float, *, is_cut: bool) -> None:
        assert seconds > choose_s >= 0
        self.told.append(len(nodes))
        self.num_cut += is_cut

    def num_together(self) -> int:
        self.together = int(np.random.default_rng([self.seed, len(self.told), 1]).integers(4))
        return self.together

    def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
        assert seconds > 0
        assert 1 <= num_steps <= max(1, self.together)
        self.told += [0] * num_steps


class Run:
    """The tokens of both loops, and their models, until an error or so many tokens."""

    def __init__(
        self,
        prompt: list[int],
        drafts: RandomDrafts,
        params: SamplingParams,
        end_ids: frozenset[int] = frozenset(),
        max_tokens: int = 24,
        taken: int = 99,
        dies_at: int | None = None,
        is_far: bool = False,
    ) -> None:
        chooser = TokenChooser(params, 7, len(prompt), end_ids)
        self.plain, self.other = (HashModel(prompt, dies_at, is_far) for _ in range(2))

        def plainly() -> Iterator[Chosen]:
            last: list[Chosen] = []

            def choose(logits: AnyLogits, context: Sequence[int]) -> int:
                last[:] = [chooser(logits, context)]
                return last[0].token_id

            for _ in generate_tokens(
                self.plain.append,
                self.plain.logits(),
                prompt,
                choose,
                end_ids=end_ids,
                max_tokens=max_tokens,
            ):
                yield last[0]

        def begin_ahead(logits: AnyLogits, context: Sequence[int], unseen: int | None) -> StartedChoices:
            return begin_choices([chooser.choice(logits, context, unseen)])

        speculatively = generate_tokens_speculatively(
            self.other,
            self.other.logits(),
            prompt,
            partial(begin_picks, chooser),
            drafts,
            end_ids=end_ids,
            max_tokens=max_tokens,
            begin_ahead=begin_ahead if is_far and chooser.is_for_device else None,
        )
        self.results = [_taken(loop, taken) for loop in (plainly(), speculatively)]
        assert self.other.is_settled


def _taken(loop: Iterator[Chosen], count: int) -> list[Chosen | str]:
    tokens: list[Chosen | str] = []
    try:
        for token in loop:
            tokens.append(token)
            if len(tokens) == count:
                loop.close()  # type: ignore[attr-defined]
                break
    except GenerationFault as error:
        tokens.append(str(error))
    return tokens


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
drafts_of_runs = st.builds(RandomDrafts, st.integers(0, 99), st.sampled_from([0, 1, 2, 7, 16, 35]))
settings_of_runs = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repeat_last_n=st.sampled_from([None, 0, 1, 2, 64]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 2]),
)


@given(
    prompts,
    drafts_of_runs,
    settings_of_runs,
    st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    st.integers(4, 36),
    st.booleans(),
)
def test_sp05_sp07_the_tokens_and_the_model_are_those_of_the_plain_loop(
    prompt: list[int],
    drafts: RandomDrafts,
    params: SamplingParams,
    end_ids: frozenset[int],
    max_tokens: int,
    is_far: bool,
) -> None:
    run = Run(prompt, drafts, params, end_ids, max_tokens, is_far=is_far)
    assert run.results[1] == run.results[0]
    assert run.other.token_ids == run.plain.token_ids


@given(prompts, drafts_of_runs, st.integers(1, 23), st.booleans())
def test_trap_45_the_last_token_is_not_held_however_early_a_loop_is_left_but_by_a_step_ahead(
    prompt: list[int], drafts: RandomDrafts, taken: int, is_far: bool
) -> None:
    run = Run(prompt, drafts, SamplingParams(temperature=1.0), taken=taken, is_far=is_far)
    assert run.results[1] == run.results[0]
    last = (
        [run.results[0][-1].token_id] if is_far else []
    )  # its step may have been launched before it was known
    assert run.other.token_ids in (run.plain.token_ids, [*run.plain.token_ids, *last])


@given(prompts, drafts_of_runs, st.integers(1, 12), st.booleans())
def test_trap_50_damaged_logits_end_it_with_the_fault_of_the_plain_loop(
    prompt: list[int], drafts: RandomDrafts, behind: int, is_far: bool
) -> None:
    dies_at = len(prompt) + behind
    run = Run(prompt, drafts, SamplingParams(temperature=1.0), dies_at=dies_at, is_far=is_far)
    assert run.results[1] == run.results[0]
    assert "are not finite" in str(run.results[0][-1])
    # The row of the fault is held by the plain loop only, which cannot take it back.
    assert run.other.token_ids in (run.plain.token_ids, run.plain.token_ids[:-1])


@pytest.mark.parametrize("end", range(1, 9))
def test_trap_43_an_end_within_an_accepted_run_cuts_tokens_and_state_at_one_place(end: int) -> None:
    params = SamplingParams(temperature=0.0)
    plain = Run([2], RandomDrafts(0, 0), params).results[0]
    tokens = [each.token_id for each in plain if isinstance(each, Chosen)]

    class Right(RandomDrafts):
        def draft(self, context: Sequence[int], most: int) -> TokenTree:
            rest = tokens[len(context) - 1 :][: min(most, 12)]
            return TokenTree(tuple(rest), tuple(range(-1, len(rest) - 1)), (0.0,) * len(rest))

    for end_ids, max_tokens in ((frozenset({tokens[end]}), 24), (frozenset[int](), end + 1)):
        run = Run([2], Right(0, 0), params, end_ids, max_tokens)
        assert run.results[1] == run.results[0]
        assert run.other.token_ids == run.plain.token_ids
        assert run.other.num_steps == min(1, len(run.results[0]) - 1)


def test_trap_45_every_token_is_accepted_or_one_of_a_step() -> None:
    drafts = RandomDrafts(5, 35)
    run = Run([1], drafts, SamplingParams(temperature=1.0), max_tokens=36)
    assert run.plain.num_steps == 35
    assert run.other.num_steps == len(drafts.told) < 25
    assert sum(drafts.told) + len(drafts.told) == 35
    assert drafts.num_cut == (drafts.sizes[-1] > 0)


@pytest.mark.parametrize("taken", range(1, 8))
def test_steps_without_drafts_are_all_told_however_early_a_loop_is_left(taken: int) -> None:
    class Four(RandomDrafts):
        def num_together(self) -> int:
            self.together = 4
            return 4

        def went_on(self, num_steps: int, seconds: float, *, is_usual: bool) -> None:
            super().went_on(num_steps, seconds, is_usual=is_usual)
            told.append(num_steps)

    told: list[int] = []
    run = Run([2], Four(0, 0), SamplingParams(), taken=taken)
    assert run.results[1] == run.results[0]
    stretches, left = divmod(taken - 1, 4)
    assert told == [4] * stretches + [left] * bool(left)


def test_trap_42_no_node_is_drafted_beyond_the_last_token() -> None:
    for max_tokens in range(1, 40):
        drafts = RandomDrafts(5, 35)
        Run([1], drafts, SamplingParams(temperature=0.0), max_tokens=max_tokens)
        generated = 1
        for size, accepted in zip(drafts.sizes, drafts.told, strict=True):
            assert size <= max_tokens - generated - 1
            generated += 1 + accepted


def test_trap_44_nodes_on_a_device_have_penalties_for_the_root_too() -> None:
    rows = FarStep(np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32))
    tree = TokenTree((1, 2, 0), (-1, 0, -1), (0.0, 0.0, 0.0))
    params = SamplingParams(frequency_penalty=0.5, repeat_last_n=2)
    chooser = TokenChooser(params, 3, 2, ())
    pick = begin_picks(chooser, [rows[row] for row in range(4)], tree, [3, 3])
    assert rows.chosen == [[0, 1, 2, 3]]
    assert [list(each.recent) for each in rows.told] == [[3, 3], [3, 1], [1, 2], [3, 0]]
    assert [each.position for each in rows.told] == [2, 3, 4, 3]
    assert pick(1, [3, 3, 1, 2]) == chooser(rows.values[2], [3, 3, 1, 2])


@pytest.mark.parametrize("is_far", [False, True])
def test_the_rows_of_a_fault_on_another_branch_do_not_matter(is_far: bool) -> None:
    values = np.random.default_rng(3).normal(size=(3, VOCAB)).astype(np.float32)
    values[2] = np.nan
    step = FarStep(values)
    rows: list[AnyLogits] = [step[row] if is_far else values[row] for row in range(3)]
    chooser = TokenChooser(SamplingParams(), 3, 1, ())
    pick = begin_picks(chooser, rows, TokenTree((1, 2), (-1, -1), (0.0, 0.0)), [3])
    assert pick(0, [3, 1]).token_id in range(VOCAB)
    with pytest.raises(GenerationFault, match="at position 2"):
        pick(1, [3, 2])


def test_no_draft_is_an_empty_tree() -> None:
    assert not NO_DRAFT
    assert NO_DRAFT.child(-1, 0) is None
    assert NO_DRAFT.depths == ()
