"""Completions through the official client: texts, lists, token ids, log-probabilities, streams."""

from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types import Completion, CompletionChoice

from coldstream.decoding import derived_seed
from coldstream.engine import LLM, SamplingParams
from coldstream.server.http.answers import MAX_BOUNDARIES, boundaries_of
from coldstream.server.local_client import LocalClient
from http_serving import Connect, events_of, open_demo

PROMPT = "import os\nimport sys\n"
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 16}


async def test_an_answer_is_that_of_the_library_for_text_and_for_its_token_ids(
    openai: AsyncOpenAI, llm: LLM
) -> None:
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    for prompt in (PROMPT, [PROMPT], list(expected.prompt_token_ids), [list(expected.prompt_token_ids)]):
        completion = await openai.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in completion.choices] == [expected.text]
        assert completion.choices[0].finish_reason == "length"


async def test_sc06_answers_to_several_prompts_keep_their_places(openai: AsyncOpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "def main(", "class Reader"]
    completion = await openai.completions.create(
        prompt=prompts, model="demo", temperature=1.2, max_tokens=8, n=2, seed=11
    )
    for place, choice in enumerate(completion.choices):
        prompt, answer = divmod(place, 2)
        params = SamplingParams(temperature=1.2, max_tokens=8, seed=derived_seed(11, answer))
        assert (choice.index, choice.text) == (place, llm.generate(prompts[prompt], params)[0].text)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(len(llm.opened.tokenizer.encode(each)) for each in prompts)
    assert completion.usage.completion_tokens <= 6 * 8


async def test_logprobs_have_the_older_apis_columns(openai: AsyncOpenAI, llm: LLM) -> None:
    completion = await openai.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16, logprobs=3))
    found, by_ids = completion.choices[0].logprobs, expected.outputs[0].logprobs
    assert found is not None
    assert by_ids is not None
    chosen = [by_id[token_id] for by_id, token_id in zip(by_ids, expected.token_ids, strict=True)]
    assert found.tokens == [each.decoded_token for each in chosen]
    assert found.token_logprobs == [each.logprob for each in chosen]
    text = completion.choices[0].text
    for start, token in zip(found.text_offset or (), found.tokens or (), strict=True):
        assert text[start : start + len(token)] == token
    assert all(len(top) == 3 for top in found.top_logprobs or ())


async def test_a_stream_is_the_answer(http: httpx2.AsyncClient, openai: AsyncOpenAI) -> None:
    body = {"prompt": [PROMPT, "def main("], **GREEDY, "logprobs": 0}
    whole = await openai.completions.create(**body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await http.post("/v1/completions", json={**body, **options})).text)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert whole.usage is not None
    assert usage["usage"]["completion_tokens"] == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [each for event in events for each in event["choices"] if each["index"] == choice.index]
        assert "".join(each["text"] for each in own) == choice.text
        assert [each["finish_reason"] for each in own if each["finish_reason"]] == [choice.finish_reason]
        assert choice.logprobs is not None
        assert [t for each in own for t in each["logprobs"]["tokens"]] == choice.logprobs.tokens
        assert [t for each in own for t in each["logprobs"]["text_offset"]] == choice.logprobs.text_offset


async def test_control_tokens_stay_in_the_text_if_asked_for(http: httpx2.AsyncClient) -> None:
    body = {"prompt": PROMPT, **GREEDY, "ignore_eos": True, "max_tokens": 4}
    bodies = [{**body, "skip_special_tokens": skips} for skips in (True, False)]
    ids = (await http.post("/tokenize", json={"content": "<|im_start|>", "parse_special": True})).json()
    (control,) = ids["tokens"]
    forced = {"logit_bias": {str(control): 100}}
    skipped, shown = [
        (await http.post("/v1/completions", json={**each, **forced})).json()["choices"][0]["text"]
        for each in bodies
    ]
    assert "<|im_start|>" in shown
    assert skipped == shown.replace("<|im_start|>", "")


