"""Anthropic's messages through its official client, over the same answers as OpenAI's chats."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic as sdk
import httpx2
import pytest
from anthropic import AsyncAnthropic

from coldstream.engine import LLM, SamplingParams
from http_serving import URL, Connect

USER: Any = {"role": "user", "content": "import os\nimport sys\n"}
RAW: Any = {
    "model": "demo",
    "system": "Write Python.",
    "messages": [USER],
    "max_tokens": 24,
    "temperature": 0,
}
# The official client has no field for the temperature any more, and passes it on as it is.
GREEDY: Any = {**RAW, "extra_body": {"temperature": 0}}
del GREEDY["temperature"]
SAME: Any = [{"role": "system", "content": "Write Python."}, USER]
TOOLS: Any = [
    {
        "name": "turn",
        "description": "Turn to a side.",
        "input_schema": {
            "type": "object",
            "properties": {
                "angle": {"type": "integer", "minimum": -90, "maximum": 90},
                "side": {"type": "string", "enum": ["left", "right"]},
            },
            "required": ["angle", "side"],
            "additionalProperties": False,
        },
    },
    {"name": "stop", "input_schema": {"type": "object", "properties": {}}},
]


def official(http: httpx2.AsyncClient, key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=URL, api_key=key, http_client=http, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def claude(http: httpx2.AsyncClient) -> AsyncAnthropic:
    return official(http)


@pytest.fixture
def thinking_claude(thinking_http: httpx2.AsyncClient) -> AsyncAnthropic:
    return official(thinking_http)


def texts_of(message: Any) -> list[tuple[str, str]]:
    """(kind, text) of each block, which are other classes in a stream's message."""
    return [(block.type, getattr(block, block.type)) for block in message.content]


