"""Which of a request's fields decide how its tokens are sampled."""

from typing import Any

import pytest

from coldstream.engine import SamplingParams
from coldstream.server.http import ServerSettings
from coldstream.server.http.fields import SamplingFields, sampling_of
from coldstream.server.http.problems import ProblemError

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


def test_values_of_zero_are_given_values() -> None:
    found = sampling(temperature=0, logit_bias={"7": -100, "0": 2.5})
    assert found.temperature == 0
    assert dict(found.logit_bias) == {7: -100.0, 0: 2.5}
    assert sampling().temperature == 0.25


def test_as_many_answers_as_the_server_allows() -> None:
    assert sampling(n=2).n == 2
    with pytest.raises(ProblemError, match="3 answers: at most 2"):
        sampling(n=3)
