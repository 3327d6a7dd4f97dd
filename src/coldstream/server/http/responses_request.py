"""The body of OpenAI's responses API, and the chat request that means the same."""

from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from coldstream.server.http.bodies import validated
from coldstream.server.http.chat_request import MAX_MESSAGES, ChatRequest
from coldstream.server.http.chat_tools import MAX_TOOLS
from coldstream.server.http.fields import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    Body,
    Flag,
    Name,
    Number,
    Text,
    TokenLimit,
)
from coldstream.server.http.problems import refused
from coldstream.server.http.responses_history import Item, messages_of, tools_in
from coldstream.server.http.responses_tools import FlatTool, OfferedTools, is_offered_kind

MetadataName = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]

# What would need a memory of earlier requests or of ones under way, and what to do instead.
_NOT_KEPT: Final = {
    "previous_response_id": "send all items of the conversation as input",
    "conversation": "send all items of the conversation as input",
    "prompt": "send its text as instructions or input",
    "background": "use stream, or wait for the answer",
}
# Forms of `tool_choice`: those that mean a tool, and one that means several.
_ALLOWED: Final = "allowed_tools"


class FlatChoice(Body):
    """A tool that has to be called, or with `allowed_tools` those that may be."""

    model_config = ConfigDict(extra="allow")

    type: Name
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(Body):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class TextConfig(Body):
    """How the answer is written. The model does not see `verbosity`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Body):
    """How much is thought before the answer. A `summary` is accepted: thoughts are reported as they are."""

    effort: Name | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesInput(Body):
    """A conversation: the body of POST /v1/responses/input_tokens."""

    model: Name | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    thinking_budget: Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Flag | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None

    @cached_property
    def items(self) -> list[Item]:
        """The conversation so far; a text is the user's."""
        given = self.input
        return [Item(type="message", role="user", content=given)] if isinstance(given, str) else given  # type: ignore[call-arg]

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the model may call. Raises ProblemError."""
        offered = OfferedTools(self.tools or (), tools_in(self.items))
        choice = self.tool_choice
        if not isinstance(choice, FlatChoice):
            return offered
        if choice.type == _ALLOWED:
            known = [each for each in choice.tools or () if is_offered_kind(each.get("type"))]
            return offered.only(tool for each in known for tool in offered.chosen(each))
        if choice.type == "namespace":
            return offered.only(offered.chosen(choice.model_dump()))
        return offered

    def as_chat(self, **more: Any) -> ChatRequest:
        """The chat request that means the same; `more` of its fields. Raises ProblemError."""
        for name, instead in _NOT_KEPT.items():
            if getattr(self, name):
                raise refused(f"{name}: nothing is kept between requests; {instead}", name)
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            "messages": [*system, *messages_of(self.items, self.offered)],
            "tools": self.offered.as_functions() or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "thinking_budget": self.thinking_budget,
            "response_format": self._format(),
        }
        return validated({**fields, **more}, ChatRequest)

    def _choice(self) -> Any:
        """The chat's `tool_choice`. Raises ProblemError."""
        choice = self.tool_choice
        if not isinstance(choice, FlatChoice):
            return choice
        if choice.type == _ALLOWED:
            return choice.mode or "auto"
        if choice.type == "namespace":
            return "required"
        (tool,) = self.offered.chosen(choice.model_dump())
        return {"type": "function", "function": {"name": tool.function["name"]}}

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = {"schema": form.json_schema, "strict": form.strict}
        return {"type": form.type, "json_schema": schema if form.type == "json_schema" else None}


class ResponsesRequest(ResponsesInput):
    """The body of POST /v1/responses."""

    stream: Flag | None = None
    max_output_tokens: TokenLimit = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Name], Field(max_length=64)] | None = None
    metadata: Annotated[dict[MetadataName, MetadataText], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(strict=True, ge=1)] | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    user: Name | None = None

    @property
    def wants_sealed_thoughts(self) -> bool:
        """Whether a thought comes in the form that `Item`s may bring back, too."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def num_logprobs(self) -> int | None:
        """As of `ChatRequest`."""
        is_wanted = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_wanted else None

    def as_answerable(self) -> ChatRequest:
        """`as_chat`, with how the answer is chosen and when it ends."""
        return self.as_chat(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.num_logprobs is not None,
            top_logprobs=self.num_logprobs,
        )
