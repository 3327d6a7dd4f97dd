"""Clients that take their time: a bound for headers, one for each part of a body, and none for answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest

from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from coldstream.server.web_server import MAX_READ_BYTES, PatientProtocol, WebServer, bind

SHORT_S, LONG_S = 0.05, 60.0
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\n"
JSON = b"Content-Type: application/json\r\n\r\n"


@asynccontextmanager
async def serving(client: LocalClient, headers_s: float, body_s: float) -> AsyncIterator[int]:
    """The port of a server with these bounds."""
    settings = ServerSettings(slow_headers_s=headers_s, slow_body_s=body_s)
    with bind("127.0.0.1", 0) as listener:
        server = WebServer(create_app(client, settings), listener, settings.slow_headers_s)
        running = asyncio.create_task(server.run())
        try:
            yield listener.getsockname()[1]
        finally:
            server.stop()
            await running


@pytest.fixture
async def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for the timers of the loop, so that a busy machine cannot be what is late."""
    loop = asyncio.get_running_loop()
    time, ahead = loop.time, 0.0

    def passed(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(loop, "time", lambda: time() + ahead)
    return passed


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    return await asyncio.wait_for(reader.read(), LONG_S)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD, HEAD + b"X: 1\r\n"])
async def test_rq09_headers_that_do_not_come_end_the_connection(
    local_client: LocalClient, sent: bytes
) -> None:
    async with serving(local_client, SHORT_S, LONG_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_rq09_bytes_now_and_then_do_not_put_it_off(local_client: LocalClient) -> None:
    async with serving(local_client, 10 * SHORT_S, LONG_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)

        async def drip() -> None:
            while True:
                writer.write(b"X: 1\r\n")
                await asyncio.sleep(SHORT_S)

        dripping = asyncio.create_task(drip())
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        writer.close()


async def test_rq09_later_requests_of_a_connection_are_bounded_too(
    local_client: LocalClient, monkeypatch: pytest.MonkeyPatch, pass_time: Callable[[float], None]
) -> None:
    parts: asyncio.Queue[bytes] = asyncio.Queue()
    received = PatientProtocol.data_received

    def noted(protocol: PatientProtocol, data: bytes) -> None:
        received(protocol, data)
        parts.put_nowait(data)

    monkeypatch.setattr(PatientProtocol, "data_received", noted)
    async with serving(local_client, LONG_S, LONG_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        assert (await reader.readuntil(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200 ")
        assert await parts.get() == HEAD + b"\r\n"
        writer.write(HEAD)
        assert await parts.get() == HEAD
        pass_time(LONG_S)
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_rq09_a_body_that_stops_coming_is_refused_and_the_connection_closed(
    local_client: LocalClient,
) -> None:
    async with serving(local_client, LONG_S, SHORT_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + JSON + b'{"content"')
        answer = await rest_of(reader)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"slow_body"' in answer
        writer.close()


async def test_rq09_a_body_that_drips_is_refused_too(local_client: LocalClient) -> None:
    async with serving(local_client, LONG_S, 10 * SHORT_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST.replace(b"16", b"1000000") + JSON)

        async def drip() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(SHORT_S)

        dripping = asyncio.create_task(drip())
        assert b'"slow_body"' in await rest_of(reader)
        dripping.cancel()
        writer.close()


async def test_rq09_others_have_their_turn_after_a_part_of_what_has_come(
    local_client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of chunks of one byte would hold them up for a second with what is read by default."""
    sizes: list[int] = []
    received = PatientProtocol.data_received

    def noted(protocol: PatientProtocol, data: bytes) -> None:
        sizes.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(PatientProtocol, "data_received", noted)
    async with serving(local_client, LONG_S, LONG_S) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = POST.replace(b"Content-Length: 16", b"Transfer-Encoding: chunked\r\nConnection: close")
        writer.write(head + JSON + b"1\r\n \r\n" * 20_000 + b'10\r\n{"content": "a"}\r\n0\r\n\r\n')
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert max(sizes) <= MAX_READ_BYTES
    assert len(sizes) >= 6 * 20_000 // MAX_READ_BYTES


async def test_answers_may_take_longer_than_requests(
    local_client: LocalClient, pass_time: Callable[[float], None]
) -> None:
    body = {"prompt": "import os", "max_tokens": 300, "ignore_eos": True, "stream": True}
    bound_s = 10.0
    async with (
        serving(local_client, bound_s, bound_s) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        pass_time(2 * bound_s)
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


async def test_rq09_slow_clients_do_not_hold_up_others(local_client: LocalClient) -> None:
    async with serving(local_client, LONG_S, LONG_S) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in slow:
            writer.write(HEAD)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as http:
            assert (await http.get("/health")).status_code == 200
        for _, writer in slow:
            writer.close()
