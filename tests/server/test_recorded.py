"""Requests of coding agents (`make agents`), under templates with the restrictions of published ones."""

import json
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coldstream.engine import EngineConfig, open_model
from coldstream.engine.submission import Submission
from coldstream.server.event_stream import EventStream
from coldstream.server.local_client import LocalClient
from http_serving import TEMPLATE, Connect, events_of
from tools.agents.packages import retag

RECORDED = Path(__file__).with_name("recorded")
TEMPLATES = (TEMPLATE, TEMPLATE.with_name("hermes.jinja"))
CTX_SIZE = 32_768
LIMITS = {
    "/v1/messages": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
# What tools found, each in the history of every agent, and words of calls that led there.
FOUND = (
    "The colour of the door is green.",
    "The notes say of doors: seven.",
    "The notes on doors are lost.",
    "no window",
    "window.",
)


class Recording:
    """A client that keeps the prompts that it is sent."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self.prompts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def submit(self, submission: Submission) -> EventStream:
        ids = submission.request.prompt_token_ids
        self.prompts.append(self._client.model.tokenizer.decode(ids, skip_special=False))
        return await self._client.submit(submission)


@cache
def recorded(name: str) -> dict[str, Any]:
    file: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return file


def requests_of(name: str) -> list[dict[str, Any]]:
    """The requests of a file, each with its tools in its body, and with a short answer."""
    file = recorded(name)
    found = []
    for request in file["requests"]:
        body = dict(request["body"])
        if tools := file["tool_sets"][request["tools"]]:
            body["tools"] = tools
        path = request["path"].split("?")[0]
        if path in LIMITS:
            body[LIMITS[path]] = 2
        found.append({"path": request["path"], "body": body})
    return found


FILES = sorted(path.name for path in RECORDED.glob("*.json"))
CASES = [(name, number) for name in FILES for number in range(len(recorded(name)["requests"]))]


@pytest.fixture(scope="module", params=TEMPLATES, ids=[path.stem for path in TEMPLATES])
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recording]:
    """The bundled model with a template, and with room for an agent's tools."""
    path = tmp_path_factory.mktemp("models") / f"{request.param.stem}.gguf"
    options = {"model": str(retag(request.param, path, CTX_SIZE)), "ctx_size": CTX_SIZE, "spec_type": "none"}
    opened = open_model(EngineConfig.from_options(options))
    with LocalClient(opened, "demo") as client:
        yield Recording(client)
    opened.close()


@pytest.fixture
async def agent(connect: Connect, recording: Recording) -> AsyncIterator[httpx2.AsyncClient]:
    async with connect(recording) as http:
        yield http


def spoken(value: Any) -> Iterator[str]:
    """All texts of a history."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from spoken(each)


def names_of(tools: list[dict[str, Any]]) -> Iterator[str]:
    """Names of the tools that a model can learn of, those inside namespaces among them."""
    for tool in tools:
        if tool.get("type") in (None, "function", "custom"):
            yield tool.get("function", tool)["name"]
        elif tool["type"] == "namespace":
            yield from names_of(tool["tools"])


@pytest.mark.sharded(9)
@pytest.mark.parametrize(("name", "number"), CASES, ids=[f"{name[:-5]}-{number}" for name, number in CASES])
async def test_a_recorded_request_is_served_with_all_that_it_says(
    agent: httpx2.AsyncClient, recording: Recording, name: str, number: int
) -> None:
    request = requests_of(name)[number]
    body = request["body"]
    recording.prompts.clear()
    response = await agent.post(request["path"], json=body)
    assert response.status_code == 200, response.text
    if "count_tokens" in request["path"]:
        assert response.json()["input_tokens"] > len(body["messages"])
        return
    assert "error" not in [event.get("type") for event in events_of(response.text) if event != "[DONE]"]
    (prompt,) = recording.prompts
    history = list(spoken(body.get("messages", body.get("input"))))
    reported = [text for text in FOUND if any(text in each for each in history)]
    missing = [text for text in (*reported, *names_of(body.get("tools", []))) if text not in prompt]
    assert not missing, f"the prompt is without {missing}"


@pytest.mark.parametrize("name", FILES)
def test_the_history_of_every_agent_has_all_kinds_of_results(name: str) -> None:
    last = json.dumps([request["body"] for request in requests_of(name)], ensure_ascii=False)
    assert [text for text in FOUND if text not in last] == []
    assert "image" in last
