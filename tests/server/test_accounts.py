"""Counts and times of answers, in the shapes of OpenAI's API and of llama.cpp's server."""

import time

import pytest

from coldstream.engine.events import PromptProgress, Started
from coldstream.engine.request import Statistics
from coldstream.server.http.accounts import PromptProgressReports, timings, usage


def statistics(prompt: int, reused: int, generated: int, first_s: float, generation_s: float) -> Statistics:
    return Statistics(prompt, reused, generated, first_s, generation_s, "none", 1, 0)


# Two prompts, the first with two answers: its second one reused all of the prompt but a token.
ANSWERS = [
    [statistics(10, 4, 5, 0.5, 2.0), statistics(10, 9, 7, 0.25, 3.0)],
    [statistics(20, 0, 11, 1.5, 1.0)],
]


def test_a_prompt_with_several_answers_is_counted_once() -> None:
    found = usage(ANSWERS)
    assert found["prompt_tokens"] == 30
    assert found["prompt_tokens_details"] == {"cached_tokens": 4}
    assert (found["completion_tokens"], found["total_tokens"]) == (23, 53)
    assert "reasoning_tokens" not in found["completion_tokens_details"]


@pytest.mark.parametrize(("reported", "counted"), [(0, 0), (22, 22), (24, 23)])
def test_a_thought_has_no_more_tokens_than_its_answer(reported: int, counted: int) -> None:
    assert usage(ANSWERS, reported)["completion_tokens_details"]["reasoning_tokens"] == counted


def test_answers_side_by_side_count_by_the_one_that_took_longest() -> None:
    found = timings(ANSWERS)
    assert (found["cache_n"], found["prompt_n"], found["predicted_n"]) == (4, 26, 23)
    assert (found["prompt_ms"], found["predicted_ms"]) == (1500, 3000)
    assert found["prompt_per_second"] == pytest.approx(26 / 1.5)
    assert found["prompt_per_token_ms"] == pytest.approx(1500 / 26)
    assert found["predicted_per_second"] == pytest.approx(20 / 3)
    assert found["predicted_per_token_ms"] == pytest.approx(3000 / 20)
    assert "draft_n" not in found


def test_nothing_is_divided_by_no_time_or_tokens() -> None:
    found = timings([[statistics(3, 3, 0, 0.0, 0.0)]])
    assert [found[name] for name in found if "_per_" in name] == [0.0] * 4


def test_rates_are_of_the_tokens_after_the_first() -> None:
    """The first token costs no step of its own: one token alone has no rate, and 16 took 15 steps."""
    alone, several = [
        timings([[statistics(3, 0, count, 0.5, seconds)]]) for count, seconds in ((1, 0.0), (16, 3))
    ]
    assert (alone["predicted_n"], several["predicted_n"]) == (1, 16)
    assert alone["predicted_per_second"] == alone["predicted_per_token_ms"] == 0
    assert several["predicted_per_second"] == pytest.approx(5)
    assert several["predicted_per_token_ms"] == pytest.approx(200)


def test_progress_is_reported_in_milliseconds() -> None:
    reports = PromptProgressReports(time.monotonic() - 2)
    first, second = reports.of(Started(1, 64, 1000)), reports.of(PromptProgress(1, 256, 1000))
    assert first
    assert second
    assert 2000 <= first.pop("time_ms") <= second.pop("time_ms") < 60_000
    assert first == {"total": 1000, "cache": 64, "processed": 64}
    assert second == {"total": 1000, "cache": 64, "processed": 256}
    assert reports.of(PromptProgress(1, 256, 1000)) is None
