"""OpenAI's responses through the official client, over the same answers as chats."""

import json
import re
from typing import Any

import httpx2
import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.events import Failed, Started
from coldstream.errors import GenerationFault
from coldstream.server.local_client import LocalClient
from http_serving import URL, Connect, Saying, Scripted, events_of, written

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


async def test_a_call_that_is_truncated_is_none_in_the_end(thinking: AsyncOpenAI) -> None:
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
    reported = "".join(event.delta for event in streamed if event.type == "response.reasoning_text.delta")
    assert reported == thought.content[0].text
    plain = await thinking.responses.create(**GREEDY, **QUICK)
    assert [item.type for item in plain.output] == ["message"]


async def test_a_schema_binds_the_answer(openai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
    form: Any = {"type": "json_schema", "name": "size", "strict": True}
    form["schema"] = {**schema, "additionalProperties": False}
    response = await openai.responses.create(**{**GREEDY, "max_output_tokens": 60}, text={"format": form})
    assert json.loads(response.output_text)["size"] in (1, 2)
    assert response.status == "completed"


PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[+-][ab]{2,4}"},
}
FILES: Any = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "The disk.",
    "tools": [
        {
            "type": "function",
            "name": "read",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {"all": {"enum": [True]}},
                "required": ["all"],
            },
        }
    ],
}


async def both(client: AsyncOpenAI, **request: Any) -> tuple[Any, list[Any]]:
    """The response, and the events of the same one as a stream, each of which fits its documented type."""
    request = {**GREEDY, **QUICK, **request}
    response = await client.responses.create(**request)
    raw = await client.responses.with_raw_response.create(**request, stream=True)
    given = events_of((await raw.http_response.aread()).decode())
    events = [EVENT.validate_json(json.dumps(event), strict=True) for event in given]
    check_order(events)
    return response, events


