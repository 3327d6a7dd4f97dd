"""Answers: their fields, how they end, several to one prompt, log-probabilities."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coldstream.decoding import derived_seed
from coldstream.engine import LLM, CompletionOutput, SamplingParams
from coldstream.errors import InvalidRequestError
from hash_runner import HashRunner

SEEDED = SamplingParams(seed=11, max_tokens=12, ignore_eos=True)
IM_END = "<|im_end|>"


class Said:
    """A logits processor that makes the model say these tokens after a prompt of `num_prompt`."""

    def __init__(self, num_prompt: int, token_ids: Sequence[int]) -> None:
        self.num_prompt, self.token_ids = num_prompt, token_ids

    def __call__(self, context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        logits[self.token_ids[len(context) - self.num_prompt]] = 1e4
        return logits


def say(llm: LLM, token_ids: Sequence[int], **settings: Any) -> CompletionOutput:
    """The answer of a model that wants to say these tokens."""
    prompt = [1, 2]
    params = SamplingParams(
        temperature=0, max_tokens=len(token_ids), logits_processors=[Said(len(prompt), token_ids)], **settings
    )
    (output,) = llm.generate(prompt, params)
    streamed = list(llm.stream(prompt, params))
    assert "".join(piece.text for piece in streamed) == output.text
    assert (streamed[-1].finish_reason, streamed[-1].stop_reason) == (
        output.finish_reason,
        output.outputs[0].stop_reason,
    )
    return output.outputs[0]


def _letters(llm: LLM, text: str) -> list[int]:
    return [llm.opened.tokenizer.encode(letter)[0] for letter in text]


def test_the_first_answer_is_that_of_the_request(llm: LLM) -> None:
    (output,) = llm.generate("the", replace(SEEDED, n=3))
    assert len(output.outputs) == 3
    first = output.outputs[0]
    assert (output.text, output.token_ids) == (first.text, first.token_ids)
    assert (output.finish_reason, output.statistics) == (first.finish_reason, first.statistics)
    assert output.prompt == "the"
    assert list(output.prompt_token_ids) == llm.opened.tokenizer.encode("the")


def test_several_answers_draw_with_seeds_of_their_own(llm: LLM, runner: HashRunner) -> None:
    (output,) = llm.generate("the", replace(SEEDED, n=4))
    (alone,) = llm.generate("the", SEEDED)
    assert output.token_ids == alone.token_ids
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({answer.token_ids for answer in output.outputs}) == 4
    for index, answer in enumerate(output.outputs):
        assert answer.statistics.seed == derived_seed(11, index)
        assert answer.statistics.generated_tokens == len(answer.token_ids) == 12
        (again,) = llm.generate("the", replace(SEEDED, seed=answer.statistics.seed))
        assert again.token_ids == answer.token_ids
    (fewer,) = llm.generate("the", replace(SEEDED, n=2))
    assert [answer.token_ids for answer in fewer.outputs] == [
        answer.token_ids for answer in output.outputs[:2]
    ]


def test_several_answers_share_one_drawn_seed(llm: LLM) -> None:
    (output,) = llm.generate("the", replace(SEEDED, seed=None, n=3))
    seed = output.statistics.seed
    assert [answer.statistics.seed for answer in output.outputs] == [
        derived_seed(seed, index) for index in range(3)
    ]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities_are_of_the_models_own_logits(llm: LLM, count: int) -> None:
    params = replace(SEEDED, repetition_penalty=1.5, temperature=1.3, logprobs=count)
    (output,) = llm.generate([[3, 1, 4]], params)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    rows = llm.logits([3, 1, 4, *answer.token_ids[:-1]])[2:].astype(np.float64)
    expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    for row, token_id, by_id in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        likeliest = [int(index) for index in np.argsort(-row)[:count]]
        assert list(by_id)[:count] == likeliest
        assert set(by_id) == {*likeliest, token_id}
        for index, found in by_id.items():
            assert found.logprob == pytest.approx(row[index], abs=1e-6)
            assert found.rank == 1 + np.count_nonzero(row > row[index])
            assert found.decoded_token == llm.opened.tokenizer.decode([index], skip_special=False)
    assert answer.cumulative_logprob == pytest.approx(
        math.fsum(row[token_id] for row, token_id in zip(expected, answer.token_ids, strict=True)), abs=1e-5
    )


def test_log_probabilities_change_no_token_and_stream_with_the_tokens(llm: LLM) -> None:
    params = replace(SEEDED, logprobs=2)
    (plain,), (output,) = llm.generate("the", SEEDED), llm.generate("the", params)
    assert output.token_ids == plain.token_ids
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)
    pieces = list(llm.stream("the", params))
    for piece in pieces:
        assert piece.logprobs is not None
        assert len(piece.logprobs) == len(piece.token_ids)
    streamed = [by_id for piece in pieces for by_id in piece.logprobs or ()]
    assert streamed == list(output.outputs[0].logprobs or ())
    assert all(piece.logprobs is None for piece in llm.stream("the", SEEDED))


def test_why_an_answer_ended(llm: LLM) -> None:
    a, b, c, d = _letters(llm, "abcd")
    end = llm.opened.tokenizer.special_ids[IM_END]
    length = say(llm, [a, b])
    assert (length.text, length.finish_reason, length.stop_reason) == ("ab", "length", None)
    ended = say(llm, [a, end, b])
    assert (ended.text, ended.token_ids) == ("a", (a, end))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    by_text = say(llm, [a, b, c, d], stop=["x", "bc"])
    assert (by_text.text, by_text.token_ids) == ("a", (a, b, c))
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", "bc")
    by_id = say(llm, [a, b, c, d], stop_token_ids=[c])
    assert (by_id.text, by_id.token_ids) == ("ab", (a, b, c))
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", c)
    asked_for = say(llm, [a, end, b], stop_token_ids=[end], ignore_eos=True)
    assert (asked_for.token_ids, asked_for.stop_reason) == ((a, end), end)
    as_usual = say(llm, [a, end, b], stop_token_ids=[end])
    assert (as_usual.token_ids, as_usual.stop_reason) == ((a, end), None)


def test_what_ended_an_answer_can_stay_in_it(llm: LLM) -> None:
    a, b, c, d = _letters(llm, "abcd")
    end = llm.opened.tokenizer.special_ids[IM_END]
    assert say(llm, [a, b, c, d], stop="bc", include_stop_str_in_output=True).text == "abc"
    assert say(llm, [a, b, c, d], stop_token_ids=[c], include_stop_str_in_output=True).text == "abc"
    assert say(llm, [a, end, b], include_stop_str_in_output=True).text == "a"


def test_control_tokens_are_in_the_text_where_they_are_not_skipped(llm: LLM) -> None:
    a, b, _, _ = _letters(llm, "abcd")
    end = llm.opened.tokenizer.special_ids[IM_END]
    said = say(llm, [a, end, b], ignore_eos=True)
    shown = say(llm, [a, end, b], ignore_eos=True, skip_special_tokens=False)
    assert (said.text, shown.text) == ("ab", f"a{IM_END}b")
    assert shown.token_ids == said.token_ids
    assert say(llm, [a, end, b], skip_special_tokens=False).text == "a"  # what ended it


def test_end_and_stop_tokens_wait_for_min_tokens(llm: LLM) -> None:
    a, b, c, _ = _letters(llm, "abcd")
    end = llm.opened.tokenizer.special_ids[IM_END]
    for min_tokens in (0, 1, 3):
        ended = say(llm, [end] * 5, min_tokens=min_tokens)
        assert (len(ended.token_ids), ended.finish_reason) == (min_tokens + 1, "stop")
        assert end not in ended.token_ids[:-1]
        stopped = say(llm, [c] * 5, stop_token_ids=[c], min_tokens=min_tokens)
        assert (len(stopped.token_ids), stopped.stop_reason) == (min_tokens + 1, c)
    ignored = say(llm, [a, end, b], ignore_eos=True, min_tokens=3)
    assert ignored.token_ids == (a, end, b)


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    letters = _letters(llm, "ababab")
    for min_tokens, text in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (6, "ababab")):
        answer = say(llm, letters, stop="ab", min_tokens=min_tokens)
        assert answer.text == text
        assert answer.stop_reason == ("ab" if min_tokens < 6 else None)


def test_a_processor_that_fails_ends_its_request_only(llm: LLM) -> None:
    def fail(context: Sequence[int], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raise ZeroDivisionError

    expected = llm.generate("the", SEEDED)[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"logits_processors\[0\] \('fail'\) raised ZeroDivisionEr"):
        llm.generate("the", replace(SEEDED, logits_processors=(fail,)))
    assert llm.generate("the", SEEDED)[0].token_ids == expected
