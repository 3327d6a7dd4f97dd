"""The official client over a real socket: what closing it ends, and what a server reads of a body."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx2
import psutil
import pytest
from anyio import CapacityLimiter
from anyio.to_thread import current_default_thread_limiter
from openai import AsyncOpenAI

from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from coldstream.server.web_server import WebServer, bind, url_of
from http_serving import idle


@pytest.fixture
async def url(local_client: LocalClient) -> AsyncIterator[str]:
    with bind("127.0.0.1", 0) as listener:
        settings = ServerSettings(max_body_bytes=1 << 20)
        server = WebServer(create_app(local_client, settings), listener)
        serving = asyncio.create_task(server.run())
        yield url_of(listener)
        server.stop()
        await serving


async def test_sc04_closing_a_stream_cancels_the_request(url: str, local_client: LocalClient) -> None:
    before = await local_client.statistics()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "import os"}],
            stream=True,
            max_tokens=1900,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await idle(local_client)
    after = await local_client.statistics()
    assert after.cancelled_requests == before.cancelled_requests + 1
    assert after.generated_tokens - before.generated_tokens < 1800


async def test_sc04_cancelling_a_call_cancels_the_request(url: str, local_client: LocalClient) -> None:
    before = await local_client.statistics()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        calling = asyncio.create_task(
            client.completions.create(
                model="demo", prompt="import os", max_tokens=1900, extra_body={"ignore_eos": True}
            )
        )
        while (await local_client.statistics()).generated_tokens == before.generated_tokens:
            await asyncio.sleep(0)
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling
        await idle(local_client)
    after = await local_client.statistics()
    assert after.cancelled_requests == before.cancelled_requests + 1


def own_objects() -> Counter[str]:
    """The project's, by class, but for kept prefixes, whose memory has a budget."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith("coldstream.") and ".kvcache." not in name)


async def storm(http: httpx2.AsyncClient, count: int) -> None:
    """Requests whose clients leave after 0 to 3 lines of a stream, or while they wait for all of it."""
    body = {"prompt": "import os", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}

    async def begun_and_left(number: int) -> None:
        if number % 5 == 4:
            calling = asyncio.create_task(http.post("/v1/completions", json=body))
            for _ in range(number):
                await asyncio.sleep(0)
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
            return
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.aiter_lines()
            for _ in range(number % 5):
                await anext(lines)

    for first in range(0, count, 10):
        await asyncio.gather(*map(begun_and_left, range(first, first + 10)))


def unpooled_threads(process: psutil.Process) -> int:
    """Threads of this process but those of AnyIO's pool, whose number is bounded and which stay."""
    pooled = sum(each.name == "AnyIO worker thread" for each in threading.enumerate())
    return process.num_threads() - pooled


@pytest.mark.sharded(of="processes")
async def test_sc08_a_storm_of_cancels_leaves_nothing_behind(url: str, local_client: LocalClient) -> None:
    process, short = psutil.Process(), {"prompt": "def main(", "max_tokens": 12, "temperature": 0}

    async def weathered(count: int) -> str:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
            await storm(http, count)
            await idle(local_client)
            answer = await http.post("/v1/completions", json=short)
        while local_client._streams:
            await asyncio.sleep(0)
        return str(answer.json()["choices"][0]["text"])

    text = await weathered(20)
    descriptors, threads, objects = process.num_fds(), unpooled_threads(process), own_objects()
    before = await local_client.statistics()
    assert await weathered(120) == text
    after = await local_client.statistics()
    while process.num_fds() > descriptors or unpooled_threads(process) > threads:  # some may close yet
        await asyncio.sleep(0)
    assert [name for name, more in (own_objects() - objects).items() if more >= 10] == []
    assert after.finished_requests == before.finished_requests + 1
    assert after.failed_requests == before.failed_requests
    assert 90 <= after.cancelled_requests - before.cancelled_requests <= 120


MESSAGES = [{"role": "user", "content": "import os"}]
BODIES = {
    "/v1/completions": {"prompt": "import os"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "import os"},
}


@pytest.fixture
async def no_thread() -> AsyncIterator[CapacityLimiter]:
    """The limiter of threads that read requests, with all of them taken."""
    limiter = current_default_thread_limiter()
    takers = [object() for _ in range(int(limiter.total_tokens))]
    for taker in takers:
        limiter.acquire_on_behalf_of_nowait(taker)
    yield limiter
    for taker in takers:
        limiter.release_on_behalf_of(taker)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_sc08_a_client_that_leaves_before_its_request_is_read_costs_the_engine_nothing(
    url: str, local_client: LocalClient, no_thread: CapacityLimiter, path: str, stream: bool
) -> None:
    before = await local_client.statistics()
    async with httpx2.AsyncClient(base_url=url) as http, asyncio.timeout(30):
        calling = asyncio.create_task(http.post(path, json={**BODIES[path], "stream": stream}))
        while not no_thread.statistics().tasks_waiting:
            await asyncio.sleep(0)
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling
        while no_thread.statistics().tasks_waiting:
            await asyncio.sleep(0)
    after = await local_client.statistics()
    assert (after.prompt_tokens, after.cancelled_requests) == (
        before.prompt_tokens,
        before.cancelled_requests,
    )


async def test_rq02_a_body_of_chunks_is_read_up_to_the_limit(url: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3 << 4):
            yield b" " * (1 << 16)

    async with httpx2.AsyncClient(base_url=url) as http:
        headers = {"Content-Type": "application/json"}
        response = await http.post("/v1/completions", content=chunks(), headers=headers)
        assert response.status_code == 413
        health = await http.get("/health")
    assert health.status_code == 200
    assert "server" not in health.headers
