"""The body of Anthropic's messages API, and the chat request that means the same."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from coldstream.errors import shown
from coldstream.server.http.bodies import validated
from coldstream.server.http.chat_request import MAX_MESSAGES, MAX_PARTS, ChatRequest
from coldstream.server.http.chat_tools import MAX_TOOLS
from coldstream.server.http.content_parts import ContentPart, text_of_content
from coldstream.server.http.fields import Body, Flag, Name, Number, StopString, Text, TokenCount
from coldstream.server.http.problems import refused


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Body):
    """A thought of an earlier answer. Its signature is not looked at: the text alone counts."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    is_error: Flag | None = None


def _tag(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    if not isinstance(kind, str):
        return None
    return kind if kind in ("text", "thinking", "tool_use", "tool_result") else "other"


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ContentPart, Tag("other")],  # read as text, see `content_parts.py`
    Discriminator(
        _tag,
        custom_error_type="block_type",
        custom_error_message="a content block is an object with a type",
    ),
]


class AnthropicMessage(Body):
    """A message of either side, or of the system, which may come anywhere."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MAX_PARTS)]

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(Body):
    """A tool that may be called; those that Anthropic's servers run are not offered here."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    description: Text | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _is_described(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = (
                "tools of type {kind} are not offered here: leave it out, or describe it by an input_schema"
            )
            raise PydanticCustomError("tool_type", message, {"kind": shown(kind)})
        return given


class ToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Flag | None = None


class Thinking(Body):
    """Whether a thought comes before the answer, and how long it may be."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenCount | None = None


class OutputFormat(Body):
    """A schema that the answer has to satisfy."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The shape of the answer, and the effort before it."""

    effort: Name | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """The body of POST /v1/messages/count_tokens."""

    model: Name | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def as_chat(self, **more: Any) -> ChatRequest:
        """The chat request that means the same; `more` of its fields. Raises ProblemError."""
        choice, thinking = self.tool_choice, self.thinking
        is_thinking = thinking is not None and thinking.type != "disabled"
        fields: dict[str, Any] = {
            "messages": list(self._chat_messages()),
            "tools": [_as_function(tool) for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else _as_choice(choice),
            "enable_thinking": is_thinking,
            "thinking_budget": thinking.budget_tokens if thinking is not None and is_thinking else None,
        }
        if choice is not None and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        if self.messages[-1].role == "assistant":
            fields |= {"continue_final_message": True, "thinking_budget": None}
        output = self.output_config or OutputConfig()
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"schema": output.format.json_schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return validated({**fields, **more}, ChatRequest)  # texts may be too long only together

    def _chat_messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": text_of_content(self.system, "system", "\n")}
        for index, message in enumerate(self.messages):
            name = f"messages[{index}].content"
            if message.role == "assistant":
                yield _as_answer(message.blocks, name)
            elif message.role == "user":
                yield from _as_turns(message.blocks, name)
            else:
                yield {"role": "system", "content": _texts_of_system(message.blocks, name)}


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: TokenCount
    stream: Flag | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=0)] | None = None

    def as_answerable(self) -> ChatRequest:
        """`as_chat`, with how the answer is chosen and when it ends."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return self.as_chat(stop=self.stop_sequences or None, **{name: getattr(self, name) for name in names})


def _as_function(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _as_choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise refused("tool_choice: the tool that has to be called needs a name", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _as_answer(blocks: list[Any], name: str) -> dict[str, Any]:
    """An earlier answer, whose text, thoughts and calls are each in one place."""
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise refused(f"{name}: a tool_result is the user's, not the assistant's", name)
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": _text_of(blocks, name),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _as_turns(blocks: list[Any], name: str) -> Iterator[dict[str, Any]]:
    """What the user sends: each result of a tool is a message of its own, and so is the text between."""
    texts: list[Any] = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            raise refused(f"{name}: a tool_use block is the assistant's, not the user's", name)
        if not isinstance(block, ToolResultBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _text_of(texts, name, "\n")}
            texts = []
        result = text_of_content(block.content, f"{name}.content", "\n")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    if texts:
        yield {"role": "user", "content": _text_of(texts, name, "\n")}


def _texts_of_system(blocks: list[Any], name: str) -> str:
    if any(isinstance(block, ToolUseBlock | ToolResultBlock) for block in blocks):
        raise refused(f"{name}: a system message has no calls and no results of tools", name)
    return _text_of(blocks, name, "\n")


def _text_of(blocks: list[Any], name: str, separator: str = "") -> str:
    """The text of all blocks but thoughts and calls."""
    others = [block.model_dump() for block in blocks if isinstance(block, TextBlock | ContentPart)]
    return text_of_content(others, name, separator)
