"""Chats through the official client, which refuses answers in another shape than OpenAI's."""

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from coldstream.decoding import derived_seed
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.events import Delta, Started
from coldstream.engine.request import Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.server.event_stream import EventStream
from coldstream.server.output import MAX_CALLS
from http_serving import Connect, Scripted, WithTemplate, events_of, written

MESSAGES: Any = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "import os\nimport sys\n"},
]
GREEDY: Any = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "description": "Turn to a side.",
            "parameters": {
                "type": "object",
                "properties": {
                    "angle": {"type": "integer", "minimum": -90, "maximum": 90},
                    "side": {"type": "string", "enum": ["left", "right"]},
                },
                "required": ["angle", "side"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


async def streamed(client: AsyncOpenAI, **request: Any) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **request)]


def text_of(chunks: Sequence[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_an_answer_is_that_of_the_library(openai: AsyncOpenAI, llm: LLM) -> None:
    completion = await openai.chat.completions.create(**GREEDY)
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24))
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.completion_tokens == 24
    assert completion.model == "demo"


async def test_sc07_a_stream_is_the_answer_with_one_role_one_id_and_one_end(
    openai: AsyncOpenAI, http: httpx2.AsyncClient
) -> None:
    request = {**GREEDY, "stream_options": {"include_usage": True}}
    whole = await openai.chat.completions.create(**GREEDY)
    chunks = await streamed(openai, **request)
    assert text_of(chunks) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role] == [
        "assistant"
    ]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    raw = events_of((await http.post("/v1/chat/completions", json={**GREEDY, "stream": True})).text)
    assert [event == "[DONE]" for event in raw] == [False] * (len(raw) - 1) + [True]
    assert raw[-2]["timings"]["predicted_n"] == 24


async def test_several_answers_are_those_of_their_seeds(openai: AsyncOpenAI, llm: LLM) -> None:
    request = {**GREEDY, "temperature": 1.1, "n": 3, "seed": 7}
    whole = await openai.chat.completions.create(**request)
    chunks = await streamed(openai, **request)
    for index, choice in enumerate(whole.choices):
        params = SamplingParams(temperature=1.1, max_tokens=24, seed=derived_seed(7, index))
        assert choice.message.content == llm.chat(MESSAGES, params)[0].text == text_of(chunks, index)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(
        llm.chat(MESSAGES, SamplingParams(temperature=1.1, max_tokens=24, seed=derived_seed(7, i)))[
            0
        ].statistics.generated_tokens
        for i in range(3)
    )


async def test_logprobs_are_the_librarys_and_the_same_in_a_stream(openai: AsyncOpenAI, llm: LLM) -> None:
    request = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = await openai.chat.completions.create(**request)
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=24, logprobs=2))
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert expected.outputs[0].logprobs is not None
    for entry, token_id, by_id in zip(
        logprobs.content, expected.token_ids, expected.outputs[0].logprobs, strict=True
    ):
        assert (entry.token, entry.logprob) == (by_id[token_id].decoded_token, by_id[token_id].logprob)
        assert bytes(entry.bytes or ()) == llm.opened.tokenizer.token_bytes(token_id)
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (found.logprob for found in by_id.values() if found.rank <= 2), reverse=True
        )
    chunks = await streamed(openai, **request)
    reported = [
        each for chunk in chunks for c in chunk.choices if c.logprobs for each in c.logprobs.content or ()
    ]
    assert reported == logprobs.content


async def test_stop_strings_penalties_and_biases_are_those_of_the_library(
    openai: AsyncOpenAI, llm: LLM
) -> None:
    more: Any = {"stop": ["\n"], "frequency_penalty": 0.5, "presence_penalty": 0.5}
    bias = {llm.opened.tokenizer.encode("import")[0]: -100.0}
    params = SamplingParams(temperature=0, max_tokens=24, logit_bias=bias, **more)
    expected = llm.chat(MESSAGES, params)[0]
    named = {str(token_id): value for token_id, value in bias.items()}
    request = {**GREEDY, **more, "logit_bias": named}
    completion = await openai.chat.completions.create(**request)
    assert completion.choices[0].message.content == expected.text
    assert completion.choices[0].finish_reason == expected.finish_reason == "stop"
    assert text_of(await streamed(openai, **request)) == expected.text


async def test_max_completion_tokens_goes_before_max_tokens(openai: AsyncOpenAI) -> None:
    completion = await openai.chat.completions.create(**GREEDY, max_completion_tokens=3)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3


