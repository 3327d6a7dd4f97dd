"""Items of the responses API as messages: every documented type is read or replaced, and none is an error."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NotRequired, Required, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._types import SequenceNotStr
from openai.types.responses import ResponseInputItemParam
from typing_extensions import get_type_hints, is_typeddict

from coldstream.server.http.problems import ProblemError
from coldstream.server.http.responses_history import Item, messages_of, sealed, tools_in
from coldstream.server.http.responses_tools import OfferedTools

NONE = OfferedTools([])
USER: Any = {"role": "user", "content": "hi"}
AFTER: Any = {"role": "user", "content": "go on"}


def messages(*items: Any, tools: OfferedTools = NONE) -> list[dict[str, Any]]:
    return list(messages_of([Item.model_validate(item) for item in items], tools))


def example(kind: Any, depth: int = 0) -> Any:
    """A value of a type of the official client's parameters, with its required fields alone."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired):
        return example(members[0], depth)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = [name for name, hint in hints.items() if get_origin(hint) is Required or name == "type"]
        return {name: example(hints[name], depth + 1) for name in needed}
    if origin is Literal:
        return members[0]
    if origin is dict:
        return {}
    if origin in (list, Iterable, SequenceNotStr):
        return [example(members[0], depth + 1)] if depth < 4 else []
    if members:  # a union
        return example(next((each for each in members if is_typeddict(each)), members[0]), depth)
    return {str: "text of it", bool: True, int: 1, float: 1.0, object: {}}.get(kind)


def documented() -> Iterator[Any]:
    for kind in get_args(ResponseInputItemParam):
        yield pytest.param(example(kind), id=kind.__name__)


@pytest.mark.parametrize("item", documented())
def test_every_documented_item_is_read_or_replaced(item: Any) -> None:
    """A type that a later client brings shows here, as the placeholder of an unknown one."""
    reported = messages(USER, item, AFTER)
    assert reported[0] == USER
    assert reported[-1] == AFTER
    said = [message["content"] for message in reported[1:-1] if "content" in message]
    assert not any("cannot read" in text for text in said), said


