"""Tools of the responses API as functions: each has a name of its own that leads back to it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.server.http.chat_tools import Tool
from coldstream.server.http.client_tools import CLIENT_TOOLS
from coldstream.server.http.problems import ProblemError
from coldstream.server.http.responses_tools import FlatTool, OfferedTools

FUNCTION: Any = {
    "type": "function",
    "name": "read",
    "description": "Reads.",
    "parameters": {"type": "object"},
}


def offered(*tools: Any, loaded: Any = ()) -> OfferedTools:
    both = [[FlatTool.model_validate(tool) for tool in each] for each in (tools, loaded)]
    return OfferedTools(*both)


def namespace(name: str, *members: Any, **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [*members], **more}


def names(tools: OfferedTools) -> list[str]:
    return [tool.function["name"] for tool in tools.all]


NAMES = st.text("ab_ -ä", min_size=1, max_size=6) | st.sampled_from(
    ["x" * 130, "__", "n__f", "n__f_2", "f_2"]
)
FUNCTIONS = st.builds(
    lambda name: {**FUNCTION, "name": name}, st.from_regex(r"[abfn_2]{1,6}", fullmatch=True)
)
CUSTOM = st.builds(lambda tool: {"type": "custom", "name": tool["name"]}, FUNCTIONS)
MEMBERS = st.builds(
    lambda kind, name: {"type": kind, "name": name}, st.sampled_from(["function", "custom"]), NAMES
)
SPACES = st.builds(lambda name, members: namespace(name, *members), NAMES, st.lists(MEMBERS, max_size=3))
CLIENT = st.sampled_from([{"type": "local_shell"}, {"type": "apply_patch"}])


@given(st.lists(FUNCTIONS | CUSTOM | SPACES | CLIENT, max_size=6), st.lists(SPACES | FUNCTIONS, max_size=3))
def test_names_are_unique_fit_the_pattern_and_lead_back(tools: Any, loaded: Any) -> None:
    found = offered(*tools, loaded=loaded)
    assert len(set(names(found))) == len(names(found))
    for function in found.as_functions():
        Tool.model_validate(function)
    for tool in found.all:
        name = tool.function["name"]
        assert found.of(name) == tool
        assert found.function_name(tool.type, tool.name, tool.namespace) == name
    wanted = {
        (member["type"], space, member["name"])
        for tool in (*tools, *loaded)
        for space, member in (
            [(tool["name"], member) for member in tool["tools"]]
            if tool["type"] == "namespace"
            else [(None, {"name": tool["type"], **tool})]
        )
    }
    assert {tool.identity for tool in found.all} == wanted


@given(st.lists(FUNCTIONS | SPACES, max_size=4), st.lists(FUNCTIONS | SPACES, max_size=3))
def test_tools_that_come_later_rename_none(tools: Any, loaded: Any) -> None:
    before, after = names(offered(*tools)), names(offered(*tools, loaded=loaded))
    assert after[: len(before)] == before


def test_a_namespace_is_a_part_of_the_name_and_named_once() -> None:
    members = (FUNCTION, {**FUNCTION, "name": "write"}, {"type": "web_search"})
    found = offered(namespace("mcp__files__", *members, description="The disk."))
    assert names(found) == ["mcp__files__read", "mcp__files__write"]
    texts = [tool.function["description"] for tool in found.all]
    assert texts == ["Reads.\n\nAbout mcp__files__: The disk.", "Reads."]


def test_two_tools_that_would_share_a_name_get_two() -> None:
    plain = {**FUNCTION, "name": "a__read"}
    found = offered(namespace("a", FUNCTION), namespace("a_", FUNCTION), plain, {**plain, "type": "custom"})
    assert names(found) == ["a__read_2", "a__read_3", "a__read", "a__read_4"]
    assert found.function_name("function", "read", "a_") == "a__read_3"


def test_what_is_found_again_counts_once_and_too_many_are_refused() -> None:
    space = namespace("a", *({**FUNCTION, "name": f"f{i}"} for i in range(500)))
    assert len(offered(space, loaded=[space] * 7).all) == 500
    with pytest.raises(ProblemError, match="4500 with those of namespaces"):
        offered(space, loaded=[space] * 8)


def test_tools_of_other_servers_are_left_out() -> None:
    hosted = [
        {"type": "web_search"},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "image_generation"},
        {"type": "computer"},
        {"type": "tool_search"},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ]
    assert not offered(*hosted).all
    assert not offered(*hosted).shown


def test_tools_that_the_client_runs_are_offered() -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Looks.",
        "parameters": {"type": "object"},
    }
    found = offered({"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"}, search)
    assert names(found) == ["shell", "local_shell", "apply_patch", "tool_search"]
    assert found.all[-1].function == {
        "name": "tool_search",
        "description": "Looks.",
        "parameters": {"type": "object"},
    }


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "function", "name": "read"}, ["read"]),
        ({"type": "function", "name": "write"}, ["a__write"]),
        ({"type": "function", "name": "read", "namespace": "a"}, ["a__read"]),
        ({"type": "custom", "name": "patch"}, ["patch"]),
        ({"type": "namespace", "name": "a"}, ["a__read", "a__write"]),
        ({"type": "shell"}, ["shell"]),
    ],
    ids=str,
)
def test_a_choice_means_tools(choice: Any, chosen: list[str]) -> None:
    space = namespace("a", FUNCTION, {**FUNCTION, "name": "write"})
    found = offered(FUNCTION, space, {"type": "custom", "name": "patch"}, {"type": "shell"})
    assert [tool.function["name"] for tool in found.chosen(choice)] == chosen
    only = found.only(found.chosen(choice))
    assert names(only) == chosen
    assert only.function_name("function", "read", "a") == "a__read"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "other"},
        {"type": "custom", "name": "read"},
        {"type": "function", "name": "read", "namespace": "c"},
        {"type": "function", "name": "read"},  # in two namespaces
        {"type": "namespace", "name": "c"},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "x"},
        {"type": "apply_patch"},
    ],
    ids=str,
)
def test_a_choice_that_means_none_or_two_is_refused(choice: Any) -> None:
    found = offered(namespace("a", FUNCTION), namespace("b", FUNCTION), {"type": "web_search"})
    with pytest.raises(ProblemError, match="tool_choice"):
        found.chosen(choice)


@pytest.mark.parametrize(
    ("kind", "arguments", "fields"),
    [
        ("local_shell", {"command": ["ls"]}, {"action": {"type": "exec", "command": ["ls"], "env": {}}}),
        (
            "local_shell",
            {"command": "ls | wc", "timeout_ms": 5, "working_directory": "/"},
            {
                "action": {
                    "type": "exec",
                    "command": ["sh", "-c", "ls | wc"],
                    "env": {},
                    "working_directory": "/",
                    "timeout_ms": 5,
                }
            },
        ),
        ("local_shell", {"command": []}, None),
        ("local_shell", {"command": ["ls", 1]}, None),
        (
            "shell",
            {"commands": ["ls"], "timeout_ms": "soon"},
            {"action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}},
        ),
        ("shell", {}, None),
        (
            "apply_patch",
            {"type": "update_file", "path": "a", "diff": "+b"},
            {"operation": {"type": "update_file", "path": "a", "diff": "+b"}},
        ),
        (
            "apply_patch",
            {"type": "delete_file", "path": "a", "diff": ""},
            {"operation": {"type": "delete_file", "path": "a"}},
        ),
        ("apply_patch", {"type": "create_file", "path": "a"}, None),
        ("apply_patch", {"type": "move_file", "path": "a"}, None),
        ("tool_search", {"query": "q"}, {"arguments": {"query": "q"}, "execution": "client"}),
    ],
    ids=str,
)
def test_arguments_become_the_fields_of_an_item_if_they_fit(kind: str, arguments: Any, fields: Any) -> None:
    assert CLIENT_TOOLS[kind].fields(arguments) == fields


@pytest.mark.parametrize("kind", ["function", "custom"])
@pytest.mark.parametrize("name", ["", "my tool", "a\n", "a" * 129, "<tool_call>"])
def test_a_name_that_no_model_can_read_is_refused_by_itself(kind: str, name: str) -> None:
    with pytest.raises(ProblemError) as refusal:
        offered({"type": kind, "name": name})
    assert refusal.value.problem.param == "tools"
    assert str(refusal.value).startswith("tools: '")