async def test_parts_of_text_and_the_developers_role_are_read(openai: AsyncOpenAI) -> None:
    parts: Any = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Write "}, {"type": "text", "text": "Python."}],
        },
        {"role": "user", "content": [{"type": "text", "text": "import os\nimport sys\n"}]},
    ]
    reported = await openai.chat.completions.create(**GREEDY)
    same = await openai.chat.completions.create(**{**GREEDY, "messages": parts})
    assert same.choices[0].message.content == reported.choices[0].message.content
    assert same.usage is not None
    assert reported.usage is not None
    assert same.usage.prompt_tokens == reported.usage.prompt_tokens


async def test_several_system_messages_at_the_beginning_are_one(thinking: AsyncOpenAI) -> None:
    system: Any = [{"role": "system", "content": "Write."}, {"role": "developer", "content": "Python."}]
    merged: Any = [{"role": "system", "content": "Write.\n\nPython."}]
    prompts = []
    for messages in ([*system, MESSAGES[1]], [*merged, MESSAGES[1]]):
        completion = await thinking.chat.completions.create(**{**GREEDY, "messages": messages})
        assert completion.usage is not None
        prompts.append(completion.usage.prompt_tokens)
    assert prompts[0] == prompts[1]


async def test_prompt_progress_is_reported_to_those_who_ask(http: httpx2.AsyncClient) -> None:
    messages = [{"role": "user", "content": "import argparse, collections\n" * 100}]
    body = {"messages": messages, "max_tokens": 2, "stream": True, "cache_salt": "progress"}
    text = (await http.post("/v1/chat/completions", json={**body, "return_progress": True})).text
    progress = [event["prompt_progress"] for event in events_of(text)[:-1] if "prompt_progress" in event]
    assert [list(each) for each in progress] == [["total", "cache", "processed", "time_ms"]] * len(progress)
    processed = [each["processed"] for each in progress]
    assert len(processed) > 2
    assert processed == sorted(set(processed))
    assert (processed[0], processed[-1]) == (0, progress[0]["total"])
    assert {(each["total"], each["cache"]) for each in progress} == {(processed[-1], 0)}
    assert "prompt_progress" not in (await http.post("/v1/chat/completions", json=body)).text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_progress_begins_with_the_cache_and_ends_with_the_prompt(
    http: httpx2.AsyncClient, path: str
) -> None:
    text = f"# {path}\n" + "import argparse, collections\n" * 60
    asked = (
        {"prompt": text}
        if path.endswith("v1/completions")
        else {"messages": [{"role": "user", "content": text}]}
    )
    body = {**asked, "max_tokens": 2, "stream": True, "return_progress": True, "cache_salt": path}
    for _ in range(2):
        events = events_of((await http.post(path, json=body)).text)[:-1]
    reported = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert reported[0]["processed"] == reported[0]["cache"] > 0
    assert reported[-1]["processed"] == reported[-1]["total"]
    answer = next(index for index, event in enumerate(events) if _has_text(event))
    assert all("prompt_progress" not in event for event in events[answer:])


def _has_text(event: dict[str, Any]) -> bool:
    return any(each.get("text") or (each.get("delta") or {}).get("content") for each in event["choices"])


async def test_timings_and_cached_tokens_are_reported(http: httpx2.AsyncClient) -> None:
    messages = [{"role": "user", "content": "import argparse\nimport collections\n" * 30}]
    body = {"messages": messages, "max_tokens": 4, "cache_salt": "timings"}
    first = (await http.post("/v1/chat/completions", json=body)).json()
    second = (await http.post("/v1/chat/completions", json=body)).json()
    total = first["usage"]["prompt_tokens"]
    assert first["timings"]["cache_n"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["timings"]["cache_n"] > 0
    assert second["timings"]["prompt_n"] == total - cached
    keys = "prompt_n prompt_ms prompt_per_token_ms prompt_per_second predicted_n predicted_ms"
    keys += " predicted_per_token_ms predicted_per_second cache_n"
    assert set(keys.split()) <= second["timings"].keys()


async def test_a_schema_binds_the_answer_and_the_stream(openai: AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "file", "schema": schema, "strict": True}}
    request = {**GREEDY, "max_tokens": 200, "response_format": form}
    completion = await openai.chat.completions.create(**request)
    answer = json.loads(completion.choices[0].message.content or "")
    assert answer.keys() == {"name", "size"}
    assert answer["size"] in (1, 2, 3)
    assert completion.choices[0].finish_reason == "stop"
    assert text_of(await streamed(openai, **request)) == completion.choices[0].message.content