class UnfinishedChoice(CompletionChoice):
    """A choice of a chunk before its last one, whose `finish_reason` OpenAI's service sends as null. The type
    in its client does not allow that.
    """

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class Chunk(Completion):
    choices: list[UnfinishedChoice]  # type: ignore[assignment]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 2, "prompt": [PROMPT, "def main("]},
        {"n": 2, "temperature": 1.0},
        {"stop": ["\nimport"]},
        {"return_progress": True},
        {"stream_options": {"include_usage": True}, "logprobs": 1},
        {"stream_options": {"include_usage": False}},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
async def test_every_chunk_has_the_official_clients_shape(
    http: httpx2.AsyncClient, more: dict[str, Any]
) -> None:
    response = await http.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **more, "stream": True})
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    chunks = [Chunk.model_validate(event, strict=True) for event in events]
    wants_usage = more.get("stream_options") == {"include_usage": True}
    assert [
        ("usage" in event, chunk.usage is not None) for event, chunk in zip(events, chunks, strict=True)
    ] == [
        *[(wants_usage, False)] * (len(chunks) - 1),
        (wants_usage, wants_usage),
    ]
    num_answers = more.get("n", 1) * (len(more["prompt"]) if "prompt" in more else 1)
    for index in range(num_answers):
        reasons = [each.finish_reason for chunk in chunks for each in chunk.choices if each.index == index]
        assert reasons[-1] is not None
        assert set(reasons[:-1]) <= {None}
    for chunk in chunks:
        if all(choice.finish_reason for choice in chunk.choices):
            Completion.model_validate(chunk.model_dump(), strict=True)


@pytest.fixture(scope="module")
def drafting() -> Iterator[LocalClient]:
    """An engine that drafts."""
    opened = open_demo(spec_type="ngram")
    with LocalClient(opened, "demo") as client:
        yield client
    opened.close()


@pytest.mark.sharded(4)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.3, "seed": 5},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"logprobs": 2},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"stop": ["\nimport"]},
        {"min_p": 0.2, "top_p": 0.7, "top_k": 3, "temperature": 2.0, "seed": 9},
        {"logit_bias": {"1": 5, "2": -100}},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
async def test_rq05_nothing_depends_on_drafts(
    connect: Connect, drafting: LocalClient, llm: LLM, more: dict[str, Any]
) -> None:
    prompt = "import argparse\nimport collections\n" * 6
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, **more}
    async with connect(drafting) as http, connect() as plain:
        answers = [(await each.post("/v1/completions", json=body)).json() for each in (http, plain)]
        drafted = answers[0]["usage"]["completion_tokens_details"]
    assert answers[0]["choices"] == answers[1]["choices"]
    params = {name: value for name, value in body.items() if name not in ("prompt", "logit_bias")}
    bias = {int(name): value for name, value in more.get("logit_bias", {}).items()}
    (expected,) = llm.generate(prompt, SamplingParams(**params, logit_bias=bias))
    assert [each["text"] for each in answers[0]["choices"]] == [each.text for each in expected.outputs]
    if not more:
        assert drafted["accepted_prediction_tokens"] > 0


async def test_tokens_go_to_text_and_back(http: httpx2.AsyncClient, llm: LLM) -> None:
    text = "def naïve() -> str:\n    return '<|im_end|>'\n"
    tokens = (await http.post("/tokenize", json={"content": text})).json()["tokens"]
    assert tokens == llm.opened.tokenizer.encode(text, parse_special=True)
    plain = (await http.post("/tokenize", json={"content": text, "parse_special": False})).json()["tokens"]
    assert len(plain) > len(tokens)
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"content": text}
    pieces = (await http.post("/tokenize", json={"content": text, "with_pieces": True})).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    assert (await http.post("/detokenize", json={"tokens": [6144]})).status_code == 400


@given(st.lists(st.integers(0, 3), max_size=60))
def test_prefixes_are_kept_after_the_first_turn_and_the_last_ones(token_ids: list[int]) -> None:
    boundaries, ends = (
        boundaries_of(token_ids, frozenset({0})),
        [i + 1 for i, t in enumerate(token_ids) if t == 0],
    )
    assert list(boundaries) == sorted(set(boundaries))
    assert len(boundaries) == min(len(ends), MAX_BOUNDARIES)
    assert set(boundaries) <= set(ends)
    assert boundaries[:1] == tuple(ends[:1])
    assert boundaries[-1:] == tuple(ends[-1:])
