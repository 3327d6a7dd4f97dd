"""The body of Anthropic's messages API, and the chat request that means the same."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from coldstream.server.http.chat_request import MAX_MESSAGES, MAX_PARTS, ChatRequest
from coldstream.server.http.chat_tools import MAX_TOOLS
from coldstream.server.http.fields import Body, Flag, Name, Number, StopString, Text, TokenCount
from coldstream.server.http.problems import refused


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Body):
    """A thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


class HiddenThinkingBlock(Body):
    """A thought that only its author could read; it is left out."""

    type: Literal["redacted_thinking"]


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
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: Flag | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | HiddenThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(Body):
    """A message of either side."""

    role: Literal["user", "assistant"]
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
    system: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def as_chat(self, **more: Any) -> ChatRequest:
        """The chat request that means the same; `more` of its fields. Raises ProblemError."""
        if self.messages[-1].role != "user":
            raise refused(
                "messages: the last one must be the user's, answers are not gone on with", "messages"
            )
        choice, thinking = self.tool_choice, self.thinking
        is_thinking = thinking is not None and thinking.type != "disabled"
        fields = {
            "messages": list(self._chat_messages()),
            "tools": [_as_function(tool) for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else _as_choice(choice),
            "enable_thinking": is_thinking,
            "thinking_budget": thinking.budget_tokens if thinking is not None and is_thinking else None,
        }
        if choice is not None and choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        output = self.output_config or OutputConfig()
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"schema": output.format.json_schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        try:
            return ChatRequest.model_validate({**fields, **more})
        except ValidationError as error:  # of texts that are too long only together
            first = error.errors()[0]
            raise refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def _chat_messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _joined(self.system)}
        for message in self.messages:
            if message.role == "assistant":
                yield _as_answer(message.blocks)
            else:
                yield from _as_turns(message.blocks)


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


def _as_answer(blocks: list[Any]) -> dict[str, Any]:
    """An earlier answer, whose text, thoughts and calls are each in one place."""
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise refused("messages: a tool_result is the user's, not the assistant's", "messages")
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _as_turns(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """What the user sends: each result of a tool is a message of its own, and so is the text between."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content or "")}
        else:
            raise refused(f"messages: a {block.type} block is the assistant's, not the user's", "messages")
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
