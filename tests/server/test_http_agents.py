"""Requests as coding agents send them, with fields that mean nothing here and long instructions."""

from typing import Any

import httpx2
import pytest

from http_serving import events_of

LONG = "You are a coding agent. Follow the rules. " * 20
CLAUDE_CODE: Any = {
    "model": "demo",
    "max_tokens": 32000,
    "stream": True,
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=cli; cch=36ee5;",
        },
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
                {"type": "text", "text": "import os", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
CODEX: Any = {
    "model": "demo",
    "instructions": LONG,
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "import os"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "text": {"verbosity": "medium"},
}


# What follows in the next request, after the tool has run.
CLAUDE_CODE_TURN: Any = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look at it.", "signature": "c2ln"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_02", "name": "Bash", "input": {"command": "cat a"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.py", "is_error": False},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_02",
                "content": [{"type": "text", "text": "cat: a: No such file"}],
                "is_error": True,
                "cache_control": {"type": "ephemeral"},
            },
            {"type": "text", "text": "<system-reminder>Use the list of tasks.</system-reminder>"},
        ],
    },
]
CODEX_TURN: Any = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "Z0FBQQ=="},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "I look."}],
    },
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.py\n"},
]


@pytest.mark.sharded(3, of="agents")
async def test_claude_code_goes_on_after_its_tools_have_run(thinking_http: httpx2.AsyncClient) -> None:
    body = {**CLAUDE_CODE, "messages": CLAUDE_CODE["messages"] + CLAUDE_CODE_TURN, "max_tokens": 16}
    response = await thinking_http.post("/v1/messages?beta=true", json=body)
    assert response.status_code == 200
    assert events_of(response.text)[-1]["type"] == "message_stop"
    longer, shorter = [
        (await thinking_http.post("/v1/messages/count_tokens", json=counted)).json()["input_tokens"]
        for counted in (
            {"messages": each, "tools": body["tools"]} for each in (body["messages"], CLAUDE_CODE["messages"])
        )
    ]
    assert longer > shorter + 20


@pytest.mark.sharded(3, of="agents")
async def test_codex_goes_on_after_its_tools_have_run(thinking_http: httpx2.AsyncClient) -> None:
    bodies = [{**CODEX, "input": CODEX["input"] + more, "max_output_tokens": 16} for more in ([], CODEX_TURN)]
    first, second = [await thinking_http.post("/v1/responses", json=each) for each in bodies]
    assert second.status_code == 200
    usages = [events_of(each.text)[-1]["response"]["usage"]["input_tokens"] for each in (first, second)]
    assert usages[1] > usages[0] + 20


@pytest.mark.sharded(3, of="agents")
async def test_the_request_of_claude_code_is_served(thinking_http: httpx2.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}
    response = await thinking_http.post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=headers)
    assert response.status_code == 200
    kinds = [event["type"] for event in events_of(response.text)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools")}
    assert (await thinking_http.post("/v1/messages/count_tokens?beta=true", json=counted)).status_code == 200


@pytest.mark.sharded(3, of="agents")
async def test_the_request_of_codex_is_served(thinking_http: httpx2.AsyncClient) -> None:
    response = await thinking_http.post("/v1/responses", json=CODEX, headers={"originator": "codex_cli_rs"})
    assert response.status_code == 200
    kinds = [event["type"] for event in events_of(response.text)]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
