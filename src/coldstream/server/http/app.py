"""create_app: the HTTP interface over an engine, wherever that runs."""

from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from coldstream.errors import ColdstreamError
from coldstream.server.client import EngineClient
from coldstream.server.http.answers import Serving
from coldstream.server.http.anthropic import anthropic_router
from coldstream.server.http.bodies import Bodies, complaints_of
from coldstream.server.http.chat import chat_router
from coldstream.server.http.completions import completions_router
from coldstream.server.http.guard import Guard
from coldstream.server.http.metrics import Metrics
from coldstream.server.http.models import models_router
from coldstream.server.http.page import page_router
from coldstream.server.http.problems import Problem, ProblemError, problem_of
from coldstream.server.http.responses import responses_router
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.state import state_router
from coldstream.server.http.tokens import tokens_router

MAX_BODIES: Final = 4  # of the largest size that are read at once
# What other servers offer here, and what to say to those who ask this one for it.
_NOT_OFFERED: Final[Mapping[str, str]] = {
    "embeddings": "embeddings are not computed here: this server generates text only",
    "rerank": "documents are not ranked here: this server generates text only",
    "audio": "audio is neither read nor made here: this server generates text only",
    "images": "images are neither read nor made here: this server generates text only",
    "moderations": "texts are not judged here: this server generates text only",
    "files": "files are not kept here: give their text in messages",
    "batches": "batches are not kept here: send their requests one by one, also side by side",
    "assistants": "assistants are not kept here: use /v1/chat/completions",
    "threads": "conversations are not kept here: send all messages with each request",
    "completion": "use /v1/completions, whose fields and answers are OpenAI's",
    "completions": "use /v1/completions, whose fields and answers are OpenAI's",
    "infill": "text is not filled in here: use /v1/completions, which goes on from a prompt",
    "slots": "a server has no slots that can be asked for: GET /props has what runs and waits",
    "conversations": "conversations are not kept here: send all items with each request",
    "api": "Ollama's interface is not offered: OpenAI's is at /v1, and Anthropic's at /v1/messages",
    "v1": "the path has /v1 twice: leave it out of the address that the client is given",
    "fine_tuning": "models are not trained here: this server generates text only",
}


def create_app(client: EngineClient, settings: ServerSettings) -> FastAPI:
    """The application. `check_exposure` says whether it may listen where `settings` wants."""
    app = FastAPI(
        title="coldstream",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.bodies = Bodies(MAX_BODIES * settings.max_body_bytes)
    metrics = Metrics()
    serving = Serving(client, settings, metrics)
    app.include_router(chat_router(serving))
    app.include_router(completions_router(serving))
    app.include_router(anthropic_router(serving))
    app.include_router(responses_router(serving))
    app.include_router(models_router(client))
    app.include_router(tokens_router(client))
    app.include_router(state_router(client, settings, metrics))
    app.include_router(page_router())
    _add_handlers(app)
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _add_handlers(app: FastAPI) -> None:
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        complaints = [(tuple(each["loc"][1:]), each["msg"]) for each in error.errors()]
        return complaints_of(complaints).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = _refusal(request.url.path, error)
        response = problem.response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return problem_of(error).response(request.url.path)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (ProblemError, ColdstreamError, Exception):
        app.add_exception_handler(kind, failed)


def _refusal(path: str, error: HTTPException) -> Problem:
    """What the router refused: a route or method that there is not, or a body that could not be read."""
    match error.status_code:
        case 404:
            name = path.removeprefix("/v1").strip("/").removeprefix("messages/").split("/", 1)[0]
            message = _NOT_OFFERED.get(name, "there is no such route; GET /openapi.json lists them all")
            return Problem(404, message, code="unknown_route")
        case 405:
            return Problem(405, "this route does not take this method", code="method_not_allowed")
        case 408:
            return Problem(408, "the rest of the body did not come", code="slow_body")
        case 413:
            return Problem(413, "the body is too large", code="body_too_large")
        case status:
            return Problem(status, str(error.detail))