def check_order(events: list[Any]) -> None:
    """One item is open at a time, events name it, and the last event has all that were closed."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.output == []
    open_item, closed = None, []
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            assert event.output_index == len(closed)
            open_item = event.item
            continue
        assert open_item is not None
        assert event.output_index == len(closed)
        assert getattr(event, "content_index", 0) == 0
        if event.type == "response.output_item.done":
            assert (event.item.id, event.item.type) == (open_item.id, open_item.type)
            closed.append(event.item)
            open_item = None
        else:
            assert event.item_id == open_item.id
    assert open_item is None
    assert events[-1].response.output == closed
    assert events[-1].type == f"response.{events[-1].response.status}"


EVENT: Any = TypeAdapter(ResponseStreamEvent)


def short_names(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


@pytest.mark.sharded
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"reasoning": None, "max_output_tokens": 60},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200},
        {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 3},
        {"text": {"format": {"type": "json_object"}, "verbosity": "high"}, "max_output_tokens": 60},
    ],
    ids=["text", "thought", "calls", "more", "JSON"],
)
async def test_every_event_fits_its_documented_type_and_comes_in_order(
    thinking: AsyncOpenAI, asked: Any
) -> None:
    response, events = await both(thinking, **asked)
    without_ids = [
        [item.model_dump(exclude={"id", "call_id"}) for item in each.output]
        for each in (response, events[-1].response)
    ]
    assert without_ids[0] == without_ids[1]


async def test_text_calls_and_thoughts_come_in_the_order_of_the_answer(saying: Saying) -> None:
    calls = [
        written("mcp__files__read", all="true"),
        written("apply_patch", input="+a"),
        written("shell", commands='["ls"]'),
    ]
    async with saying("I look.\n\n" + "\n".join(calls)) as client:
        response, events = await both(client, tools=[FILES, PATCH, {"type": "shell"}])
    assert [item.type for item in response.output] == [
        "message",
        "function_call",
        "custom_tool_call",
        "shell_call",
    ]
    assert len({item.id for item in events[-1].response.output}) == 4


async def test_a_custom_tool_is_called_with_text_in_its_own_form(saying: Saying) -> None:
    patch = '*** Begin Patch\n+print("ä")\n*** End Patch'
    async with saying(f"So: {written('apply_patch', input=patch)}") as client:
        response, events = await both(client, tools=[PATCH])
    call = response.output[-1]
    assert call.type == "custom_tool_call"
    assert (call.name, call.input, response.status) == ("apply_patch", patch, "completed")
    assert response.tools[0].type == "custom"
    names = short_names(events)
    deltas = names.count("custom_tool_call_input.delta")
    assert deltas > 3
    begin = names.index("output_item.added", 3)
    assert names[begin:] == [
        "output_item.added", *["custom_tool_call_input.delta"] * deltas,
        "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    joined = "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta")
    done = next(e for e in events if e.type == "response.custom_tool_call_input.done")
    assert joined == done.input == events[-2].item.input == patch


async def test_a_custom_tool_of_a_namespace_keeps_both_of_its_names(saying: Saying) -> None:
    space = {"type": "namespace", "name": "edit", "description": "", "tools": [PATCH]}
    async with saying(written("edit__apply_patch", input="+a")) as client:
        response, events = await both(client, tools=[space])
    for call in (response.output[0], events[-2].item):
        assert (call.type, call.namespace, call.name, call.input) == (
            "custom_tool_call",
            "edit",
            "apply_patch",
            "+a",
        )


@pytest.mark.parametrize(
    ("tool", "call", "wanted"),
    [
        (
            {"type": "local_shell"},
            written("local_shell", command='["ls", "-l"]'),
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}},
        ),
        (
            {"type": "shell"},
            written("shell", commands='["ls"]', timeout_ms="9"),
            {
                "type": "shell_call",
                "action": {"commands": ["ls"], "timeout_ms": 9, "max_output_length": None},
            },
        ),
        (
            {"type": "apply_patch"},
            written("apply_patch", type="delete_file", path="a.py"),
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
        ),
        (
            {"type": "tool_search", "execution": "client"},
            written("tool_search", query="send mail"),
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "send mail"}},
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
async def test_a_tool_that_the_client_runs_is_called_in_its_own_form(
    saying: Saying, tool: Any, call: str, wanted: Any
) -> None:
    async with saying(f"Now.\n\n{call}") as client:
        response, events = await both(client, tools=[tool])
    assert short_names(events)[-3:] == ["output_item.added", "output_item.done", "completed"]
    for item in (response.output[-1], events[-2].item):
        given = item.model_dump(mode="json", exclude_unset=True)
        assert wanted.items() <= given.items()
        assert given["status"] == "completed"
        assert given["call_id"]


async def test_a_call_that_does_not_fit_its_item_is_text(saying: Saying) -> None:
    async with saying(written("shell", timeout_ms="9")) as client:
        response, _ = await both(client, tools=[{"type": "shell"}])
    (item,) = response.output
    assert item.type == "message"
    assert json.loads(item.content[0].text) == {"timeout_ms": 9}


async def test_a_function_that_the_model_made_up_is_reported_as_it_was_called(saying: Saying) -> None:
    async with saying(written("fly", height="3")) as client:
        response, _ = await both(client, tools=[FILES])
    (call,) = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "fly", None)


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}], ids=str)
async def test_a_custom_tool_that_is_demanded_obeys_its_grammar(thinking: AsyncOpenAI, choice: Any) -> None:
    patch = "*** Begin Patch\n*** Delete File: a.py\n*** End Patch"
    definition = f"start: {json.dumps(patch)}"
    tool = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    request = {"max_output_tokens": 200, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    response, events = await both(thinking, **request)
    (call,) = response.output
    assert (call.type, call.input, response.status) == ("custom_tool_call", patch, "completed")
    assert events[-2].item.input == patch


async def test_a_custom_tool_that_is_demanded_matches_its_regular_expression(thinking: AsyncOpenAI) -> None:
    request: Any = {**GREEDY, **QUICK, "max_output_tokens": 200, "tools": [PATCH], "tool_choice": "required"}
    response = await thinking.responses.create(**request, parallel_tool_calls=False)
    (call,) = response.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(PATCH["format"]["definition"], call.input)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "read"}], ids=str)
async def test_a_tool_of_a_namespace_is_called_by_both_of_its_names(
    thinking: AsyncOpenAI, choice: Any
) -> None:
    request = {**GREEDY, **QUICK, "max_output_tokens": 200, "tools": [FILES], "parallel_tool_calls": False}
    response = await thinking.responses.create(**request, tool_choice=choice)
    (call,) = response.output
    assert call.type == "function_call"
    assert (call.name, call.namespace, call.arguments) == ("read", "mcp__files", '{"all": true}')
    stream = await thinking.responses.create(**request, tool_choice=choice, stream=True)
    items = [event.item async for event in stream if event.type == "response.output_item.done"]
    (item,) = items
    assert item.type == "function_call"
    assert (item.name, item.namespace) == ("read", "mcp__files")


async def test_calls_of_the_history_go_by_the_names_that_the_model_was_given(
    thinking_http: httpx2.AsyncClient,
) -> None:
    items: Any = [
        {"role": "user", "content": "Read."},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "read",
            "namespace": "mcp__files",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "too"},
        {"role": "user", "content": "And now?"},
    ]
    functions = [
        {"name": "mcp__files__read", "arguments": "{}"},
        {"name": "apply_patch", "arguments": '{"input": "+a"}'},
    ]
    messages: Any = [SAME[0], items[0]]
    for function, result in zip(functions, ("done", "too"), strict=True):
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": result},
        ]
    messages.append(items[-1])
    reported = (await thinking_http.post("/v1/responses", json={**GREEDY, "input": items})).json()
    chat = {"messages": messages, "max_tokens": 24, "temperature": 0}
    same = (await thinking_http.post("/v1/chat/completions", json=chat)).json()
    assert reported["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert reported["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["reasoning"]


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_offered(thinking_http: httpx2.AsyncClient, mode: str) -> None:
    allowed = [{"type": "function", "name": "turn"}, {"type": "image_generation"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    request = {**GREEDY, **QUICK, "max_output_tokens": 200, "parallel_tool_calls": False}
    some = {**request, "tools": [*TOOLS, FILES], "tool_choice": choice}
    reported = (await thinking_http.post("/v1/responses", json=some)).json()
    alone = {**request, "tools": TOOLS, "tool_choice": mode}
    same = (await thinking_http.post("/v1/responses", json=alone)).json()
    assert reported["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    assert reported["tool_choice"] == choice
    if mode == "required":
        assert [item["name"] for item in reported["output"]] == ["turn"]


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
    reported = (await thinking_http.post("/v1/responses", json={**GREEDY, "input": items})).json()
    chat = {"messages": messages, "max_tokens": 24, "temperature": 0}
    same = (await thinking_http.post("/v1/chat/completions", json=chat)).json()
    assert reported["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert reported["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["reasoning"]


@pytest.mark.parametrize(
    "changes",
    [
        {"input": []},
        {"input": [{"content": "a"}]},
        {"input": [{"role": "user", "content": [{"text": "a"}]}]},
        {"input": [{"type": "message", "content": "a"}]},
        {"input": [{"type": "function_call", "arguments": "{}"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
        {"background": True},
        {"metadata": {"a" * 65: "b"}},
        {"top_logprobs": 21},
        {"max_output_tokens": 0},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "image_generation"}, "tools": TOOLS},
        {"tool_choice": {"type": "custom", "name": "turn"}, "tools": TOOLS},
        {"tool_choice": {"type": "function", "name": "turn", "namespace": "n"}, "tools": TOOLS},
        {"tools": [{"type": "namespace", "tools": []}]},
        {"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]},
        {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}]},
        {
            "tools": [
                {
                    "type": "custom",
                    "name": "a",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: nothing"},
                }
            ],
            "tool_choice": "required",
        },
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        {"temperature": -1},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
async def test_what_cannot_be_served_is_refused(openai: AsyncOpenAI, changes: Any) -> None:
    with pytest.raises(sdk.BadRequestError):
        await openai.responses.create(**{**GREEDY, **changes})


async def test_what_clients_ask_for_is_accepted_and_repeated(saying: Saying) -> None:
    """With what Codex sends, and more of the documented fields."""
    asked = {
        "store": True,
        "metadata": {"a": "b"},
        "truncation": "auto",
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "service_tier": "flex",
        "prompt_cache_key": "key",
        "safety_identifier": "s",
        "user": "u",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": "none", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "top_logprobs": 2,
        "background": False,
        "stream_options": {"include_obfuscation": False},
        "tools": [*TOOLS, PATCH, FILES],
    }
    async with saying("Yes.") as client:
        stream = {**asked, "extra_body": {"stream_options": asked.pop("stream_options")}}
        response, events = await both(client, **{**stream, **asked})
    last = events[-1].response
    for reported in (response, events[0].response, last):
        given = reported.model_dump()
        kept = ("metadata", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user", "top_logprobs")
        assert {name: given[name] for name in kept} == {name: asked[name] for name in kept}
        assert (reported.truncation, reported.service_tier, reported.parallel_tool_calls) == (
            "disabled",
            "default",
            False,
        )
        assert (reported.text.verbosity, reported.reasoning.effort) == ("low", "none")
        assert [tool.type for tool in reported.tools] == ["function", "custom", "namespace"]
    assert events[0].response.usage is None
    assert (last.usage.input_tokens, last.usage.input_tokens_details.cached_tokens) == (5, 2)
    assert (last.usage.output_tokens, last.usage.total_tokens) == (9, 14)
    assert last.completed_at >= last.created_at


async def test_a_sealed_thought_takes_the_place_of_its_text(
    thinking: AsyncOpenAI, thinking_http: httpx2.AsyncClient
) -> None:
    """Codex sends thoughts back without their text."""
    asked: Any = {**GREEDY, "include": ["reasoning.encrypted_content"]}
    response = await thinking.responses.create(**asked)
    (thought,) = response.output
    assert thought.type == "reasoning"
    assert thought.content
    events = [event async for event in await thinking.responses.create(**asked, stream=True)]
    (streamed,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert streamed.model_dump(exclude={"id"}) == thought.model_dump(exclude={"id"})
    call: Any = {"type": "function_call", "call_id": "c", "name": "turn", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "done"}
    sizes = []
    for given in (
        {"encrypted_content": thought.encrypted_content},
        {"content": [thought.content[0].to_dict()]},
        {},
    ):
        items = [SAME[1], {"type": "reasoning", "summary": [], **given}, call, result]
        reported = (await thinking_http.post("/v1/responses", json={**GREEDY, "input": items})).json()
        sizes.append(reported["usage"]["input_tokens"])
    assert sizes[0] == sizes[1] > sizes[2]


async def test_the_tokens_of_an_input_are_counted(thinking: AsyncOpenAI) -> None:
    asked: Any = {name: GREEDY[name] for name in ("model", "instructions", "input")}
    asked |= {"tools": [*TOOLS, PATCH, FILES], **QUICK}
    count = await thinking.responses.input_tokens.count(**asked)
    response = await thinking.responses.create(**asked, max_output_tokens=1)
    assert response.usage is not None
    assert count.input_tokens == response.usage.input_tokens


async def test_what_would_need_a_memory_is_not_found(openai: AsyncOpenAI) -> None:
    asked: Any = {"model": "demo", "input": "hi"}
    calls: Any = [
        openai.responses.retrieve("resp_1"),
        openai.responses.delete("resp_1"),
        openai.responses.cancel("resp_1"),
        openai.responses.input_items.list("resp_1"),
        openai.responses.compact(**asked),
    ]
    for call in calls:
        with pytest.raises(sdk.NotFoundError, match=r"not kept|not compacted"):
            await call


async def test_an_error_in_the_middle_is_the_last_event(connect: Connect, local_client: LocalClient) -> None:
    client = Scripted(local_client, Started(1, 0, 1), Failed(1, GenerationFault("NaN logits")))
    async with connect(client) as http:
        official = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http, max_retries=0)
        events = [event async for event in await official.responses.create(**GREEDY, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "NaN logits")
    EVENT.validate_json(last.to_json(), strict=True)
