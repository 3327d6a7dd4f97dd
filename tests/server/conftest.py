"""The bundled model behind the HTTP interface, in this process and without a socket."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from coldstream.engine import LLM
from coldstream.engine.events import Delta, Started
from coldstream.engine.request import Piece, Statistics
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from http_serving import URL, Connect, Saying, Scripted, WithTemplate, open_demo


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


@pytest.fixture(scope="session")
def connect(local_client: LocalClient) -> Connect:
    """`connect(**settings)`: an HTTP client of a server with these settings."""

    @cache
    def plain_app(client: Any) -> FastAPI:
        return create_app(client, ServerSettings())

    @asynccontextmanager
    async def connected(client: Any = local_client, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        app = create_app(client, ServerSettings(**settings)) if settings else plain_app(client)
        transport = httpx2.ASGITransport(app)
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
    return official(http)


@pytest.fixture(scope="session")
def thinker(local_client: LocalClient) -> Iterator[WithTemplate]:
    """The engine with a chat template that has tools and thoughts."""
    client = WithTemplate(local_client)
    yield client
    client.model.chat_template.close()


@pytest.fixture
async def thinking_http(connect: Connect, thinker: WithTemplate) -> AsyncIterator[httpx2.AsyncClient]:
    async with connect(thinker) as http:
        yield http


@pytest.fixture
def thinking(thinking_http: httpx2.AsyncClient) -> AsyncOpenAI:
    """The official client of a model that thinks and calls tools."""
    return official(thinking_http)


@pytest.fixture
def saying(connect: Connect, thinker: WithTemplate) -> Saying:
    """`saying(text)`: a client of a model that answers with this text, a few characters at a time."""
    statistics = Statistics(5, 2, 9, 0.1, 0.1, "avx2", 1, 0)

    @asynccontextmanager
    async def client(text: str) -> AsyncIterator[AsyncOpenAI]:
        pieces = [Piece(text[i : i + 3], (1,)) for i in range(0, len(text), 3)]
        end = Piece("", finish_reason="stop", statistics=statistics)
        script = [Started(1, 2, 5), *(Delta(1, 0, piece) for piece in (*pieces, end))]
        async with connect(Scripted(thinker, *script)) as http:
            yield official(http)

    return client


def official(http: httpx2.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
    )
