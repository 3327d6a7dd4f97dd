"""The body of a chat completion request, and what the model's chat template is given of it."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from coldstream.gguf.chat_template import SETTINGS
from coldstream.server.http.chat_tools import (
    MAX_TOOLS,
    AnyTool,
    Choice,
    Tool,
    custom_names,
    demanded,
    offered,
)
from coldstream.server.http.fields import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    Body,
    Flag,
    Name,
    SamplingFields,
    Text,
    TokenCount,
)
from coldstream.server.http.problems import refused

MAX_MESSAGES: Final = 8192
MAX_PARTS: Final = 1024

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(Body):
    """A part of a message. Only text can be read."""

    model_config = ConfigDict(extra="allow")

    type: Name
    text: Text | None = None


class CalledFunction(Body):
    """A function that an earlier answer called, with its arguments as JSON text or as an object."""

    name: Name
    arguments: Text | dict[str, Any] = ""


class EarlierCall(Body):
    """A call of an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A message. The reasoning of an earlier answer is accepted under either name."""

    role: Role
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """The message in the shape that templates read; what OpenAI calls developer is their system."""
        given = self.model_dump(exclude_none=True)
        if self.role == "developer":
            given["role"] = "system"
        given.setdefault("content", "")
        return given


class JsonSchema(Body):
    """A schema that the answer has to satisfy."""

    name: Name | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_given(self) -> dict[str, Any] | None:
        """The schema of an answer, if there is one."""
        return None if self.json_schema is None else self.json_schema.json_schema


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: Flag | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Name | None = None
    enable_thinking: Flag | None = None
    thinking_budget: Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)] | None = None
    stop_repetition: Flag | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    functions: Any = None
    modalities: Any = None
    audio: Any = None

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the answer may call, as functions. Raises ProblemError."""
        return offered(self.tools or (), self.tool_choice)

    @property
    def demanded_call(self) -> str | bool:
        """The function that the answer has to call, or whether it has to call any. Raises ProblemError."""
        return demanded(self.tools or (), self.tool_choice)

    @property
    def custom_names(self) -> frozenset[str]:
        """The functions that stand for custom tools. Raises ProblemError."""
        return custom_names(self.tools or ())

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told for each; None: nothing is."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The limit of the answer's tokens, under its newer or its older name."""
        return self.max_completion_tokens or self.max_tokens


def template_settings_of(request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the chat template is given beside the messages. Raises ProblemError for what it has no use for."""
    settings = dict(request.chat_template_kwargs or {})
    for name, value in settings.items():
        if name not in SETTINGS or type(value) is not SETTINGS[name]:
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in SETTINGS.items())
            raise refused(f"chat_template_kwargs: known are {known}", "chat_template_kwargs")
    if request.reasoning_effort is not None:
        settings.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            settings.setdefault("enable_thinking", False)
    if request.enable_thinking is not None:
        settings["enable_thinking"] = request.enable_thinking
    return {**settings, "tools": tools or None, "add_generation_prompt": True}


def messages_for_template(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages in the shape that templates read. What agents send as several system messages at the
    beginning is one: templates refuse others.
    """
    messages = [message.for_template() for message in request.messages]
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) <= 1:
        return messages
    texts = [_plain_text(message["content"]) for message in leading]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[len(leading) :]]


def _plain_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise refused("messages: only text parts are read", "messages")
    return "".join(part.get("text") or "" for part in content)


def check_served(request: ChatRequest) -> None:
    """Raises ProblemError for what the API has and this server has not, and for contradictions."""
    if request.functions is not None:
        raise refused("functions: give them as tools, of type function", "functions")
    if request.audio is not None or request.modalities not in (None, ["text"]):
        raise refused("modalities: only text is generated", "modalities")
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs: only with logprobs: true", "top_logprobs")
    _ = request.demanded_call, request.custom_names
    form = request.response_format
    if form is not None and form.type != "text" and request.usable_tools:
        raise refused(
            "response_format: not together with tools, whose calls have their own", "response_format"
        )
    if form is not None and form.type == "json_schema" and form.schema_given is None:
        raise refused("response_format: json_schema needs a schema", "response_format")
