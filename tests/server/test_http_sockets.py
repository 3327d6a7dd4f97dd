"""The official client over a real socket: what closing it ends, and what a server reads of a body."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx2
import pytest
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


async def test_closing_a_stream_cancels_the_request(url: str, local_client: LocalClient) -> None:
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


async def test_cancelling_a_call_cancels_the_request(url: str, local_client: LocalClient) -> None:
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
