"""The bundled model behind the HTTP interface, in this process and without a socket."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from coldstream.engine import LLM
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from http_serving import URL, Connect, open_demo


@pytest.fixture(scope="session")
def local_client() -> Iterator[LocalClient]:
    """An engine with the bundled model, for the tests of one process."""
    opened = open_demo()
    with LocalClient(opened, "demo") as client:
        yield client
    opened.close()


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model without a server: what it says is what the server has to say."""
    with LLM.from_opened(open_demo()) as llm:
        yield llm


@pytest.fixture
def connect(local_client: LocalClient) -> Connect:
    """`connect(**settings)`: an HTTP client of a server with these settings."""

    @asynccontextmanager
    async def connected(client: Any = local_client, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(create_app(client, ServerSettings(**settings)))
        async with httpx2.AsyncClient(transport=transport, base_url=URL) as http:
            yield http

    return connected


@pytest.fixture
async def http(connect: Connect) -> AsyncIterator[httpx2.AsyncClient]:
    """An HTTP client of a server without a key."""
    async with connect() as http:
        yield http


@pytest.fixture
def openai(http: httpx2.AsyncClient) -> AsyncOpenAI:
    """The official client, which refuses answers in another shape than its API's."""
    return AsyncOpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
    )
