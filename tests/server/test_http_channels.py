"""Answers of gpt-oss through the three interfaces: its channels are reasoning, content and calls there."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coldstream.engine.events import Delta, Started
from coldstream.engine.request import Piece, Statistics
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.tokenizer import MARKS, marked
from coldstream.server.local_client import LocalClient
from http_serving import Connect, Scripted, events_of

SOURCE = Path(__file__).parent.parent.joinpath("gguf", "harmony.jinja").read_text()
ANSWER = (
    "<|channel|>analysis<|message|>They want it.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I write it.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"path": "/a"}'
)
MARKED = re.sub(r"<\|\w+\|>", lambda match: marked(match[0]), ANSWER)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "write", "parameters": SCHEMA}
TOOL = {"name": "write", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Write it."}


class OnChannels(Scripted):
    """A model behind a template in the manner of gpt-oss, which gives one answer."""

    def __init__(self, client: LocalClient, text: str = MARKED) -> None:
        statistics = Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0)
        pieces = [Piece(text[i : i + 3], (1,)) for i in range(0, len(text), 3)]
        end = Piece("", finish_reason="stop", statistics=statistics)
        super().__init__(client, Started(1, 2, 5), *(Delta(1, 0, piece) for piece in (*pieces, end)))
        template = ChatTemplate(SOURCE, client.model.tokenizer.vocabulary.control_ids, {})
        self.model = replace(client.model, template_source=SOURCE, chat_template=template)
        self.params: list[Any] = []
        self.prompts: list[str] = []

    async def submit(self, submission: Any) -> Any:
        self.params.append(submission.request.params)
        ids = submission.request.prompt_token_ids
        self.prompts.append(self.model.tokenizer.decode(ids, skip_special=False))
        return await super().submit(submission)


@asynccontextmanager
async def answering(
    connect: Connect, client: LocalClient
) -> AsyncIterator[tuple[httpx2.AsyncClient, OnChannels]]:
    model = OnChannels(client)
    async with connect(model) as http:
        yield http, model
    model.model.chat_template.close()


async def test_a_chat_completion(connect: Connect, local_client: LocalClient) -> None:
    body = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}
    async with answering(connect, local_client) as (http, model):
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert model.params[0].marks_control_tokens
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("They want it.", "I write it.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("write", {"path": "/a"})


async def test_a_message(connect: Connect, local_client: LocalClient) -> None:
    body = {
        "messages": [USER],
        "max_tokens": 99,
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "model": "demo",
    }
    async with answering(connect, local_client) as (http, model):
        answer = (await http.post("/v1/messages", json=body)).json()
        thought = model.params[0].thought
    kinds = {block["type"]: block for block in answer["content"]}
    assert kinds["thinking"]["thinking"] == "They want it."
    assert kinds["text"]["text"] == "I write it."
    assert kinds["tool_use"]["input"] == {"path": "/a"}
    assert thought.forced == "<|end|><|start|>assistant<|channel|>final<|message|>"


async def test_a_response(connect: Connect, local_client: LocalClient) -> None:
    body = {
        "input": "Write it.",
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "high"},
    }
    async with answering(connect, local_client) as (http, model):
        answer = (await http.post("/v1/responses", json=body)).json()
        assert "Reasoning: high" in model.prompts[0]
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert answer["output"][2]["arguments"] == '{"path": "/a"}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "tools": [TOOL]}),
        ("/v1/responses", {"input": "Write it.", "tools": [{"type": "function", **FUNCTION}]}),
    ],
)  # fmt: skip
async def test_streams_hold_no_marks_and_no_tokens(
    connect: Connect, local_client: LocalClient, path: str, body: dict[str, Any]
) -> None:
    async with answering(connect, local_client) as (http, _):
        answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    text = json.dumps(events_of(answer.text), ensure_ascii=False)
    assert "write" in text
    assert not set(text) & set(MARKS)
    assert "<|" not in text


async def test_the_history_of_an_answer_is_accepted(connect: Connect, local_client: LocalClient) -> None:
    """A thought, a text and two calls in one message, which the template takes apart or refuses."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("write", "look"))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "I do.", "reasoning_content": "Both.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "tool", "tool_call_id": "c0", "content": "written"},
    ]
    async with answering(connect, local_client) as (http, model):
        answer = await http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        prompt = model.prompts[0]
    assert "<|start|>developer<|message|>Be brief." in prompt
    assert (
        "<|channel|>analysis<|message|>Both.\n\nI do.<|end|><|start|>assistant to=functions.write" in prompt
    )
    assert (
        prompt.index("functions.write to=assistant")
        < prompt.index("written")
        < prompt.index("to=functions.look")
    )
    assert prompt.index("functions.look to=assistant") < prompt.index("seen")
