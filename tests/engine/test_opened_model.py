"""What a model file recommends for sampling."""

import pytest

from coldstream.engine import SamplingParams
from coldstream.engine.opened_model import sampling_defaults
from coldstream.errors import InconsistentError


def test_without_recommendations_the_defaults_hold() -> None:
    assert sampling_defaults({"general.name": "x"}) == SamplingParams()


def test_recommendations_of_the_file_are_taken() -> None:
    metadata = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": 1.1,
        "general.sampling.penalty_last_n": -1,
    }
    expected = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.1, repeat_last_n=None
    )
    assert sampling_defaults(metadata) == expected


@pytest.mark.parametrize(
    ("key", "value"), [("temp", -1.0), ("top_k", "many"), ("top_p", [0.5]), ("min_p", True)]
)
def test_recommendations_out_of_range_are_the_files_fault(key: str, value: object) -> None:
    with pytest.raises(InconsistentError, match="sampling: "):
        sampling_defaults({f"general.sampling.{key}": value})
