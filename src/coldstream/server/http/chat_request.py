"""The body of a chat completion request, and what the model's chat template is given of it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from coldstream.gguf.chat_template import SETTINGS
from coldstream.server.http.chat_tools import (
    MAX_TOOLS,
    AnyTool,
    Tool,
    ToolChoiceSetting,
    custom_names,
    demanded,
    offered,
)
from coldstream.server.http.constraint_fields import ConstraintFields
from coldstream.server.http.content_parts import ContentPart, text_of_content, text_of_part
from coldstream.server.http.fields import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    Body,
    Flag,
    Name,
    SamplingFields,
    Text,
    TokenLimit,
)
from coldstream.server.http.problems import refused

MAX_MESSAGES: Final = 8192
MAX_PARTS: Final = 1024

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class CalledFunction(Body):
    """A function that an earlier answer called. Its arguments are JSON text or an object; weak models wrote
    other things, too, and the template is given these as they are.
    """

    name: Name
    arguments: Any = None


class CustomCall(Body):
    """A tool that an earlier answer called with a text."""

    name: Name
    input: Text = ""


class EarlierCall(Body):
    """A call of an earlier answer, of a function or of a custom tool."""

    id: Name | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _calls_something(self) -> Self:
        if self.function is None and self.custom is None:
            raise PydanticCustomError("missing", "a call has a function with a name, or a custom tool")
        return self

    def for_template(self) -> dict[str, Any]:
        """The call in the shape that templates read, of a function."""
        if self.function is not None:
            function = {"name": self.function.name, "arguments": self.function.arguments}
        else:
            assert self.custom is not None, "checked when it was read"
            function = {"name": self.custom.name, "arguments": {"input": self.custom.input}}
        call = {"id": self.id, "type": "function", "function": function}
        return {name: value for name, value in call.items() if value is not None}


class SpokenAnswer(Body):
    """An earlier answer as sound, which is kept where it was made."""

    id: Name | None = None


class ChatMessage(Body):
    """A message. The reasoning of an earlier answer is accepted under either name."""

    role: Role
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    audio: SpokenAnswer | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS)] | None = None
    function_call: CalledFunction | None = None  # the older form of `tool_calls`
    tool_call_id: Name | None = None

    def for_template(self, index: int) -> dict[str, Any]:
        """The message, which is that of `index`, in the shape that templates read. Raises ProblemError."""
        calls = list(self.tool_calls or ())
        if self.function_call is not None:
            calls.append(EarlierCall(function=self.function_call))
        given = {
            "role": "tool" if self.role == "function" else self.role,
            "content": self._text(index),
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "reasoning": self.reasoning,
            "tool_calls": [call.for_template() for call in calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _text(self, index: int) -> str:
        text = text_of_content(self.content, f"messages[{index}].content")
        if not text and self.refusal:
            return self.refusal
        if not text and self.audio is not None:
            return text_of_part({"type": "output_audio"}, f"messages[{index}].audio")
        return text


class ChatRequest(ConstraintFields, SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceSetting | None = None
    parallel_tool_calls: Flag | None = None
    reasoning_effort: Name | None = None
    enable_thinking: Flag | None = None
    thinking_budget: Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)] | None = None
    stop_repetition: Flag | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
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
        """How many of the likeliest tokens are reported for each token; None: none."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The limit of the answer's tokens, under its newer or its older name."""
        return self.max_completion_tokens or self.max_tokens


def template_settings_of(
    request: ChatRequest, tools: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the chat template is given beside the messages, with the server's `defaults` for what the request
    leaves open. Raises ProblemError for what the template has no use for.
    """
    given = request.chat_template_kwargs or {}
    for name, value in given.items():
        if name not in SETTINGS or type(value) is not SETTINGS[name]:
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in SETTINGS.items())
            raise refused(f"chat_template_kwargs: known are {known}", "chat_template_kwargs")
    settings = {**defaults, **given}
    if request.reasoning_effort is not None and "reasoning_effort" not in given:
        settings["reasoning_effort"] = request.reasoning_effort
    if request.enable_thinking is not None:
        settings["enable_thinking"] = request.enable_thinking
    is_continued = bool(request.continue_final_message)
    if is_continued:  # what is gone on with is the answer, not a thought before it
        settings["enable_thinking"] = False
    return {
        **settings,
        "tools": tools or None,
        "continue_final_message": is_continued,
        "add_generation_prompt": _first_given(request.add_generation_prompt, not is_continued),
    }


def _first_given(given: bool | None, default: bool) -> bool:
    return default if given is None else given


def messages_for_template(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages in the shape that templates read. Raises ProblemError for a part that is none."""
    return [message.for_template(index) for index, message in enumerate(request.messages)]


def check_served(request: ChatRequest) -> None:
    """Raises ProblemError for what the API has and this server has not, and for contradictions."""
    if request.functions is not None:
        raise refused("functions: give them as tools, of type function", "functions")
    if request.audio is not None or request.modalities not in (None, ["text"]):
        raise refused("modalities: only text is generated", "modalities")
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs: only with logprobs: true", "top_logprobs")
    _ = request.demanded_call, request.custom_names, request.constraint
    if request.continue_final_message:
        _check_continued(request)


def _check_continued(request: ChatRequest) -> None:
    """The template checks the messages; a grammar would be that of a whole answer."""
    name = "continue_final_message"
    if request.constraint is not None:
        raise refused(
            f"{name}: not together with response_format or a grammar, which are for whole answers", name
        )
    if request.demanded_call:
        raise refused(f"{name}: not together with a tool_choice that demands a call", name)
