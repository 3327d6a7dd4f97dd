"""Connections that close, clients that do not read, prefills that take long, and errors in the middle."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp, Message

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.events import Delta, Failed, Started
from coldstream.engine.request import Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.errors import (
    DeadlineError,
    DeviceError,
    GenerationFault,
    InvalidRequestError,
    ModelChangedError,
    OutOfMemoryError,
    QueueFullError,
)
from coldstream.server.client import ServiceUnavailable
from coldstream.server.event_stream import EventStream
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.http import answers as answers_module
from coldstream.server.local_client import LocalClient
from http_serving import Connect, Scripted, events_of, idle

LONG = {"prompt": "import os\n", "max_tokens": 1900, "ignore_eos": True}


class Call:
    """One request to an application, whose client may go away or stop reading at any point."""

    def __init__(self, path: str, body: Any, num_read: int | None = None) -> None:
        """num_read: messages that the client takes; it takes no more then. None: all."""
        self._path = path
        self._body = json.dumps(body).encode()
        self._num_read = num_read
        self._has_asked = False
        self.gone = asyncio.Event()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    async def __call__(self, app: ASGIApp) -> None:
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": self._path, "raw_path": self._path.encode(), "query_string": b"",
            "headers": headers, "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._num_read is not None and self.sent.qsize() >= self._num_read:
            await asyncio.Event().wait()
        self.sent.put_nowait(message)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("num_events", [0, 1, 2, 20])
async def test_sc04_a_closed_connection_ends_a_stream_at_once(
    local_client: LocalClient, path: str, num_events: int
) -> None:
    body = {**LONG, "messages": [{"role": "user", "content": "import os"}], "stream": True}
    call, before = Call(path, body), await local_client.statistics()
    serving = asyncio.create_task(call(create_app(local_client, ServerSettings())))
    for _ in range(num_events):
        await call.sent.get()
    call.gone.set()
    await serving
    await idle(local_client)
    after = await local_client.statistics()
    assert after.generated_tokens - before.generated_tokens < 1800
    assert after.finished_requests == before.finished_requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_sc04_a_closed_connection_ends_what_would_come_at_once(
    local_client: LocalClient, path: str
) -> None:
    body = {**LONG, "messages": [{"role": "user", "content": "import os"}]}
    call, before = Call(path, body), await local_client.statistics()
    serving = asyncio.create_task(call(create_app(local_client, ServerSettings())))
    while (await local_client.statistics()).generated_tokens == before.generated_tokens:
        await asyncio.sleep(0)
    call.gone.set()
    await serving
    await idle(local_client)
    after = await local_client.statistics()
    assert after.cancelled_requests == before.cancelled_requests + 1
    assert after.generated_tokens - before.generated_tokens < 1800


@pytest.mark.sharded(of="processes")
async def test_pc02_requests_side_by_side_get_their_own_answers_and_nothing_else(
    http: httpx2.AsyncClient, local_client: LocalClient, llm: LLM
) -> None:
    """Streams and whole answers, with seeds of their own, while neighbours go away in the middle."""

    async def answer(index: int) -> str:
        body = {"prompt": f"def canary_{index}(", "max_tokens": 30, "temperature": 1.0, "seed": index}
        if index % 2:
            return str((await http.post("/v1/completions", json=body)).json()["choices"][0]["text"])
        stream = events_of((await http.post("/v1/completions", json={**body, "stream": True})).text)
        return "".join(choice["text"] for event in stream[:-1] for choice in event["choices"])

    async def leave(index: int) -> None:
        call = Call("/v1/completions", {**LONG, "prompt": f"class Gone{index}:", "stream": True})
        serving = asyncio.create_task(call(create_app(local_client, ServerSettings())))
        for _ in range(index):
            await call.sent.get()
        call.gone.set()
        await serving

    *answers, _ = await asyncio.gather(*map(answer, range(16)), asyncio.gather(*map(leave, range(1, 9))))
    for index, text in enumerate(answers):
        params = SamplingParams(temperature=1.0, max_tokens=30, seed=index)
        assert text == llm.generate(f"def canary_{index}(", params)[0].text


async def test_sc05_a_client_that_stops_reading_is_left(local_client: LocalClient) -> None:
    call = Call("/v1/completions", {**LONG, "stream": True}, num_read=3)
    before = await local_client.statistics()
    await call(create_app(local_client, ServerSettings(slow_reader_s=0.01)))
    await idle(local_client)
    assert (await local_client.statistics()).cancelled_requests == before.cancelled_requests + 1


PIECE = Delta(1, 0, Piece("abc", (1,)))
BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
STATUSES = [
    (QueueFullError("full"), 429, "1"),
    (ServiceUnavailable("down", 7.2), 503, "8"),
    (DeadlineError("late"), 504, None),
    (ModelChangedError("changed"), 503, "5"),
    (OutOfMemoryError("memory"), 503, "5"),
    (GenerationFault("NaN"), 500, None),
    (DeviceError("lost"), 500, None),
    (InvalidRequestError("top_k: bad"), 400, None),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "retry_after"), STATUSES, ids=lambda value: type(value).__name__)
async def test_errors_before_the_first_token_are_statuses(
    connect: Connect,
    local_client: LocalClient,
    path: str,
    stream: bool,
    error: Any,
    status: int,
    retry_after: Any,
) -> None:
    """Whether the engine refuses the request or it fails at once, and also in a stream."""
    for script in ((error,), (Failed(1, error),)):
        async with connect(Scripted(local_client, *script)) as http:
            response = await http.post(path, json={**BODIES[path], "stream": stream})
        assert response.status_code == status
        assert response.headers.get("retry-after") == retry_after
        in_vain = status >= 500 and retry_after is None
        assert response.headers.get("x-should-retry") == ("false" if in_vain else None)
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "/" not in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_in_the_middle_is_the_last_event_and_never_a_silent_end(
    connect: Connect, local_client: LocalClient, path: str
) -> None:
    client = Scripted(local_client, Started(1, 0, 1), PIECE, Failed(1, GenerationFault("NaN logits")))
    async with connect(client) as http:
        stream = await http.post(path, json={**BODIES[path], "stream": True})
        whole = await http.post(path, json=BODIES[path])
    events = events_of(stream.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "NaN logits"
    reasons = [choice["finish_reason"] for event in events[:-2] for choice in event["choices"]]
    assert set(reasons) == {None}
    assert whole.status_code == 500


async def test_a_first_event_that_is_the_last_is_sent(connect: Connect, local_client: LocalClient) -> None:
    statistics = Statistics(1, 0, 1, 0.1, 0.0, "generic", 1, 0)
    last = Delta(1, 0, Piece("abc", (1,), finish_reason="length", statistics=statistics))
    async with connect(Scripted(local_client, last)) as http:
        stream = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
    event, done = events_of(stream.text)
    assert (event["choices"][0]["text"], done) == ("abc", "[DONE]")


@pytest.mark.parametrize("path", BODIES)
async def test_answers_that_the_engine_cancels_are_errors_and_not_short_answers(
    connect: Connect, local_client: LocalClient, path: str
) -> None:
    last = Delta(1, 0, Piece("", (), finish_reason="cancelled"))
    async with connect(Scripted(local_client, Started(1, 0, 1), PIECE, last)) as http:
        stream = await http.post(path, json={**BODIES[path], "stream": True})
        whole = await http.post(path, json=BODIES[path])
    assert events_of(stream.text)[-2]["error"]["code"] == "service_unavailable"
    assert (whole.status_code, "retry-after" in whole.headers) == (503, True)


@pytest.mark.parametrize("path", BODIES)
async def test_sc07_comments_keep_a_connection_alive_that_has_nothing_to_say(
    local_client: LocalClient, path: str
) -> None:
    call = Call(path, {**BODIES[path], "stream": True})
    client = Scripted(local_client, Started(1, 0, 1), asyncio.Event())
    serving = asyncio.create_task(call(create_app(client, ServerSettings(keep_alive_s=0.001))))  # type: ignore[arg-type]
    bodies: list[bytes] = []
    while bodies.count(b": keep-alive\n\n") < 3:
        bodies.append((await call.sent.get()).get("body", b""))
    call.gone.set()
    await serving
    assert len(client.cancelled) == 1


class Waking(Scripted):
    """A client whose model is loaded once `loaded` is set; what asks before waits."""

    def __init__(self, client: LocalClient, *script: Any) -> None:
        super().__init__(client, *script[1:])
        self._error = script[0]
        self.loaded, self.left = asyncio.Event(), asyncio.Event()

    async def submit(self, submission: Submission) -> EventStream:
        try:
            await self.loaded.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self._error is not None:
            raise self._error
        return await super().submit(submission)


@pytest.mark.parametrize("error", [None, OutOfMemoryError("needs 9 GiB")])
@pytest.mark.parametrize("path", BODIES)
async def test_comments_keep_a_stream_alive_that_waits_for_the_model_to_be_loaded(
    local_client: LocalClient, monkeypatch: pytest.MonkeyPatch, path: str, error: Exception | None
) -> None:
    """Then it goes on as ever, or ends with the error that loading gave."""
    monkeypatch.setattr(answers_module, "_FIRST_EVENT_S", 0.001)
    call = Call(path, {**BODIES[path], "stream": True})
    end = Piece("", finish_reason="stop", statistics=Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0))
    client = Waking(local_client, error, Started(1, 0, 1), Delta(1, 0, Piece("xyz", (1,))), Delta(1, 0, end))
    serving = asyncio.create_task(call(create_app(client, ServerSettings(keep_alive_s=0.001))))  # type: ignore[arg-type]
    bodies: list[bytes] = []
    while bodies.count(b": keep-alive\n\n") < 3:
        bodies.append((await call.sent.get()).get("body", b""))
    client.loaded.set()
    await serving
    while not call.sent.empty():
        bodies.append(call.sent.get_nowait().get("body", b""))
    text = b"".join(bodies)
    assert (b"xyz" in text) == (error is None)
    assert (b"needs 9 GiB" in text) == (error is not None)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_is_left_while_the_model_is_loaded_asks_nothing(
    local_client: LocalClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(answers_module, "_FIRST_EVENT_S", 0.001)
    call = Call(path, {**BODIES[path], "stream": True})
    client = Waking(local_client, None)
    serving = asyncio.create_task(call(create_app(client, ServerSettings(keep_alive_s=0.001))))  # type: ignore[arg-type]
    await call.sent.get()
    call.gone.set()
    await serving
    assert client.left.is_set()


async def test_an_unexpected_error_is_a_500_without_details(
    connect: Connect, local_client: LocalClient
) -> None:
    class Broken(Scripted):
        async def submit(self, submission: Submission) -> EventStream:
            raise RuntimeError("/home/secret/model.gguf")

    app = create_app(Broken(local_client), ServerSettings())  # type: ignore[arg-type]
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_deadline_ends_a_request_with_its_own_status(
    connect: Connect, local_client: LocalClient
) -> None:
    async with connect(request_timeout_s=0.05) as http:
        response = await http.post("/v1/completions", json=LONG)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    await idle(local_client)
