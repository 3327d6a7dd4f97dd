"""The shapes of answers, as the OpenAPI document states them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetail(_Shape):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Shape):
    """The body of every answer that is no success."""

    error: ErrorDetail


class Usage(_Shape):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessageShape(_Shape):
    """An answer."""

    role: Literal["assistant"]
    content: str | None


class ChatChoice(_Shape):
    """One of the answers."""

    index: int
    message: ChatMessageShape
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Shape):
    """The answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(_Shape):
    """One of the answers."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class Completion(_Shape):
    """The answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(_Shape):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Shape):
    """The models."""

    object: Literal["list"]
    data: list[Model]


class TokenPiece(_Shape):
    """A token with its text."""

    id: int
    piece: str


class Tokenized(_Shape):
    """Token ids, or tokens with their texts."""

    tokens: list[int] | list[TokenPiece]


class Detokenized(_Shape):
    """A text."""

    content: str


class RenderedPrompt(_Shape):
    """A conversation as the model reads it."""

    prompt: str


class HealthBody(_Shape):
    """The engine makes progress."""

    status: Literal["ok"]
    is_sleeping: bool | None = None  # true while the model is unloaded until the next request


class Props(_Shape):
    """The model, where it lies, and what is done to be fast."""

    model_alias: str
    state: str
    is_sleeping: bool
    model: dict[str, Any]
    placement: dict[str, Any]
    cache: dict[str, Any]
    speculation: dict[str, Any]


class Live(_Shape):
    """The engine's state at a moment, for pages that draw it. Rates are differences of two such states."""

    model_alias: str | None
    state: str
    clock_s: float
    statistics: dict[str, Any] | None
    experts: dict[str, Any] | None


class AnthropicErrorDetail(_Shape):
    """What was wrong."""

    type: str
    message: str


class AnthropicError(_Shape):
    """The body of every answer that is no success, of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class AnthropicUsage(_Shape):
    """Counts of tokens."""

    input_tokens: int
    output_tokens: int


class AnthropicMessageShape(_Shape):
    """The answer of POST /v1/messages without `stream`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    model: str
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: AnthropicUsage


class ResponseShape(_Shape):
    """The answer of POST /v1/responses without `stream`."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]


class TokenCountShape(_Shape):
    """A count of tokens."""

    input_tokens: int


class ResponseTokensShape(_Shape):
    """A count of tokens, of OpenAI's responses."""

    object: Literal["response.input_tokens"]
    input_tokens: int


_REFUSALS = {
    400: "The request cannot be served as it is.",
    401: "A valid API key is needed.",
    403: "The Host or Origin header is not one of this server's.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is no application/json.",
    429: "Too many requests wait already.",
    431: "The headers are too large.",
    500: "Computing failed.",
    503: "There is no engine for now.",
    504: "The request was not finished by its deadline.",
}


def documented(
    answer: type[BaseModel], error: type[BaseModel] = ErrorBody, *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """A route's answers for the OpenAPI document: `answer`, what all routes refuse, as `error`, and whether
    the answer may also be a stream of events.
    """
    reference = {"schema": {"$ref": f"#/components/schemas/{error.__name__}"}}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": what, "content": {"application/json": reference}}
        for status, what in _REFUSALS.items()
    }
    # FastAPI makes a validator for each model of a route: one documents the error, the others refer to it.
    errors[400] = {"description": _REFUSALS[400], "model": error}
    events: dict[str, Any] = {"content": {"text/event-stream": {}}} if streams else {}
    return {200: {"model": answer, **events}, **errors}
