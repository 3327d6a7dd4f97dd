"""The bundled model for tests of the HTTP interface, and what they read of it."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.engine.events import Event
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.server.event_stream import EventStream
from coldstream.server.local_client import LocalClient
from coldstream.server.served_model import ServedModel

URL = "http://127.0.0.1:8080"
CTX_SIZE = 2048
TEMPLATE = Path(__file__).with_name("gguf") / "chatml.jinja"

Connect = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]
Saying = Callable[[str], AbstractAsyncContextManager[AsyncOpenAI]]


def open_demo(ctx_size: int = CTX_SIZE, spec_type: str = "auto") -> OpenedModel:
    options = {"model": str(demo_model_path()), "ctx_size": ctx_size, "spec_type": spec_type}
    return open_model(EngineConfig.from_options(options))


class WithTemplate:
    """A client whose model has another chat template: that of Qwen's family, with tools and thoughts."""

    def __init__(self, client: LocalClient) -> None:
        source = TEMPLATE.read_text()
        vocabulary = client.model.tokenizer.vocabulary
        self._client = client
        self.model: ServedModel = replace(
            client.model,
            template_source=source,
            chat_template=ChatTemplate(source, vocabulary.control_ids, {}),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Scripted:
    """A client whose requests go as a script says; the model is a real one."""

    def __init__(self, client: LocalClient, *script: Event | ColdstreamError | asyncio.Event) -> None:
        self.model = client.model
        self._client = client
        self._script = script
        self.cancelled: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def submit(self, submission: Submission) -> EventStream:
        if self._script and isinstance(self._script[0], ColdstreamError):
            raise self._script[0]
        stream = EventStream(
            submission.request_id,
            submission.request.params.n,
            lambda stream: self.cancelled.append(stream.request_id),
        )
        self._reporting = asyncio.create_task(self._report(stream))
        return stream

    async def _report(self, stream: EventStream) -> None:
        for each in self._script:
            if isinstance(each, asyncio.Event):
                await each.wait()
            else:
                assert not isinstance(each, ColdstreamError)
                stream.push(each)


def written(name: str, **values: str) -> str:
    """A call as `TEMPLATE` shows it to the model."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def events_of(text: str) -> list[Any]:
    """The JSON values of an event stream, with "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def idle(client: LocalClient) -> None:
    """Waits until nothing is computed; the test's own time limit says that it takes too long."""
    while True:
        statistics = await client.statistics()
        if statistics.running == statistics.waiting == 0:
            return
        await asyncio.sleep(0)
