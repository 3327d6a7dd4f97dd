"""A request's choices: end tokens not before their time, and log-probabilities that change no choice."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.choice import TokenChooser
from coldstream.decoding.logprobs import token_logprobs
from coldstream.decoding.sampling import sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams

VOCAB = 30


def _steps(prompt: Sequence[int], count: int) -> Iterator[tuple[Logits, list[int]]]:
    context = list(prompt)
    for step in range(count):
        yield np.random.default_rng(step).normal(size=VOCAB).astype(np.float32), context
        context = [*context, step]


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_end_tokens_are_forbidden_for_exactly_min_tokens(min_tokens: int) -> None:
    params = SamplingParams(temperature=0, min_tokens=min_tokens)
    choose = TokenChooser(params, 0, 2, {3, 5})
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 5]] = 2.0, 1.0
    chosen = [choose(logits, context) for _, context in _steps([8, 9], 8)]
    assert chosen == [0] * min_tokens + [3] * (8 - min_tokens)


@given(st.integers(0, 5), st.integers(0, 2**64 - 1))
def test_log_probabilities_change_no_choice_and_are_the_models_own(count: int, seed: int) -> None:
    plain = SamplingParams(temperature=1.4, repetition_penalty=1.5, min_tokens=3)
    wanted = SamplingParams(temperature=1.4, repetition_penalty=1.5, min_tokens=3, logprobs=count)
    without, with_them = TokenChooser(plain, seed, 1, {2}), TokenChooser(wanted, seed, 1, {2})
    for logits, context in _steps([1], 6):
        token_id = without(logits, context)
        assert with_them(logits, context) == token_id
        assert token_id == sample_token(logits, context, plain, seed, {2} if len(context) < 4 else ())
        assert without.logprobs is None
        assert with_them.logprobs == token_logprobs(logits, token_id, count)
