"""The bundled model for tests of the HTTP interface, and what they read of it."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig, OpenedModel, open_model

URL = "http://127.0.0.1:8080"
CTX_SIZE = 2048

Connect = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


def open_demo() -> OpenedModel:
    return open_model(EngineConfig.from_options({"model": str(demo_model_path()), "ctx_size": CTX_SIZE}))


def events_of(text: str) -> list[Any]:
    """The JSON values of an event stream, with "[DONE]" as it is."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