async def test_a_schema_that_cannot_be_kept_to_is_refused(openai: AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    with pytest.raises(sdk.BadRequestError, match="nonsense"):
        await openai.chat.completions.create(**GREEDY, response_format=form)


async def test_a_required_call_has_its_id_name_and_typed_arguments(thinking: AsyncOpenAI) -> None:
    request = {**GREEDY, "max_tokens": 300, "tools": TOOLS, "extra_body": {"thinking_budget": 4}}
    choice: Any = {"type": "function", "function": {"name": "turn"}}
    completion = await thinking.chat.completions.create(**request, tool_choice=choice)
    (answer,) = completion.choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "turn"
    arguments = json.loads(call.function.arguments)
    assert -90 <= arguments["angle"] <= 90
    assert arguments["side"] in ("left", "right")

    chunks = await streamed(thinking, **request, tool_choice=choice)
    deltas = [delta for chunk in chunks for c in chunk.choices for delta in c.delta.tool_calls or ()]
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    joined = "".join(delta.function.arguments or "" for delta in deltas if delta.function)
    assert joined == call.function.arguments
    assert not text_of(chunks)
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]


async def test_calls_are_one_at_a_time_where_they_must_not_be_parallel(thinking: AsyncOpenAI) -> None:
    completion = await thinking.chat.completions.create(
        **{**GREEDY, "max_tokens": 300, "tools": TOOLS},
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"enable_thinking": False},
    )
    assert len(completion.choices[0].message.tool_calls or ()) == 1


async def test_a_call_that_is_truncated_is_none(thinking: AsyncOpenAI) -> None:
    """Its text is content, also for those who have read along, and have a part of it already."""
    named: Any = {"type": "function", "function": {"name": "turn"}}
    more: Any = {"tools": TOOLS, "tool_choice": named, "extra_body": {"enable_thinking": False}}
    num_begun = 0
    for max_tokens in range(4, 40, 4):
        request = {**GREEDY, "max_tokens": max_tokens, **more}
        (choice,) = (await thinking.chat.completions.create(**request)).choices
        if choice.finish_reason == "tool_calls":
            break
        assert choice.message.tool_calls is None
        chunks = await streamed(thinking, **request)
        assert text_of(chunks) == choice.message.content != ""
        num_begun += any(c.delta.tool_calls for chunk in chunks for c in chunk.choices)
        assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"
    assert num_begun


async def test_without_tool_choice_none_is_called_and_no_tool_is_shown(thinking: AsyncOpenAI) -> None:
    plain = await thinking.chat.completions.create(**GREEDY)
    refused = await thinking.chat.completions.create(**GREEDY, tools=TOOLS, tool_choice="none")
    shown = await thinking.chat.completions.create(**GREEDY, tools=TOOLS)
    assert plain.usage is not None
    assert refused.usage is not None
    assert shown.usage is not None
    assert plain.usage.prompt_tokens == refused.usage.prompt_tokens < shown.usage.prompt_tokens


