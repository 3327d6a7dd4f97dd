"""Tools of chats: custom ones are called with a text, and a choice leaves the tools that it means."""

import json
from typing import Any

import httpx2
import openai as sdk
import pytest
from openai import AsyncOpenAI

from http_serving import Saying, events_of, written

FUNCTION: Any = {
    "type": "function",
    "function": {
        "name": "turn",
        "parameters": {"type": "object", "properties": {"left": {"enum": [True]}}, "required": ["left"]},
    },
}
PATCH = "*** Begin Patch\n*** Delete File: ä.py\n*** End Patch"
GRAMMAR: Any = {"syntax": "lark", "definition": f"start: {json.dumps(PATCH)}"}
CUSTOM: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
ASKED: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Go."}],
    "tools": [FUNCTION, CUSTOM],
    "temperature": 0,
    "max_tokens": 200,
    "extra_body": {"enable_thinking": False},
}
NAMED: Any = {"type": "custom", "custom": {"name": "apply_patch"}}


def allowed(mode: str, *tools: Any) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_a_custom_tool_is_called_with_a_text(saying: Saying) -> None:
    async with saying(f"Now.\n\n{written('apply_patch', input=PATCH)}") as client:
        completion = await client.chat.completions.create(**ASKED)
        raw = await client.chat.completions.with_raw_response.create(**ASKED, stream=True)
        chunks = events_of((await raw.http_response.aread()).decode())
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("apply_patch", PATCH)
    deltas = [delta for chunk in chunks[:-1] for delta in chunk["choices"][0]["delta"].get("tool_calls", ())]
    first, *rest = deltas
    assert first | {"id": ""} == {
        "index": 0,
        "id": "",
        **NAMED,
        "custom": {"name": "apply_patch", "input": ""},
    }
    assert len(rest) > 3
    assert all(delta == {"index": 0, "custom": {"input": delta["custom"]["input"]}} for delta in rest)
    assert "".join(delta["custom"]["input"] for delta in rest) == PATCH


async def test_an_input_under_another_name_comes_at_the_end(saying: Saying) -> None:
    async with saying(written("apply_patch", patch=PATCH)) as client:
        completion = await client.chat.completions.create(**ASKED)
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert call.custom.input == PATCH


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("choice", [NAMED, allowed("required", NAMED)], ids=["named", "allowed"])
async def test_a_demanded_input_obeys_its_grammar(thinking: AsyncOpenAI, choice: Any) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    completion = await thinking.chat.completions.create(**asked)
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert call.custom.input == PATCH


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_offered(thinking: AsyncOpenAI, mode: str) -> None:
    named = {"type": "function", "function": {"name": "turn"}}
    asked = {**ASKED, "parallel_tool_calls": False}
    some = await thinking.chat.completions.create(**{**asked, "tool_choice": allowed(mode, named)})
    alone = await thinking.chat.completions.create(**{**asked, "tools": [FUNCTION], "tool_choice": mode})
    assert some.usage is not None
    assert alone.usage is not None
    assert some.usage.prompt_tokens == alone.usage.prompt_tokens
    assert some.choices[0].message.content == alone.choices[0].message.content
    calls = [call.to_dict() for call in some.choices[0].message.tool_calls or ()]
    assert len(calls) == (mode == "required")


async def test_a_custom_tool_is_shown_as_the_function_that_stands_for_it(
    thinking_http: httpx2.AsyncClient,
) -> None:
    text = {
        "type": "string",
        "description": "The whole input of the tool, as plain text. It has to match this Lark grammar.",
        "x-lark": GRAMMAR["definition"],
    }
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"name": "apply_patch", "description": "Edits files.", "parameters": parameters}
    sizes = []
    for tool in (CUSTOM, {"type": "function", "function": function}):
        body = {"messages": ASKED["messages"], "tools": [tool], "max_tokens": 1}
        reported = (await thinking_http.post("/v1/chat/completions", json=body)).json()
        sizes.append(reported["usage"]["prompt_tokens"])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [{"type": "custom", "custom": {}}]},
        {"tools": [{"type": "custom", "custom": {"name": "a b"}}]},
        {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
        {"tools": [CUSTOM, CUSTOM]},
        {"tools": [CUSTOM, {"type": "function", "function": {"name": "apply_patch"}}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "custom", "custom": {"name": "turn"}}},
        {"tool_choice": {"type": "custom", "function": {"name": "turn"}}},
        {"tool_choice": {"type": "function", "function": {"name": "apply_patch"}}},
        {"tool_choice": allowed("auto", {"type": "function", "function": {"name": "other"}})},
        {"tool_choice": allowed("required")},
    ],
    ids=lambda changes: json.dumps(changes)[:70],
)
async def test_what_cannot_be_offered_or_chosen_is_refused(thinking: AsyncOpenAI, changes: Any) -> None:
    with pytest.raises(sdk.BadRequestError, match="tool"):
        await thinking.chat.completions.create(**{**ASKED, **changes})


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (
            {"type": "web_search"},
            r"tools\[0\]: tools of type 'web_search' are not offered here: leave it out",
        ),
        (
            {"type": "function", "name": "turn", "parameters": {}},
            r"tools\[0\]: .* belong into an object function",
        ),
        ({"type": "x" * 999}, r"tools of type 'x{9,99}\.\.\.x+'"),
    ],
    ids=["of a server", "of responses", "long"],
)
async def test_a_tool_in_another_form_is_refused_by_a_sentence(
    thinking: AsyncOpenAI, tool: Any, message: str
) -> None:
    with pytest.raises(sdk.BadRequestError, match=message) as refused:
        await thinking.chat.completions.create(**{**ASKED, "tools": [tool]})
    assert "Field required" not in str(refused.value)


async def test_a_choice_of_an_unknown_tool_is_refused_by_its_name(thinking: AsyncOpenAI) -> None:
    choice = {"type": "function", "function": {"name": "elsewhere"}}
    with pytest.raises(sdk.BadRequestError, match="function 'elsewhere' is not among tools"):
        await thinking.chat.completions.create(**{**ASKED, "tool_choice": choice})
