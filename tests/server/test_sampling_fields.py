"""Which of a request's fields decide how its tokens are sampled."""

from typing import Any

import pytest
from pydantic import ValidationError

from coldstream.engine import SamplingParams
from coldstream.server.http import ServerSettings
from coldstream.server.http.chat_request import ChatRequest
from coldstream.server.http.fields import SamplingFields, sampling_of
from coldstream.server.http.problems import ProblemError
from coldstream.server.http.responses_request import ResponsesRequest

DEFAULT = SamplingParams(repetition_penalty=1.5, repeat_last_n=99, seed=5, temperature=0.25)


def sampling(**fields: Any) -> SamplingParams:
    return sampling_of(SamplingFields.model_validate(fields), DEFAULT, ServerSettings(max_n=2))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.5),
        ({"repeat_penalty": 1.1}, 1.1),
        ({"repetition_penalty": 1.2}, 1.2),
        ({"repetition_penalty": 1.2, "repeat_penalty": 1.1}, 1.2),
        ({"repetition_penalty": None, "repeat_penalty": 1.1}, 1.1),
    ],
)
def test_the_longer_name_of_the_penalty_goes_first(fields: dict[str, Any], expected: float) -> None:
    assert sampling(**fields).repetition_penalty == expected


def test_minus_one_is_all_of_the_context_and_any_seed() -> None:
    assert (sampling().repeat_last_n, sampling().seed) == (99, 5)
    assert sampling(repeat_last_n=-1).repeat_last_n is None
    assert sampling(repeat_last_n=0).repeat_last_n == 0
    assert sampling(seed=-1).seed == 5
    assert sampling(seed=0).seed == 0


def test_minus_one_is_an_answer_without_a_limit() -> None:
    assert sampling(max_tokens=-1).max_tokens is None
    assert sampling(max_tokens=3).max_tokens == 3
    body = {"messages": [{"role": "user", "content": "x"}]}
    limits = [
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"max_completion_tokens": -1, "max_tokens": 7},
    ]
    assert [ChatRequest.model_validate(body | limit).most_tokens for limit in limits] == [None, None, 7]
    assert ResponsesRequest.model_validate({"input": "x", "max_output_tokens": -1}).max_output_tokens is None


@pytest.mark.parametrize("limit", [0, -2, -1.0, "-1", True, False])
def test_other_limits_below_one_are_refused(limit: object) -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        sampling(max_tokens=limit)


def test_values_of_zero_are_given_values() -> None:
    found = sampling(temperature=0, logit_bias={"7": -100, "0": 2.5})
    assert found.temperature == 0
    assert dict(found.logit_bias) == {7: -100.0, 0: 2.5}
    assert sampling().temperature == 0.25


def test_as_many_answers_as_the_server_allows() -> None:
    assert sampling(n=2).n == 2
    with pytest.raises(ProblemError, match="3 answers: at most 2"):
        sampling(n=3)
