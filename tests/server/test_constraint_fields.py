"""Constraints under every server's name are obeyed or refused, on chats and completions."""

import json
import re
from typing import Any

import httpx2
import pytest

from coldstream.server.http.constraint_fields import ConstraintFields
from coldstream.server.http.problems import ProblemError
from coldstream.server.local_client import LocalClient

CHAT = "/v1/chat/completions"
PATHS = ("/v1/completions", CHAT)
SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
GBNF = 'root ::= word (" " word){1,2} # two or three\nword ::= [a-c]{1,4}\n'
LARK = 'start: WORD " " WORD\nWORD: /[a-c]{1,4}/\n'
WORDS = r"[a-c]{1,4}( [a-c]{1,4}){1,2}"


def is_point(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"n"} and 1 <= value["n"] <= 99


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) is not None


CASES: list[tuple[dict[str, Any], Any]] = [
    ({"grammar": GBNF}, matches(WORDS)),
    ({"grammar": LARK}, matches(WORDS)),
    ({"json_schema": SCHEMA}, is_point),
    ({"json_schema": json.dumps(SCHEMA)}, is_point),
    ({"guided_json": SCHEMA}, is_point),
    ({"guided_json": json.dumps(SCHEMA)}, is_point),
    ({"guided_regex": r"v\d{2}"}, matches(r"v\d{2}")),
    ({"guided_choice": ["yes", 'no "really"']}, matches('yes|no "really"')),
    ({"guided_grammar": GBNF}, matches(WORDS)),
    ({"guided_grammar": LARK}, matches(WORDS)),
    ({"structured_outputs": {"json": SCHEMA}}, is_point),
    ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
    ({"structured_outputs": {"regex": "[xy]{3}"}}, matches("[xy]{3}")),
    ({"structured_outputs": {"choice": ["left", "right"]}}, matches("left|right")),
    ({"structured_outputs": {"grammar": GBNF}}, matches(WORDS)),
    ({"regex": "[xy]{3}"}, matches("[xy]{3}")),
    ({"ebnf": GBNF}, matches(WORDS)),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, is_point),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_point),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"response_format": {"type": "regex", "regex": "[xy]{3}"}}, matches("[xy]{3}")),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, matches(WORDS)),
    ({"guided_json": None, "grammar": "", "response_format": {"type": "text"}, "regex": "z"}, matches("z")),
]


async def answered(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> str:
    body = {"temperature": 0.8, "seed": 3, "max_tokens": 300, **body}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "import os"}]
    else:
        body["prompt"] = "import os\n"
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.sharded(9)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "fits"), CASES)
async def test_a_constraint_is_obeyed(http: httpx2.AsyncClient, path: str, fields: Any, fits: Any) -> None:
    assert fits(await answered(http, path, fields))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": "root ::= other"}, "grammar (gbnf): Rule 'other' not found"),
        ({"grammar": 'start: "a'}, "grammar (lark)"),
        ({"grammar": {"type": "json"}}, "grammar"),
        ({"grammar": GBNF, "grammar_lazy": True}, "grammar_lazy"),
        ({"json_schema": "{"}, "the schema is not JSON"),
        ({"json_schema": {"uniqueItems": True}}, "#: uniqueItems cannot be held"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"type": "strin"}}, "type 'strin' is not one of"),
        ({"guided_regex": "("}, "grammar (regex)"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice: not together with guided_regex"),
        ({"guided_json": True, "response_format": {"type": "json_object"}}, "not together with"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "not together with structured_outputs.regex",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not served"),
        ({"structural_tag": "{}"}, "structural_tag: not served"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "structural_tag is not served"),
        ({"response_format": {"type": "json_schema"}}, "json_schema needs a schema"),
        ({"response_format": {"type": "lark"}}, "response_format.type"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}}, "grammar (json_schema)"),
    ],
)
async def test_a_constraint_that_cannot_be_obeyed_is_refused(
    http: httpx2.AsyncClient, path: str, fields: Any, said: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 4, **fields}
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    names = [name for name in fields if name in message]
    assert said in message or any(said.startswith(name) for name in names), message


async def test_blanks_between_tokens_are_those_that_were_asked_for(http: httpx2.AsyncClient) -> None:
    for fields in (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[~]{2}"},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[~]{2}"}},
    ):
        text = await answered(http, CHAT, {**fields, "logit_bias": {"93": 100}})
        assert is_point(text.replace("~", ""))


def test_nothing_is_no_constraint() -> None:
    assert ConstraintFields().constraint is None
    assert (
        ConstraintFields.model_validate({"structured_outputs": {}, "guided_grammar": ""}).constraint is None
    )


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(ProblemError, match="nested too deeply"):
        _ = ConstraintFields(guided_json=deep).constraint


# --- with tools ------------------------------------------------------------------------------------------

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "go", "parameters": {"properties": {"n": {"enum": [7]}}, "required": ["n"]}},
    }
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("first", ["<", "{"])
@pytest.mark.parametrize("thinks", [True, False])
async def test_tools_and_a_format_give_a_call_or_text_of_the_format(
    thinking_http: httpx2.AsyncClient, local_client: LocalClient, thinks: bool, first: str
) -> None:
    (token_id,) = local_client.model.tokenizer.encode(first)
    body = {
        "messages": [{"role": "user", "content": "import os"}],
        "tools": TOOLS,
        "response_format": FORMAT,
        "logit_bias": {str(token_id): 100},
        "max_tokens": 200,
        "parallel_tool_calls": False,
        **({"thinking_budget": 3} if thinks else {"enable_thinking": False}),
    }
    response = await thinking_http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    assert bool(message.get("reasoning")) is thinks
    if first == "<":
        assert choice["finish_reason"] == "tool_calls"
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"n": 7}]
        assert not message["content"]
    else:
        assert choice["finish_reason"] == "stop"
        assert is_point(message["content"])


async def test_a_demanded_call_goes_before_the_format(thinking_http: httpx2.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "import os"}],
        "tools": TOOLS,
        "response_format": FORMAT,
        "tool_choice": "required",
        "enable_thinking": False,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    (choice,) = (await thinking_http.post(CHAT, json=body)).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["go"]
