"""GET /v1/models: the one model that is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter

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

    @router.get("/v1/models", response_model=None, responses=documented(ModelList))
    async def models() -> dict[str, Any]:
        """The models that are served: one."""
        return {"object": "list", "data": [_described(client.model)]}

    @router.get("/v1/models/{name:path}", response_model=None, responses=documented(Model))
    async def model(name: str) -> dict[str, Any]:
        """A model by its name."""
        return _described(served_model(client, name))

    return router


def _described(served: ServedModel) -> dict[str, Any]:
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
        },
    }