def test_an_item_of_an_unknown_type_is_a_placeholder() -> None:
    (_, placeholder, _) = messages(USER, {"type": "telepathy_call", "thought": {}}, AFTER)
    assert placeholder["role"] == "user"
    assert "cannot read" in placeholder["content"]


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "moon"}},
            '[called web_search with {"type": "search", "query": "moon"}]',
        ),
        (
            {
                "type": "file_search_call",
                "queries": ["q"],
                "results": [{"filename": "a.md", "text": "found it"}],
            },
            '[called file_search with ["q"]]\na.md: found it',
        ),
        (
            {
                "type": "code_interpreter_call",
                "code": "1+1",
                "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "x"}],
            },
            '[called code_interpreter with "1+1"]\n2',
        ),
        (
            {"type": "image_generation_call", "result": "aGk=", "revised_prompt": "a cat"},
            '[called image_generation with "a cat"]',
        ),
        (
            {"type": "mcp_call", "server_label": "wiki", "name": "ask", "arguments": "{}", "output": "yes"},
            "[called wiki.ask with {}]\nyes",
        ),
        (
            {"type": "mcp_approval_request", "server_label": "wiki", "name": "ask", "arguments": "{}"},
            "[asked whether wiki.ask may be called with {}]",
        ),
        (
            {"type": "computer_call", "action": {"type": "wait"}},
            '[called computer with {"type": "wait"}]',
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_what_other_servers_ran_is_shown_in_the_answer(item: Any, shown: str) -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    assert messages(USER, item, answer)[1:] == [{"role": "assistant", "content": f"{shown}\nSo."}]


@pytest.mark.parametrize(
    ("item", "content"),
    [
        ({"type": "function_call_output", "output": "plain"}, "plain"),
        ({"type": "function_call_output", "output": None}, ""),
        ({"type": "function_call_output", "output": {"content": "no", "success": False}}, "no"),
        (
            {
                "type": "function_call_output",
                "output": [
                    {"type": "input_text", "text": "attached"},
                    {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
                    {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="},
                ],
            },
            "attached\n[image left out: this model reads text only]"
            "\n[file a.pdf left out: this model reads text only]",
        ),
        ({"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "Done"}]}, "Done"),
        ({"type": "local_shell_call_output", "id": "c", "output": "a.py\n"}, "a.py\n"),
        (
            {
                "type": "shell_call_output",
                "output": [
                    {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}},
                    {"stdout": "", "stderr": "b", "outcome": {"type": "timeout"}},
                ],
            },
            "a\n[exit code 3]\nb\n[timeout]",
        ),
        ({"type": "shell_call_output", "output": [{"stdout": "a"}]}, "a"),
        ({"type": "apply_patch_call_output", "status": "failed"}, "[failed]"),
        ({"type": "apply_patch_call_output", "status": "completed", "output": "ok"}, "ok"),
        ({"type": "tool_search_output", "tools": []}, "[no tool found]"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_what_a_call_gave_is_a_message_of_the_tool(item: Any, content: str) -> None:
    reported = messages(USER, {"call_id": "c", **item}, AFTER)
    assert reported[1:-1] == [{"role": "tool", "tool_call_id": "c", "content": content}]


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "function_call", "name": "f", "arguments": '{"a": 1}'}, "f", {"a": 1}),
        (
            {"type": "custom_tool_call", "name": "patch", "input": '*** "x"\n'},
            "patch",
            {"input": '*** "x"\n'},
        ),
        (
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5},
            },
            "local_shell",
            {"command": ["ls"], "timeout_ms": 5},
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls", "pwd"], "max_output_length": 9}},
            "shell",
            {"commands": ["ls", "pwd"], "max_output_length": 9},
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
            "apply_patch",
            {"type": "delete_file", "path": "a"},
        ),
        ({"type": "tool_search_call", "arguments": {"query": "q"}}, "tool_search", {"query": "q"}),
        (
            {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": "{}"},
            "mcp__files__read",
            {},
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) and "type" in value else "",
)
def test_what_the_client_ran_is_a_call_of_the_answer(item: Any, name: str, arguments: Any) -> None:
    ((_, answer, _)) = messages(USER, {"call_id": "c", **item}, AFTER)
    (call,) = answer["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c", name)
    assert json.loads(call["function"]["arguments"]) == arguments


def test_calls_of_any_kind_that_follow_each_other_are_one_answer() -> None:
    reported = messages(
        USER,
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text} for text in ("plan", "more")],
            "encrypted_content": "x",
        },
        {"type": "web_search_call", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "p"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "1"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    )
    assert [message["role"] for message in reported] == [
        "user",
        "assistant",
        "tool",
        "tool",
        *["assistant"] * 2,
    ]
    assert reported[1]["reasoning_content"] == "plan\n\nmore"
    assert reported[1]["content"].startswith("[called web_search")
    assert [call["id"] for call in reported[1]["tool_calls"]] == ["c1", "c2"]


def test_a_thought_that_only_its_author_can_read_says_nothing() -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    answer = {"role": "assistant", "content": "Yes."}
    (_, with_thought) = messages(USER, hidden, answer)
    assert with_thought == {**answer, "reasoning_content": None}


@given(st.text(st.characters(codec="utf-8")))
def test_a_sealed_thought_is_read_again(thought: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed(thought)}
    (_, answer) = messages(USER, item)
    assert answer["reasoning_content"] == (thought or None)


@pytest.mark.parametrize("hidden", ["coldstream:%%", "coldstream:gAA=", "coldstream:////"])
def test_a_damaged_sealed_thought_gives_way_to_its_summary(hidden: str) -> None:
    summary = [{"type": "summary_text", "text": "plan"}]
    (_, answer) = messages(USER, {"type": "reasoning", "summary": summary, "encrypted_content": hidden})
    assert answer["reasoning_content"] == "plan"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "function_call", "arguments": "{}"}, "input[1].name"),
        ({"type": "custom_tool_call", "name": "", "input": ""}, "input[1].name"),
        ({"type": "message", "content": "a"}, "input[1].role"),
        ({"role": "critic", "content": "a"}, "input[1].role"),
        ({"role": "user", "content": [{"text": "a"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}] * 1025}, "input[1].content"),
    ],
    ids=["no name", "empty name", "no role", "other role", "part without a type", "too many parts"],
)
def test_what_a_message_or_call_cannot_do_without_is_named(item: Any, field: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        messages(USER, item)
    assert refusal.value.problem.status == 400
    assert refusal.value.problem.message.startswith(f"{field}:")


def test_items_bring_tools_of_their_own() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    added = {"type": "additional_tools", "role": "developer", "tools": [function]}
    found = {"type": "tool_search_output", "tools": [{"type": "namespace", "name": "n", "tools": [function]}]}
    items = [Item.model_validate(item) for item in (USER, added, found)]
    tools = OfferedTools([], tools_in(items))
    assert [tool.function["name"] for tool in tools.all] == ["f", "n__f"]
    (_, result) = messages_of(items, tools)
    assert result["content"] == "[found: n]"
    for wrong in (["f"], [function] * 513, {"type": "function"}):
        with pytest.raises(ProblemError, match=r"input\[0\].tools"):
            tools_in([Item.model_validate({**added, "tools": wrong})])
