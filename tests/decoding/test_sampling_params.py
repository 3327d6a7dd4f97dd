"""Settings of a request: what is refused and how it is said, and what is kept of what was given."""

import math
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from coldstream.errors import InvalidRequestError

NOT_INTEGERS = (1.0, True, "1", 10**100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (name, value)
            for name in ("temperature", "top_p", "min_p")
            for value in (-1, math.nan, math.inf, True, "hot", None)
        ],
        *[
            (name, value)
            for name in (
                "top_k",
                "repeat_last_n",
                "seed",
                "max_tokens",
                "min_tokens",
                "n",
                "logprobs",
            )
            for value in NOT_INTEGERS
        ],
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", None),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repeat_last_n", -1),
        ("repeat_last_n", 2**31),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("n", 0),
        ("n", MAX_N + 1),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", 1),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "no"),
        ("skip_special_tokens", 0),
        ("stop", [""]),
        ("stop", 3),
        ("stop", b"end"),
        ("stop", ["a", 1]),
        ("stop", ["a"] * 65),
        ("stop", ["a" * 1025]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * 1025),
        ("logit_bias", 5),
        ("logit_bias", [3]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("logits_processors", max),
        ("logits_processors", [max, "min"]),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    settings: Any = {field: value}
    with pytest.raises(InvalidRequestError, match=rf"^{field}\b"):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number from 0 to 1e+06, not 'hot'"),
        ({"top_k": -2}, "top_k must be an integer from -1 to 2147483647, not -2"),
        ({"logprobs": -1}, "logprobs must be an integer from 0 to 1024, or None, not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, 4, not 5"),
        ({"n": 2, "temperature": 0}, "n must be 1 at temperature 0, where all answers are the same, not 2"),
        ({"prompt_logprobs": 0}, "LLM.logits(token_ids) gives the logits after each token of a prompt"),
        ({"seed": 10**5000}, "seed must be an integer from 0 to 18446744073709551615, or None, not a"),
    ],
)
def test_messages_name_field_limit_and_value(settings: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_stop_is_one_string_or_several(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("ab",)


def test_biases_are_kept_by_token_id_however_they_are_given() -> None:
    assert SamplingParams(logit_bias={7: 2, 3: -1.5}).logit_bias == ((3, -1.5), (7, 2.0))
    assert SamplingParams(logit_bias=((7, 2.0), (3, -1.5))) == SamplingParams(logit_bias={3: -1.5, 7: 2})
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_none_is_nothing_to_stop_at() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logits_processors=None) == SamplingParams()
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()


def test_minus_one_and_zero_turn_top_k_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(top_k=-1).top_k == 0


def test_token_ids_become_plain_integers() -> None:
    params = SamplingParams(stop_token_ids=[np.int64(3), 4])
    assert params.stop_token_ids == (3, 4)
    assert all(type(token_id) is int for token_id in params.stop_token_ids)
    assert hash(params) == hash(SamplingParams(stop_token_ids=[3, 4]))


def test_numbers_of_numpy_become_plain_ones() -> None:
    given: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "max_tokens": np.int64(3),
        "ignore_eos": np.True_,
    }
    params = SamplingParams(**given)
    found = (params.temperature, params.max_tokens, params.ignore_eos)
    assert [type(each) for each in found] == [float, int, bool]
    assert params == SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True)


@given(
    st.sampled_from([field.name for field in fields(SamplingParams)]),
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.complex_numbers(),
            st.text(max_size=3),
            st.binary(max_size=3),
            st.just(np.zeros(3)),
            st.just(max),
        ),
        lambda inner: (
            st.lists(inner, max_size=3) | st.sets(st.integers()) | st.dictionaries(st.text(), inner)
        ),
        max_leaves=5,
    ),
)
def test_nothing_but_an_invalid_request_comes_of_any_value(field: str, value: Any) -> None:
    with suppress(InvalidRequestError):
        SamplingParams(**{field: value})