async def test_reasoning_has_both_names_and_its_budget_closes_it_once(
    thinking_http: httpx2.AsyncClient,
) -> None:
    body = {**GREEDY, "max_tokens": 40, "thinking_budget": 6}
    response = (await thinking_http.post("/v1/chat/completions", json=body)).json()
    message = response["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["reasoning"] == message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["reasoning"] + message["content"]
    details = response["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < response["usage"]["completion_tokens"]
    stream = events_of((await thinking_http.post("/v1/chat/completions", json={**body, "stream": True})).text)
    deltas = [choice["delta"] for event in stream[:-1] for choice in event["choices"]]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


async def test_a_thought_that_never_ends_is_reasoning(thinking: AsyncOpenAI) -> None:
    completion = await thinking.chat.completions.create(**GREEDY)
    assert completion.choices[0].message.content == ""
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "more",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
async def test_thinking_can_be_turned_off(thinking_http: httpx2.AsyncClient, more: dict[str, Any]) -> None:
    message = (await thinking_http.post("/v1/chat/completions", json={**GREEDY, **more})).json()["choices"][
        0
    ]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


async def test_reasoning_is_accepted_in_history_under_either_name(thinking_http: httpx2.AsyncClient) -> None:
    """And calls with their results, as agents send them back; nothing of them is flattened."""

    async def prompt_tokens(name: str, thought: str | None) -> int:
        call = {"id": "c1", "type": "function", "function": {"name": "turn", "arguments": '{"angle": 5}'}}
        history = [
            MESSAGES[1],
            {"role": "assistant", "content": None, name: thought, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
        ]
        body = {**GREEDY, "messages": history, "tools": TOOLS, "max_tokens": 1}
        response = await thinking_http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    without = await prompt_tokens("reasoning", None)
    assert await prompt_tokens("reasoning", "turn a bit") == await prompt_tokens(
        "reasoning_content", "turn a bit"
    )
    assert await prompt_tokens("reasoning", "turn a bit") > without


async def test_repetition_is_stopped_where_asked_and_said_so(http: httpx2.AsyncClient, llm: LLM) -> None:
    token = str(llm.opened.tokenizer.encode(" a")[0])
    body = {**GREEDY, "max_tokens": 1500, "logit_bias": {token: 100}, "stop_repetition": True}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")


async def test_errors_are_the_official_clients_own(openai: AsyncOpenAI, connect: Connect) -> None:
    with pytest.raises(sdk.NotFoundError) as missing:
        await openai.chat.completions.create(**{**GREEDY, "model": "gpt-4o"})
    assert missing.value.code == "model_not_found"
    too_long: Any = [{"role": "user", "content": "x = 1\n" * 4000}]
    for stream in (False, True):
        with pytest.raises(sdk.BadRequestError, match="maximum context length is 2048 tokens") as full:
            await openai.chat.completions.create(**{**GREEDY, "messages": too_long}, stream=stream)
        assert (full.value.code, full.value.param) == ("context_length_exceeded", "messages")
    async with connect(api_keys=("secret",)) as http:
        client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="wrong", http_client=http, max_retries=0)
        with pytest.raises(sdk.AuthenticationError):
            await client.chat.completions.create(**GREEDY)
        right = client.with_options(api_key="secret")
        assert (await right.models.list()).data[0].id == "demo"


async def test_models_are_listed_and_found_by_name(openai: AsyncOpenAI) -> None:
    (model,) = (await openai.models.list()).data
    assert (await openai.models.retrieve(model.id)) == model
    with pytest.raises(sdk.NotFoundError):
        await openai.models.retrieve("org/other:Q4")


class Endless(Scripted):
    """A client of a model that calls a tool again and again, until its request is cancelled."""

    async def submit(self, submission: Submission) -> EventStream:
        self.num_answers = submission.request.params.n
        self.stream = await super().submit(submission)
        return self.stream

    async def cancel(self, request_id: int) -> None:
        assert request_id == self.stream.request_id
        self.cancelled.append(request_id)
        statistics = Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0)
        for index in range(self.num_answers):
            end = Piece("", finish_reason="cancelled", statistics=statistics)
            self.stream.push(Delta(request_id, index, end))


@pytest.mark.parametrize(
    ("fields", "most"), [({}, MAX_CALLS), ({"parallel_tool_calls": False}, 1), ({"n": 2}, MAX_CALLS)]
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_endless_calls_end_at_a_limit(
    connect: Connect, thinker: WithTemplate, fields: Any, most: int, is_streamed: bool
) -> None:
    call = written("turn", angle="5", side="left")
    script = [
        Delta(1, index, Piece(text, (1,)))
        for _ in range(MAX_CALLS + 20)
        for text in (call, "\n", "And again. ")
        for index in range(fields.get("n", 1))
    ]
    client = Endless(thinker, Started(1, 2, 5), *script)
    body = {"messages": MESSAGES, "tools": TOOLS, "enable_thinking": False, "stream": is_streamed, **fields}
    async with connect(client) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert len(client.cancelled) == 1
    calls: dict[int, int] = {}
    reasons = []
    for event in events_of(response.text)[:-1] if is_streamed else [response.json()]:
        for choice in event["choices"]:
            reported = choice["delta" if is_streamed else "message"].get("tool_calls") or ()
            calls[choice["index"]] = calls.get(choice["index"], 0) + sum("id" in each for each in reported)
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert calls == dict.fromkeys(range(fields.get("n", 1)), most)
    assert reasons == ["tool_calls"] * fields.get("n", 1)
