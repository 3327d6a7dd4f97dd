"""What went wrong with a request, as HTTP says it: a status, and a body in the shape of the API asked.

One table maps the package's errors to both; no body has a stack trace or a path of this machine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse

from coldstream.errors import (
    ColdstreamError,
    ContextFullError,
    DeadlineError,
    InvalidRequestError,
    ModelChangedError,
    ModelFormatError,
    OutOfMemoryError,
    QueueFullError,
    escape_controls,
)
from coldstream.server.client import ServiceUnavailable

_MAX_MESSAGE_CHARS: Final = 800
_BUSY_RETRY_S: Final = 1.0  # queues of an engine move within seconds
_FAULT_RETRY_S: Final = 5.0
CONTEXT_FULL: Final = "context_length_exceeded"
CONTEXT_FULL_KIND: Final = "exceed_context_size_error"  # llama.cpp's
ANTHROPIC_PREFIX: Final = "/v1/messages"


@dataclass(frozen=True)
class FullContext:
    """The sizes of a prompt that is too long."""

    num_tokens: int | None  # tokens of the prompt; None: not known
    is_exact: bool  # otherwise the prompt has at least so many
    ctx_size: int

    @property
    def fields(self) -> dict[str, int]:
        """llama.cpp's names for them."""
        return {"n_prompt_tokens": self.num_tokens or self.ctx_size, "n_ctx": self.ctx_size}

    @property
    def anthropic_message(self) -> str:
        """In the words by which clients of Anthropic's API find both numbers."""
        count = f"{'' if self.is_exact else 'at least '}{self.num_tokens or self.ctx_size}"
        return f"prompt is too long: {count} tokens > {self.ctx_size - 1} maximum"


@dataclass(frozen=True)
class Problem:
    """A refusal or failure. `kind` and `code` are the error's `type` and `code` in OpenAI's API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    full_context: FullContext | None = None

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "error": {
                "message": _clean(self.message),
                "type": self.kind,
                "param": None if self.param is None else _clean(self.param),
                "code": self.code,
                **(self.full_context.fields if self.full_context else {}),
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """In Anthropic's shape."""
        kind = _ANTHROPIC_KINDS.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        message = self.full_context.anthropic_message if self.full_context else _clean(self.message)
        return {"type": "error", "error": {"type": kind, "message": message}}

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` where another try may succeed. Official clients try again after other failures, too,
        unless they are told that it would be in vain.
        """
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": "false"} if self.status >= 500 else {}

    def body_for(self, path: str) -> dict[str, Any]:
        """In the shape of the API that `path` belongs to."""
        return self.anthropic_body if path.startswith(ANTHROPIC_PREFIX) else self.body

    def response(self, path: str) -> JSONResponse:
        """The answer to a request for `path`."""
        return JSONResponse(self.body_for(path), self.status, headers=self.headers)


_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ProblemError(Exception):
    """Ends the handling of a request with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def refused(message: str, param: str | None = None, code: str | None = None) -> ProblemError:
    """A request that can't be served as it is, for the reason of `message`."""
    return ProblemError(Problem(400, message, code=code, param=param))


def problem_of(error: Exception) -> Problem:
    """How HTTP says an error of this package; another exception is an internal error without details."""
    message = str(error)
    match error:
        case ProblemError():
            return error.problem
        case ContextFullError():
            return Problem(400, message, CONTEXT_FULL_KIND, CONTEXT_FULL, _param(message))
        case InvalidRequestError():
            return Problem(400, message, param=_param(message))
        case QueueFullError():
            return Problem(429, message, "rate_limit_error", "queue_full", retry_after_s=_BUSY_RETRY_S)
        case ServiceUnavailable():
            return _unavailable(message, "service_unavailable", error.retry_after_s)
        case DeadlineError():
            return Problem(504, message, "timeout_error", "deadline_exceeded")
        case ModelChangedError() | ModelFormatError():
            what = "the model file changed or is damaged: the server needs another start"
            return _unavailable(what, "model_unavailable", _FAULT_RETRY_S)
        case OutOfMemoryError():
            return _unavailable(message, "out_of_memory", _FAULT_RETRY_S)
        case ColdstreamError():
            return Problem(500, message, "server_error", "generation_failed")
        case _:
            return Problem(500, "an internal error of the server", "server_error", "internal_error")


def _unavailable(message: str, code: str, retry_after_s: float) -> Problem:
    return Problem(503, message, "server_error", code, retry_after_s=retry_after_s)


def _param(message: str) -> str | None:
    """The field that a message of this package begins with: `top_k must be …`, `messages[0].role: …`."""
    first = message.split(" ", 1)[0].rstrip(":,")
    name = first.split("[", 1)[0].split(".", 1)[0]
    return first if name.isidentifier() and (name != first or "_" in name or name in _FIELDS) else None


_FIELDS: Final = frozenset({"messages", "prompt", "stop", "tools", "n", "seed", "temperature", "logprobs"})


def _clean(text: str) -> str:
    text = escape_controls(text)
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 1]}…"