def sse_events(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, value) of each event of a stream."""
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_an_answer_is_that_of_the_library(claude: AsyncAnthropic, llm: LLM) -> None:
    message = await claude.messages.create(**GREEDY)
    (expected,) = llm.chat(SAME, SamplingParams(temperature=0, max_tokens=24))
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason) == (expected.text, "max_tokens")
    assert message.usage.output_tokens == 24
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == len(expected.prompt_token_ids)


async def test_a_stream_is_the_answer_and_its_events_are_in_order(
    claude: AsyncAnthropic, http: httpx2.AsyncClient
) -> None:
    whole = await claude.messages.create(**GREEDY)
    async with claude.messages.stream(**GREEDY) as stream:
        final = await stream.get_final_message()
    assert texts_of(final) == texts_of(whole)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == 24
    text = (await http.post("/v1/messages", json={**RAW, "stream": True})).text
    names = [name for name, value in sse_events(text) if name == value["type"]]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


async def test_a_stop_sequence_is_named(claude: AsyncAnthropic) -> None:
    message = await claude.messages.create(**{**GREEDY, "max_tokens": 200}, stop_sequences=["\n", "zzz"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")


async def test_a_schema_binds_the_answer(claude: AsyncAnthropic) -> None:
    schema: Any = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
    schema["additionalProperties"] = False
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    message = await claude.messages.create(**{**GREEDY, "max_tokens": 60, "output_config": config})
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["size"] in (1, 2)
    assert message.stop_reason == "end_turn"


async def test_a_call_that_is_demanded_comes_as_a_block_with_typed_input(
    thinking_claude: AsyncAnthropic,
) -> None:
    choice: Any = {"type": "tool", "name": "turn", "disable_parallel_tool_use": True}
    request = {**GREEDY, "max_tokens": 300, "tools": TOOLS, "tool_choice": choice}
    message = await thinking_claude.messages.create(**request)
    (block,) = message.content
    assert block.type == "tool_use"
    assert (block.name, message.stop_reason) == ("turn", "tool_use")
    assert block.input.keys() == {"angle", "side"}
    assert isinstance(block.input["angle"], int)
    async with thinking_claude.messages.stream(**request) as stream:
        (streamed,) = (await stream.get_final_message()).content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (block.name, block.input)


async def test_a_call_that_is_truncated_is_text(thinking_claude: AsyncAnthropic) -> None:
    choice: Any = {"type": "tool", "name": "turn"}
    for max_tokens in range(4, 40, 4):
        request = {**GREEDY, "max_tokens": max_tokens, "tools": TOOLS, "tool_choice": choice}
        message = await thinking_claude.messages.create(**request)
        if message.stop_reason == "tool_use":
            break
        assert message.stop_reason == "max_tokens"
        assert [block.type for block in message.content] == ["text"]
    assert max_tokens > 4


async def test_a_thought_is_a_block_before_the_text_and_keeps_to_its_budget(
    thinking_claude: AsyncAnthropic,
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 6}
    request = {**GREEDY, "max_tokens": 40, "thinking": thinking}
    message = await thinking_claude.messages.create(**request)
    assert [block.type for block in message.content] == ["thinking", "text"]
    async with thinking_claude.messages.stream(**request) as stream:
        assert texts_of(await stream.get_final_message()) == texts_of(message)
    plain = await thinking_claude.messages.create(**GREEDY)
    assert [block.type for block in plain.content] == ["text"]


async def test_count_tokens_is_what_the_answer_counts(thinking_claude: AsyncAnthropic) -> None:
    request = {**GREEDY, "tools": TOOLS}
    for _ in range(3):
        message = await thinking_claude.messages.create(**request)
    counted = await thinking_claude.messages.count_tokens(
        **{name: request[name] for name in ("model", "system", "messages", "tools")}
    )
    cached = message.usage.cache_read_input_tokens or 0
    assert cached > 0
    assert counted.input_tokens == message.usage.input_tokens + cached


async def test_history_is_that_of_a_chat_with_thoughts_calls_and_results(
    thinking_http: httpx2.AsyncClient,
) -> None:
    """What an agent sends back, with results of tools that nothing flattens, gives the chat's own prompt."""
    anthropic_history: Any = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "turn a bit", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Turning.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "toolu_1", "name": "turn", "input": {"angle": 5, "side": "left"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "done"}],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    function = {"name": "turn", "arguments": '{"angle": 5, "side": "left"}'}
    chat_history: Any = [
        *SAME,
        {
            "role": "assistant",
            "content": "Turning.",
            "reasoning": "turn a bit",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "done"},
        {"role": "user", "content": "And now?"},
    ]
    asked = {**RAW, "messages": anthropic_history, "thinking": {"type": "adaptive"}}
    counted = (await thinking_http.post("/v1/messages/count_tokens", json=asked)).json()
    chat = {"messages": chat_history, "max_tokens": 1, "temperature": 0, "enable_thinking": True}
    reported = (await thinking_http.post("/v1/chat/completions", json=chat)).json()
    assert counted["input_tokens"] == reported["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": 5}]}]},
        {"messages": [{"role": "user", "content": ["a"]}]},
        {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
            ]
        },
        {"output_config": {"effort": "frantic"}},
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
            ]
        },
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, USER]},
        {"max_tokens": 0},
        {"extra_body": {"temperature": 1.5}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool"}, "tools": TOOLS},
        {"tool_choice": {"type": "tool", "name": "fly"}, "tools": TOOLS},
        {"thinking": {"type": "always"}},
        {"stop_sequences": [""]},
        {"system": [{"text": "a"}]},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
async def test_what_cannot_be_served_is_refused_in_anthropics_shape(
    claude: AsyncAnthropic, changes: dict[str, Any]
) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await claude.messages.create(**{**GREEDY, **changes})
    assert refused.value.body["error"].keys() == {"type", "message"}  # type: ignore[index]
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "mcp_toolset", "function"])
async def test_a_tool_without_a_schema_is_refused_by_a_sentence(claude: AsyncAnthropic, kind: str) -> None:
    """Anthropic's models know these by their type alone, and some run on its servers."""
    tools: Any = [*TOOLS, {"type": kind, "name": "any"}]
    said = rf"tools\[{len(TOOLS)}\]: tools of type '{kind}' are not offered here: leave it out"
    with pytest.raises(sdk.BadRequestError, match=said) as refused:
        await claude.messages.create(**{**GREEDY, "tools": tools})
    assert "input_schema: Field required" not in str(refused.value)


async def test_errors_are_the_official_clients_own(claude: AsyncAnthropic, connect: Connect) -> None:
    with pytest.raises(sdk.NotFoundError):
        await claude.messages.create(**{**GREEDY, "model": "claude-opus"})
    too_long: Any = [{"role": "user", "content": "x = 1\n" * 4000}]
    with pytest.raises(sdk.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
        await claude.messages.create(**{**GREEDY, "messages": too_long})
    with pytest.raises(sdk.BadRequestError, match="prompt is too long"):
        await claude.messages.count_tokens(model="demo", messages=too_long)
    async with connect(api_keys=("secret",)) as http:
        with pytest.raises(sdk.AuthenticationError):
            await official(http, "wrong").messages.create(**GREEDY)
        assert (await official(http, "secret").messages.create(**GREEDY)).role == "assistant"


async def test_models_have_the_fields_of_the_api_that_asks(
    claude: AsyncAnthropic, http: httpx2.AsyncClient
) -> None:
    (model,) = (await claude.models.list()).data
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("demo", "model", "demo", "active")
    assert await claude.models.retrieve("demo") == model
    listed = (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("demo", "demo", False)
    assert model.created_at.timestamp() == (await http.get("/v1/models/demo")).json()["created"]
