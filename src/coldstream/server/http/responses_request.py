"""The body of OpenAI's responses API, and the chat request that means the same."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from coldstream.server.http.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from coldstream.server.http.fields import Body, Flag, Name, Number, Text, TokenCount
from coldstream.server.http.problems import refused
from coldstream.server.http.responses_history import Item, messages_of, tools_in
from coldstream.server.http.responses_tools import FlatTool, OfferedTool, OfferedTools, is_offered_kind

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
    """How the answer is written."""

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """How much is thought before the answer."""

    effort: Name | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    model: Name | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    stream: Flag | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: Name | None = None

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

    def as_chat(self) -> ChatRequest:
        """The chat request that means the same. Raises ProblemError."""
        if self.previous_response_id is not None:
            raise refused(
                "previous_response_id: responses are not kept, send all items", "previous_response_id"
            )
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            "messages": [*system, *messages_of(self.items, self.offered)],
            "tools": self.offered.as_functions() or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._format(),
        }
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def _choice(self) -> Any:
        """The chat's `tool_choice`. Raises ProblemError."""
        choice = self.tool_choice
        mode: Any = choice
        demanded: Sequence[OfferedTool] = self.offered.all if choice == "required" else ()
        if isinstance(choice, FlatChoice):
            if choice.type in (_ALLOWED, "namespace"):
                mode = "required" if choice.type == "namespace" else choice.mode or "auto"
                demanded = self.offered.all if mode == "required" else ()
            else:
                demanded = self.offered.chosen(choice.model_dump())
                mode = {"type": "function", "function": {"name": demanded[0].function["name"]}}
        if held := next((tool for tool in demanded if tool.has_lark), None):
            raise refused(
                f"tool_choice: a call of {held.name} cannot be demanded, as nothing holds it to its grammar:"
                " use auto, or give a regex",
                "tool_choice",
            )
        return mode

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = {"schema": form.json_schema, "strict": form.strict}
        return {"type": form.type, "json_schema": schema if form.type == "json_schema" else None}
