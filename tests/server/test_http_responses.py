"""OpenAI's responses through the official client, over the same answers as chats."""

import json
from typing import Any

import httpx2
import openai as sdk
import pytest
from openai import AsyncOpenAI

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.events import Failed, Started
from coldstream.errors import GenerationFault
from coldstream.server.local_client import LocalClient
from http_serving import URL, Connect, Scripted

INPUT = "import os\nimport sys\n"
GREEDY: Any = {
    "model": "demo",
    "instructions": "Write Python.",
    "input": INPUT,
    "max_output_tokens": 24,
    "temperature": 0,
}
SAME: Any = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": INPUT}]
TOOLS: Any = [
    {
        "type": "function",
        "name": "turn",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"angle": {"type": "integer", "minimum": -90, "maximum": 90}},
            "required": ["angle"],
            "additionalProperties": False,
        },
    },
    {"type": "web_search"},
]
QUICK: Any = {"reasoning": {"effort": "none"}}


async def test_an_answer_is_that_of_the_library(openai: AsyncOpenAI, llm: LLM) -> None:
    response = await openai.responses.create(**GREEDY)
    (expected,) = llm.chat(SAME, SamplingParams(temperature=0, max_tokens=24))
    assert response.output_text == expected.text
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.input_tokens == len(expected.prompt_token_ids)
    assert response.usage.output_tokens == 24


async def test_a_stream_is_the_answer_with_numbered_events_in_order(openai: AsyncOpenAI) -> None:
    whole = await openai.responses.create(**GREEDY)
    events = [event async for event in await openai.responses.create(**GREEDY, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert joined == whole.output_text


async def test_a_call_that_is_demanded_is_an_item_with_its_arguments(thinking: AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "name": "turn"}
    request = {**GREEDY, **QUICK, "max_output_tokens": 200, "tools": TOOLS, "tool_choice": choice}
    response = await thinking.responses.create(**request)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, response.status) == ("turn", "completed")
    assert -90 <= json.loads(call.arguments)["angle"] <= 90
    assert [tool.type for tool in response.tools] == ["function"]
    events = [event async for event in await thinking.responses.create(**request, stream=True)]
    joined = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert joined == call.arguments
    assert events[-1].type == "response.completed"


async def test_a_call_that_is_cut_off_is_none_in_the_end(thinking: AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "name": "turn"}
    for size in range(4, 40, 4):
        request = {**GREEDY, **QUICK, "max_output_tokens": size, "tools": TOOLS, "tool_choice": choice}
        response = await thinking.responses.create(**request)
        (item,) = response.output
        if item.type == "function_call":
            assert json.loads(item.arguments)
            break
        assert (item.type, response.status) == ("message", "incomplete")
        events = [event async for event in await thinking.responses.create(**request, stream=True)]
        last = events[-1]
        assert last.type == "response.incomplete"
        assert [item.type for item in last.response.output] == ["message"]
    assert size > 4


async def test_a_thought_is_an_item_of_its_own(thinking: AsyncOpenAI) -> None:
    response = await thinking.responses.create(**GREEDY)
    (thought,) = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    streamed = [event async for event in await thinking.responses.create(**GREEDY, stream=True)]
    told = "".join(event.delta for event in streamed if event.type == "response.reasoning_text.delta")
    assert told == thought.content[0].text
    plain = await thinking.responses.create(**GREEDY, **QUICK)
    assert [item.type for item in plain.output] == ["message"]


async def test_a_schema_binds_the_answer(openai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
    form: Any = {"type": "json_schema", "name": "size", "strict": True}
    form["schema"] = {**schema, "additionalProperties": False}
    response = await openai.responses.create(**{**GREEDY, "max_output_tokens": 60}, text={"format": form})
    assert json.loads(response.output_text)["size"] in (1, 2)
    assert response.status == "completed"


async def test_history_is_that_of_a_chat_with_thoughts_calls_and_results(
    thinking_http: httpx2.AsyncClient,
) -> None:
    """What Codex sends back, item by item, gives the chat's own prompt."""
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Turn."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a bit"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Turning."}]},
        {"type": "function_call", "call_id": "c1", "name": "turn", "arguments": '{"angle": 5}'},
        {"type": "function_call", "call_id": "c2", "name": "turn", "arguments": '{"angle": 6}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "too"}]},
        {"role": "user", "content": "And now?"},
    ]
    functions = [{"name": "turn", "arguments": f'{{"angle": {angle}}}'} for angle in (5, 6)]
    calls = [
        {"id": f"c{place}", "type": "function", "function": function}
        for place, function in enumerate(functions, start=1)
    ]
    messages: Any = [
        {"role": "system", "content": "Write Python.\n\nBe brief."},
        {"role": "user", "content": "Turn."},
        {"role": "assistant", "content": "Turning.", "reasoning": "a bit", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "too"},
        {"role": "user", "content": "And now?"},
    ]
    told = (await thinking_http.post("/v1/responses", json={**GREEDY, "input": items})).json()
    chat = {"messages": messages, "max_tokens": 24, "temperature": 0}
    same = (await thinking_http.post("/v1/chat/completions", json=chat)).json()
    assert told["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert told["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["reasoning"]


@pytest.mark.parametrize(
    "changes",
    [
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "message", "content": "a"}]},
        {"input": [{"type": "function_call", "arguments": "{}"}]},
        {"previous_response_id": "resp_1"},
        {"max_output_tokens": 0},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        {"temperature": -1},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
async def test_what_cannot_be_served_is_refused(openai: AsyncOpenAI, changes: Any) -> None:
    with pytest.raises(sdk.BadRequestError):
        await openai.responses.create(**{**GREEDY, **changes})


async def test_an_error_in_the_middle_is_the_last_event(connect: Connect, local_client: LocalClient) -> None:
    client = Scripted(local_client, Started(1, 0, 1), Failed(1, GenerationFault("NaN logits")))
    async with connect(client) as http:
        official = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http, max_retries=0)
        events = [event async for event in await official.responses.create(**GREEDY, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "NaN logits"
