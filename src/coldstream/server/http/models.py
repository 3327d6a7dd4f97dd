"""GET /v1/models: the one model that is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from coldstream.errors import ContextFullError, shown
from coldstream.server.client import EngineClient
from coldstream.server.http.problems import (
    CONTEXT_FULL,
    CONTEXT_FULL_KIND,
    FullContext,
    Problem,
    ProblemError,
)
from coldstream.server.http.shapes import Model, ModelList, documented
from coldstream.server.served_model import ServedModel


def served_model(client: EngineClient, name: str | None) -> ServedModel:
    """The model, if it is the one of this name or none is named.

    Raises ProblemError (404) for another name, ServiceUnavailable before the model is known.
    """
    served = client.model
    if name is not None and name != served.name:
        message = f"model {shown(name)} is not served here, {shown(served.name)} is (--alias renames it)"
        raise ProblemError(Problem(404, message, code="model_not_found", param="model"))
    return served


@contextmanager
def context_errors(served: ServedModel, field: str) -> Iterator[None]:
    """Says of a prompt that is too long what clients look for: the code and the words of OpenAI's API, and
    llama.cpp's type and numbers.
    """
    try:
        yield
    except ContextFullError as error:
        message = f"this model's maximum context length is {served.ctx_size} tokens: {error}"
        full = FullContext(error.num_tokens, error.is_exact, served.ctx_size)
        problem = Problem(400, message, CONTEXT_FULL_KIND, CONTEXT_FULL, field, full_context=full)
        raise ProblemError(problem) from error


def models_router(client: EngineClient) -> APIRouter:
    """The routes over an engine."""
    router = APIRouter()

    @router.get("/models", include_in_schema=False)  # llama.cpp's other name
    @router.get("/v1/models", response_model=None, responses=documented(ModelList))
    async def models(request: Request) -> dict[str, Any]:
        """The models that are served: one. Clients of Anthropic's API get its fields."""
        served, is_sleeping = client.model, client.is_sleeping
        if _is_anthropic(request):
            return {
                "data": [_described_to_anthropic(served, is_sleeping)],
                "first_id": served.name,
                "last_id": served.name,
                "has_more": False,
            }
        return {"object": "list", "data": [_described(served, is_sleeping)]}

    @router.get("/v1/models/{name:path}", response_model=None, responses=documented(Model))
    async def model(name: str, request: Request) -> dict[str, Any]:
        """A model by its name."""
        served = served_model(client, name)
        described = _described_to_anthropic if _is_anthropic(request) else _described
        return described(served, client.is_sleeping)

    return router


def _is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks, all of which send this header."""
    return "anthropic-version" in request.headers


def _described_to_anthropic(served: ServedModel, is_sleeping: bool) -> dict[str, Any]:
    return {
        "type": "model",
        "id": served.name,
        "display_name": served.name,
        "created_at": datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": served.ctx_size - 1,
        "max_tokens": served.ctx_size,
        "is_sleeping": is_sleeping,
    }


def _described(served: ServedModel, is_sleeping: bool) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "coldstream",
        "max_model_len": served.ctx_size,
        "meta": {
            "n_ctx": served.ctx_size,
            "n_vocab": served.tokenizer.vocab_size,
            "architecture": served.facts.architecture,
            "is_sleeping": is_sleeping,
        },
    }
