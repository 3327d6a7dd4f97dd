"""`make agents` without agents: what the proxy does, and what is left of a request that is recorded."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tools.agents import mcp_server
from tools.agents.__main__ import merged
from tools.agents.clients import CLIENTS
from tools.agents.conversations import COLOUR, CONVERSATIONS, PAINTED, Turn, prepare
from tools.agents.mcp_server import PIXEL
from tools.agents.proxy import OTHERWISE, Exchange, Proxy
from tools.agents.recording import record
from tools.agents.steps import Call, Say, Step, demanded
from tools.agents.talk import Talk

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
TURN = {"model": "qwen", "messages": [{"role": "user", "content": "Read."}], "tools": TOOLS}
READ = Call("read", {"path": "/work/door.txt"})


class Upstream(ThreadingHTTPServer):
    """In the place of a server: keeps bodies, answers with their number, and refuses those with a picture."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), UpstreamHandler)
        self.bodies: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class UpstreamHandler(BaseHTTPRequestHandler):
    server: Upstream

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        is_refused = "image" in json.dumps(body)
        answer = {"error": "no pictures"} if is_refused else {"number": len(self.server.bodies)}
        content = json.dumps(answer).encode()
        self.send_response(400 if is_refused else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing: standard error is the tests'."""


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    with Proxy(upstream.url) as proxy:
        yield proxy


def asked(proxy: Proxy, body: object) -> httpx2.Response:
    return httpx2.post(f"{proxy.url}{CHAT}", json=body, trust_env=False)


def test_a_request_goes_to_the_server_as_it_is_and_its_step_is_asked_for_then(
    proxy: Proxy, upstream: Upstream
) -> None:
    proxy.expect([READ, Say("Green.")])
    assert asked(proxy, TURN).json() == {"number": 2}
    assert upstream.bodies == [TURN, demanded(CHAT, TURN, READ)]
    (exchange,), left = proxy.taken()
    assert (exchange.status, exchange.step, left) == (200, READ, [Say("Green.")])


def test_a_refusal_reaches_the_agent_and_takes_no_step(proxy: Proxy, upstream: Upstream) -> None:
    proxy.expect([READ])
    picture = {**TURN, "messages": [{"role": "user", "content": [{"type": "image"}]}]}
    response = asked(proxy, picture)
    assert (response.status_code, response.json()) == (400, {"error": "no pictures"})
    assert upstream.bodies == [picture]
    (exchange,), left = proxy.taken()
    assert (exchange.status, exchange.step, left) == (400, None, [READ])
    assert "no pictures" in exchange.error


def test_a_request_without_tools_takes_no_step_of_the_conversation(proxy: Proxy) -> None:
    proxy.expect([READ])
    asked(proxy, {"model": "qwen", "messages": TURN["messages"]})
    (exchange,), left = proxy.taken()
    assert (exchange.step, left) == (OTHERWISE, [READ])


def talk_of(folder: Path, *bodies: Any) -> Talk:
    """A conversation with these requests in one turn each."""
    talk = Talk(CLIENTS["codex"], "qwen3", "http://127.0.0.1:1", 4096, folder)
    talk.prompts = ["Read door.txt."] * len(bodies)
    talk.exchanges = [[Exchange("POST", "/v1/responses", body, 200, "", 0.1, Say("Yes."))] for body in bodies]
    return talk


def test_a_recorded_request_has_nothing_that_is_not_ours(tmp_path: Path) -> None:
    secret = f"You are an agent in {tmp_path}/work on 2026-11-28."
    call = {"type": "function_call", "call_id": "call_f00", "name": "cat"}
    body = {
        "model": "qwen",
        "instructions": secret,
        "prompt_cache_key": "01a220b3",
        "tools": [{"type": "function", "name": "cat", "description": secret, "parameters": {}}],
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Read door.txt."}],
            },
            {**call, "arguments": json.dumps({"path": f"{tmp_path}/work/door.txt"})},
            {"type": "function_call_output", "call_id": "call_f00", "output": f"{secret}\n{COLOUR}\n"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
        ],
    }
    record(tmp_path / "codex.json", "1.2.3", [talk_of(tmp_path, body)])
    file = json.loads((tmp_path / "codex.json").read_text())
    (request,) = file["requests"]
    items = request["body"]["input"]
    assert items[0] == body["input"][0]
    assert items[1] == {**call, "call_id": "call_0", "arguments": '{"path": "/work/door.txt"}'}
    assert items[2] == {"type": "function_call_output", "call_id": "call_0", "output": f"{COLOUR} Filler."}
    assert items[3] == body["input"][3]
    assert (request["body"]["instructions"], request["body"]["prompt_cache_key"]) == ("Filler.", "Filler.")
    assert file["tool_sets"][request["tools"]][0]["description"] == "Filler."


@pytest.mark.parametrize("left", ["/root/x", "2026-11-28"])
def test_what_filler_does_not_reach_is_refused(tmp_path: Path, left: str) -> None:
    body = {"model": "qwen", "input": [{"type": "message", "role": left, "content": "x"}]}
    with pytest.raises(ValueError, match=r"codex\.json would have"):
        record(tmp_path / "codex.json", "1.2.3", [talk_of(tmp_path, body)])
    assert not (tmp_path / "codex.json").exists()


def rows(*pairs: tuple[str, str], commit: str) -> list[dict[str, Any]]:
    return [{"client": client, "template": template, "commit": commit} for client, template in pairs]


def test_a_result_keeps_the_conversations_of_others(tmp_path: Path) -> None:
    out = tmp_path / "agents.json"
    known = rows(("codex", "qwen3"), ("codex", "qwen3"), ("opencode", "qwen3"), commit="old")
    out.write_text(json.dumps({"conversations": known}))
    fresh = rows(("opencode", "qwen3"), ("claude-code", "qwen3_8"), commit="new")
    assert merged(out, fresh) == [fresh[1], known[0], known[1], fresh[0]]
    assert merged(None, known) == known


def called_names(turns: list[Turn]) -> set[str]:
    return {step.name for turn in turns for step in turn.steps if not isinstance(step, Say)}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_ends_with_a_text_in_every_turn(name: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert COLOUR in (tmp_path / "door.txt").read_text()
    for turns in (CONVERSATIONS[name].with_tools(tmp_path), CONVERSATIONS[name].too_long(tmp_path)):
        assert [type(turn.steps[-1]) for turn in turns] == [Say] * len(turns)
        assert turns[-1] == Turn("Thank you.")
    assert PAINTED in {turn.written for turn in CONVERSATIONS[name].with_tools(tmp_path)}
    assert len(called_names(CONVERSATIONS[name].with_tools(tmp_path))) >= 5


def test_the_mcp_server_finds_and_fails() -> None:
    names = [tool["name"] for tool in mcp_server.answer("tools/list", {})["tools"]]  # type: ignore[index]
    results: list[Any] = [
        mcp_server.answer("tools/call", {"name": name, "arguments": {"topic": "doors"}}) for name in names
    ]
    assert [result.get("isError", False) for result in results] == [False, True]
    assert all("doors" in result["content"][0]["text"] for result in results)
    assert mcp_server.answer("resources/list", {}) is None


def test_a_step_keeps_model_and_stream_of_the_request() -> None:
    step: Step = Say("Yes.")
    body = demanded("/v1/messages", {"model": "qwen", "stream": True, "max_tokens": 1, "tools": TOOLS}, step)
    assert (body["model"], body["stream"], "tools" in body) == ("qwen", True, False)
