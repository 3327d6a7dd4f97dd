"""Generating ahead of the host gives the plain loop's tokens, and leaves the same model."""

from collections.abc import Sequence

import numpy as np
import pytest
from far_logits import FarDevice, FarLogits, FarStep
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import (
    AnyLogits,
    SamplingParams,
    StartedChoices,
    TokenChooser,
    begin_choices,
    generate_tokens,
    generate_tokens_ahead,
)
from coldstream.errors import GenerationFault
from coldstream.kvcache import ChosenToken

VOCAB = 12


class HashModel:
    """Logits are a pure function of all tokens so far; NaN after so many."""

    def __init__(self, prompt: Sequence[int], dies_at: int | None = None) -> None:
        self.token_ids = list(prompt)
        self.device = FarDevice()
        self.launched_before_known = 0
        self._dies_at = dies_at

    def append(self, token_ids: Sequence[int]) -> FarLogits:
        self.token_ids += token_ids
        return self.logits()

    def append_chosen(self, token: ChosenToken) -> FarLogits:
        assert token.index == len(self.device.results) - 1, "the last choice"
        id_, fault = self.device.results[token.index]
        self.launched_before_known += self.device.num_waits == token.index
        self._is_left_out = fault != 0 or id_ in token.end_ids
        if self._is_left_out:
            return FarStep(np.full((1, VOCAB), np.nan, np.float32), self.device)[0]
        return self.append([id_])

    def settle(self, token_id: int | None) -> None:
        assert (token_id is None) == self._is_left_out
        assert token_id is None or token_id == self.token_ids[-1]

    def logits(self) -> FarLogits:
        values = np.random.default_rng(self.token_ids).normal(size=(1, VOCAB)).astype(np.float32)
        if len(self.token_ids) == self._dies_at:
            values[0, 3] = np.nan
        return FarStep(values, self.device)[0]


class Run:
    """The tokens of both loops, and their models, until an error or so many tokens."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        max_tokens: int,
        taken: int,
        dies_at: int | None = None,
    ) -> None:
        chooser = TokenChooser(params, 7, len(prompt), end_ids)

        def choose(logits: AnyLogits, context: Sequence[int]) -> int:
            return chooser(logits, context).token_id

        def begin(logits: AnyLogits, context: Sequence[int], unseen: int | None) -> StartedChoices:
            return begin_choices([chooser.choice(logits, context, unseen)])

        self.plain, self.ahead = HashModel(prompt, dies_at), HashModel(prompt, dies_at)
        limits = {"end_ids": end_ids, "max_tokens": max_tokens}
        plain = generate_tokens(self.plain.append, self.plain.logits(), prompt, choose, **limits)  # type: ignore[arg-type]
        ahead = generate_tokens_ahead(self.ahead, self.ahead.logits(), prompt, begin, **limits)  # type: ignore[arg-type]
        self.results = []
        for loop in (plain, ahead):
            tokens: list[object] = []
            try:
                for token_id in loop:
                    tokens.append(token_id)
                    if len(tokens) == taken:
                        break
            except GenerationFault as error:
                tokens.append(str(error))
            self.results.append(tokens)


settings_of_runs = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repeat_last_n=st.sampled_from([None, 0, 1, 2, 64]),
)


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    settings_of_runs,
    st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    st.integers(1, 12),
)
def test_the_tokens_and_the_model_in_the_end_are_those_of_the_plain_loop(
    prompt: list[int], params: SamplingParams, end_ids: frozenset[int], max_tokens: int
) -> None:
    run = Run(prompt, params, end_ids, max_tokens, taken=99)
    assert run.results[1] == run.results[0]
    assert run.ahead.token_ids == run.plain.token_ids


@given(st.integers(1, 11), st.integers(0, 3))
def test_a_loop_that_is_left_early_has_at_most_one_token_more(taken: int, prompt: int) -> None:
    run = Run([prompt], SamplingParams(temperature=1.0), frozenset(), 12, taken)
    assert run.results[1] == run.results[0]
    assert run.plain.token_ids == [prompt, *run.results[0][:-1]]
    assert run.ahead.token_ids in ([prompt, *run.results[0][:-1]], [prompt, *run.results[0]])


@pytest.mark.parametrize("dies_at", [1, 2, 5])
def test_trap_50_damaged_logits_end_it_with_the_fault_of_the_plain_loop(dies_at: int) -> None:
    run = Run([4], SamplingParams(), frozenset(), 9, taken=99, dies_at=dies_at)
    assert run.results[1] == run.results[0]
    assert f"1 of {VOCAB} logits at position {dies_at} are not finite" in str(run.results[0][-1])
    assert len(run.results[0]) == dies_at


def test_every_step_but_the_first_is_launched_before_its_token_is_known() -> None:
    run = Run([4], SamplingParams(), frozenset(), 9, taken=99)
    assert run.ahead.launched_before_known == 8
    assert run.ahead.device.num_waits == 9
