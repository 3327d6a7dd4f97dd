"""The body of OpenAI's responses API, and the chat request that means the same."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from coldstream.server.http.chat_request import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from coldstream.server.http.fields import Body, Flag, Name, Number, Text, TokenCount
from coldstream.server.http.problems import refused

_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


class Part(Body):
    """A part of an item's content. Only text can be read."""

    type: Name
    text: Text | None = None


Content = Text | Annotated[list[Part], Field(max_length=MAX_PARTS)]


class Item(Body):
    """An item of the conversation so far; which fields count depends on its `type`."""

    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    summary: Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Content | None = None


class FlatTool(Body):
    """A tool. Those of other types than function are left out: the model could not call them."""

    model_config = ConfigDict(extra="allow")

    type: Name
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class FlatChoice(Body):
    """A function that has to be called."""

    type: Literal["function"]
    name: Name


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

    @property
    def functions(self) -> list[FlatTool]:
        """The tools that can be called."""
        return [tool for tool in self.tools or () if tool.type == "function"]

    def as_chat(self) -> ChatRequest:
        """The chat request that means the same. Raises ProblemError."""
        if self.previous_response_id is not None:
            raise refused(
                "previous_response_id: responses are not kept, send all items", "previous_response_id"
            )
        choice = self.tool_choice
        named = (
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, FlatChoice)
            else None
        )
        fields = {
            "messages": list(self._messages()),
            "tools": [_as_function(tool) for tool in self.functions] or None,
            "tool_choice": named or choice,
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

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = {"schema": form.json_schema, "strict": form.strict}
        return {"type": form.type, "json_schema": schema if form.type == "json_schema" else None}

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages of the items. Thoughts, text and calls that follow each other are one answer."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        answer: dict[str, Any] = {}
        for item in items:
            if item.type in ("reasoning", "function_call") or item.role == "assistant":
                if item.type != "function_call" and (answer.get("content") or "tool_calls" in answer):
                    yield answer
                    answer = {}
                _add(answer, item)
                continue
            if answer:
                yield answer
                answer = {}
            yield _turn(item)
        if answer:
            yield answer


def _add(answer: dict[str, Any], item: Item) -> None:
    """Makes `item` a part of an answer of the past."""
    answer.setdefault("role", "assistant")
    if item.type == "reasoning":
        texts = (answer.get("reasoning_content"), _text(item.content) or _text(item.summary))
        answer["reasoning_content"] = "\n".join(text for text in texts if text) or None
    elif item.type == "function_call":
        if item.name is None:
            raise refused("input: a function_call has a name", "input")
        function = {"name": item.name, "arguments": item.arguments or ""}
        answer.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )
    else:
        answer["content"] = _text(item.content)


def _turn(item: Item) -> dict[str, Any]:
    """What others than the model have said."""
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    if item.type != "message" or item.role is None:
        raise refused("input: items are messages, reasoning, function_call and function_call_output", "input")
    return {"role": item.role, "content": _text(item.content)}


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type not in _TEXT_PARTS for part in content):
        raise refused("input: only text parts are read", "input")
    return "".join(part.text or "" for part in content)


def _as_function(tool: FlatTool) -> dict[str, Any]:
    if tool.name is None:
        raise refused("tools: a function has a name", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }
