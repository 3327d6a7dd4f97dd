"""Answers are JSON in UTF-8, whatever the model wrote and the client sent."""

import json
from typing import Any

import httpx2
import pytest

from http_serving import Saying, events_of, written

HALF = '["a\\ud83d b"]'
MENDED = ["a\ufffd b"]
SCHEMA = {"type": "object"}
CUSTOM = {"type": "custom", "name": "patch"}
NO_THOUGHT = {"reasoning": {"effort": "none"}}
USER = {"role": "user", "content": "x"}

ASKED: Any = {
    "custom tool": ("/v1/responses", {"input": "x", "tools": [CUSTOM], **NO_THOUGHT}),
    "shell": ("/v1/responses", {"input": "x", "tools": [{"type": "shell"}], **NO_THOUGHT}),
    "function": (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", "name": "patch", "parameters": SCHEMA}], **NO_THOUGHT},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "tools": [{"type": "custom", "custom": {"name": "patch"}}],
            "reasoning_effort": "none",
        },
    ),
    "message": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 99, "tools": [{"name": "patch", "input_schema": SCHEMA}]},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", ASKED)
async def test_half_of_a_surrogate_pair_in_a_call_is_the_replacement_character(
    saying: Saying, asked: str, stream: bool
) -> None:
    path, body = ASKED[asked]
    call = written("shell", commands=HALF) if asked == "shell" else written("patch", value=HALF)
    async with saying(call) as client:
        answer = await client._client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200
    text = json.dumps(events_of(answer.text) if stream else answer.json(), ensure_ascii=False)
    assert MENDED[0] in text
    assert "ud83d" not in text
    assert '"response.failed"' not in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_half_of_a_surrogate_pair_in_an_earlier_call_is_read(
    thinking_http: httpx2.AsyncClient, path: str
) -> None:
    arguments = json.dumps({"a": "x\ud83d"})
    function = {"name": "f", "arguments": arguments}
    calls = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    items = [
        {"type": "function_call", "call_id": "c", **function},
        {"type": "mcp_call", "server_label": "s", **function},
    ]
    body: Any = {
        "/v1/chat/completions": {"messages": [USER, calls, USER], "max_tokens": 1},
        "/v1/responses": {"input": [USER, *items, USER], "max_output_tokens": 1},
    }
    answer = await thinking_http.post(path, json=body[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("stream", ["false", "true"])
async def test_numbers_beyond_json_are_echoed_as_null(
    thinking_http: httpx2.AsyncClient, number: str, stream: str
) -> None:
    tool = f'{{"type": "function", "name": "f", "parameters": {{"default": {number}}}}}'
    body = f'{{"input": "x", "stream": {stream}, "max_output_tokens": 1, "tools": [{tool}]}}'
    headers = {"Content-Type": "application/json"}
    answer = await thinking_http.post("/v1/responses", content=body.encode(), headers=headers)
    assert answer.status_code == 200
    response = events_of(answer.text)[-1]["response"] if stream == "true" else answer.json()
    assert response["tools"][0]["parameters"] == {"default": None}
