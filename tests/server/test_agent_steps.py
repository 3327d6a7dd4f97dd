"""The server takes each step that `tools/agents` demands, whatever the bundled model would rather say."""

import json
from typing import Any

import httpx2
import pytest

from tools.agents.steps import Call, CustomCall, Say, Step, demanded

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
READ = Call(
    "Read", {"file_path": '/work/a "b"/ä.txt', "limit": 5, "deep": {"all": True}, "text": "a = 1\n\nb\n"}
)
PATCH = CustomCall(
    "apply_patch", "*** Begin Patch\n*** Update File: a.txt\n@@\n-(a) [b]\n+a\\b\n*** End Patch"
)


def taken(path: str, body: Any) -> Step:
    """The step that an answer takes."""
    if path == "/v1/messages":
        block = next(block for block in body["content"] if block["type"] != "thinking")
        return Call(block["name"], block["input"]) if block["type"] == "tool_use" else said(block["text"])
    if path == "/v1/chat/completions":
        message = body["choices"][0]["message"]
        if not message.get("tool_calls"):
            return said(message["content"])
        function = message["tool_calls"][0]["function"]
        return Call(function["name"], json.loads(function["arguments"]))
    item = next(item for item in body["output"] if item["type"] != "reasoning")
    if item["type"] == "message":
        return said(item["content"][0]["text"])
    if item["type"] == "custom_tool_call":
        return CustomCall(item["name"], item["input"])
    return Call(item["name"], json.loads(item["arguments"]), item.get("namespace"))


def said(text: str) -> Say:
    return Say(json.loads(text)["said"])


@pytest.mark.sharded(4)
@pytest.mark.parametrize(
    ("path", "step"),
    [
        *((path, step) for path in PATHS for step in (READ, Say("It is “green”."))),
        ("/v1/responses", Call("lookup", {"topic": "doors"}, namespace="mcp__notes")),
        ("/v1/responses", PATCH),
    ],
)
async def test_a_step_is_taken(thinking_http: httpx2.AsyncClient, path: str, step: Step) -> None:
    response = await thinking_http.post(path, json=demanded(path, {"model": "demo"}, step))
    assert response.status_code == 200, response.text
    assert taken(path, response.json()) == step
