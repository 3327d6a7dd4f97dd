"""The items of a conversation in the responses API, as messages of a chat.

A client sends all earlier items again with each request, so no type of item is an error. What the model can
be shown is read. All else becomes a placeholder, a short text in brackets: calls that OpenAI's servers ran in
the model's answer, other items in the user's turn.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from coldstream.json_text import loaded
from coldstream.server.http.chat_request import MAX_PARTS
from coldstream.server.http.chat_tools import MAX_TOOLS
from coldstream.server.http.content_parts import called, text_of_content
from coldstream.server.http.custom_tools import arguments_of_input
from coldstream.server.http.fields import Body, Name
from coldstream.server.http.problems import refused
from coldstream.server.http.responses_tools import FlatTool, OfferedTools

Fields = dict[str, Any]

_ROLES: Final = ("user", "assistant", "system", "developer")
# Items that say nothing to the model.
_LEFT_OUT: Final = frozenset(
    {"mcp_list_tools", "compaction_trigger", "configuration_update", "additional_tools"}
)
_SEAL: Final = "coldstream:"
_TOOLS: Final = TypeAdapter(list[FlatTool])


class Item(Body):
    """An item of the conversation so far; which fields count depends on its `type`."""

    model_config = ConfigDict(extra="allow")

    type: Name | None = None

    @property
    def kind(self) -> str:
        """The type, which messages and references may leave out."""
        is_reference = "id" in self.fields and "role" not in self.fields
        return self.type or ("item_reference" if is_reference else "message")

    @property
    def fields(self) -> Mapping[str, Any]:
        """Everything but the type."""
        return self.model_extra or {}


def tools_in(items: Sequence[Item]) -> list[FlatTool]:
    """Tools that items bring: found by the client's search, or added. Raises ProblemError."""
    found: list[FlatTool] = []
    for place, item in enumerate(items):
        if item.kind in ("tool_search_output", "additional_tools"):
            given = item.fields.get("tools") or []
            if isinstance(given, list) and len(given) > MAX_TOOLS:
                raise refused(
                    f"input[{place}].tools: {len(given)} tools, at most {MAX_TOOLS} are read", "input"
                )
            try:
                found += _TOOLS.validate_python(given)
            except ValidationError as error:
                what = error.errors()[0]
                raise refused(f"input[{place}].tools: {what['msg']}", "input") from error
    return found


def messages_of(items: Sequence[Item], tools: OfferedTools) -> Iterator[Fields]:
    """Messages of a chat. Raises ProblemError for an item without what its type needs, and names it."""
    history = _History(tools)
    for place, item in enumerate(items):
        yield from history.push(item, f"input[{place}]")
    yield from history.flush()


class _History:
    """Thoughts, text and calls that follow each other are one answer."""

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self._answer: Fields = {}  # without what is collected in the two lists
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._has_message = False  # whether the answer's text is more than placeholders

    def push(self, item: Item, place: str) -> Iterator[Fields]:
        """The messages that are complete with this item."""
        kind, fields = item.kind, _ItemReader(item.fields, place)
        if kind in _CALLS:
            name, arguments = _CALLS[kind](fields, self._tools)
            self._call(fields.name("call_id") or fields.name("id"), name, arguments)
        elif kind in _HOSTED:
            self._say(_HOSTED[kind](fields))
        elif kind == "reasoning":
            yield from self._flush_if_complete()
            self._answer.setdefault("role", "assistant")
            self._thoughts.append(_thought(fields))
        elif kind == "message" and fields.given.get("role") == "assistant":
            yield from self._flush_if_complete()
            self._say(fields.text("content"))
            self._has_message = True
        elif kind not in _LEFT_OUT:
            yield from self.flush()
            yield _turn(kind, fields)

    def flush(self) -> Iterator[Fields]:
        """The answer that was being collected."""
        if self._thoughts:
            self._answer["reasoning_content"] = "\n".join(filter(None, self._thoughts)) or None
        if self._texts:
            self._answer["content"] = "\n".join(filter(None, self._texts))
        if self._answer:
            yield self._answer
        self._answer, self._thoughts, self._texts, self._has_message = {}, [], [], False

    def _flush_if_complete(self) -> Iterator[Fields]:
        if self._has_message or "tool_calls" in self._answer:
            yield from self.flush()

    def _say(self, text: str) -> None:
        self._answer.setdefault("role", "assistant")
        self._texts.append(text)

    def _call(self, call_id: str | None, name: str, arguments: str) -> None:
        self._answer.setdefault("role", "assistant")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer.setdefault("tool_calls", []).append(call)


@dataclass(frozen=True)
class _ItemReader:
    """Reads fields of an item. place: the item's in errors."""

    given: Mapping[str, Any]
    place: str

    def name(self, field: str) -> str | None:
        """A field if it is a string."""
        value = self.given.get(field)
        return value if isinstance(value, str) else None

    def text(self, field: str, separator: str = "") -> str:
        """A field as text: a string, parts, an object that holds either, or any other value as JSON."""
        value = self.given.get(field)
        if isinstance(value, Mapping):
            inner = value.get("content")
            value = inner if isinstance(inner, str | list) else [value]
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list):
            return self.json(field)
        if len(value) > MAX_PARTS:
            raise refused(f"{self.place}.{field}: {len(value)} parts: at most {MAX_PARTS} are read", "input")
        return text_of_content(value, f"{self.place}.{field}", separator)

    def json(self, field: str) -> str:
        """A field as JSON; a string is JSON already, and nothing is an object without fields."""
        value = self.given.get(field)
        return value if isinstance(value, str) else self._dumped({} if value is None else value)

    def kept(self, *fields: str) -> str:
        """Those of the fields that are there, as JSON."""
        return self._dumped({name: self.given[name] for name in fields if self.given.get(name) is not None})

    def object(self, field: str) -> "_ItemReader":
        """A field that is an object; one without fields for another value."""
        value = self.given.get(field)
        return _ItemReader(value if isinstance(value, Mapping) else {}, f"{self.place}.{field}")

    def objects(self, field: str) -> "list[_ItemReader]":
        """The objects of a field that is a list."""
        value = self.given.get(field)
        every = enumerate(value if isinstance(value, list) else ())
        return [
            _ItemReader(each, f"{self.place}.{field}[{i}]") for i, each in every if isinstance(each, Mapping)
        ]

    def _dumped(self, value: Any) -> str:
        try:
            return json.dumps(value, ensure_ascii=False)
        except RecursionError:
            raise refused(f"{self.place}: it is nested too deeply", "input") from None


def sealed(thought: str) -> str:
    """A thought as `encrypted_content`, which clients send back without its text. It is no secret."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def _thought(fields: _ItemReader) -> str:
    """The text of a thought, or what was reported of it."""
    text, hidden = fields.text("content"), fields.name("encrypted_content") or ""
    if not text and hidden.startswith(_SEAL):
        with suppress(ValueError):  # damaged on its way: its summary, if there is one, is all that is known
            return base64.b64decode(hidden.removeprefix(_SEAL), validate=True).decode()
    return text or fields.text("summary", "\n\n")


def _turn(kind: str, fields: _ItemReader) -> Fields:
    """What others than the model have said."""
    if kind in _OUTPUTS:
        call_id = fields.name("call_id") or fields.name("id")
        return {"role": "tool", "tool_call_id": call_id, "content": _OUTPUTS[kind](fields)}
    if kind != "message":
        return {"role": "user", "content": _PLACEHOLDERS.get(kind, _unknown)(fields)}
    if fields.given.get("role") not in _ROLES:
        raise refused(f"{fields.place}.role: must be one of {', '.join(_ROLES)}", f"{fields.place}.role")
    return {"role": fields.given["role"], "content": fields.text("content")}


def _unknown(fields: _ItemReader) -> str:
    return "[an item of the conversation that this server cannot read]"


_Call = tuple[str, str]  # name of the function, arguments as JSON


def _function_call(fields: _ItemReader, tools: OfferedTools) -> _Call:
    return _called_name("function", fields, tools), fields.json("arguments")


def _custom_call(fields: _ItemReader, tools: OfferedTools) -> _Call:
    return _called_name("custom", fields, tools), arguments_of_input(fields.text("input"))


def _called_name(kind: str, fields: _ItemReader, tools: OfferedTools) -> str:
    name = fields.name("name")
    if not name:
        raise refused(f"{fields.place}.name: a call needs the name of its tool", f"{fields.place}.name")
    return tools.function_name(kind, name, fields.name("namespace"))


def _client_call(
    kind: str, arguments: Callable[[_ItemReader], str]
) -> Callable[[_ItemReader, OfferedTools], _Call]:
    """Reads calls of one of `CLIENT_TOOLS`."""
    return lambda fields, tools: (tools.function_name(kind, kind), arguments(fields))


# By the type of an item: the call that it is.
_CALLS: Final[Mapping[str, Callable[[_ItemReader, OfferedTools], _Call]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "tool_search_call": _client_call("tool_search", lambda fields: fields.json("arguments")),
    "local_shell_call": _client_call(
        "local_shell",
        lambda fields: fields.object("action").kept("command", "working_directory", "timeout_ms"),
    ),
    "shell_call": _client_call(
        "shell", lambda fields: fields.object("action").kept("commands", "timeout_ms", "max_output_length")
    ),
    "apply_patch_call": _client_call(
        "apply_patch", lambda fields: fields.object("operation").kept("type", "path", "diff")
    ),
}


def _loaded_tools(fields: _ItemReader) -> str:
    names = [tool.name("name") for tool in fields.objects("tools")]
    return f"[found: {', '.join(filter(None, names))}]" if any(names) else "[no tool found]"


def _shell_output(fields: _ItemReader) -> str:
    """What commands printed, and how each ended."""
    if not isinstance(fields.given.get("output"), list):
        return fields.text("output")
    texts = []
    for chunk in fields.objects("output"):
        outcome = chunk.object("outcome")
        ending = "[timeout]" if outcome.name("type") == "timeout" else ""
        if "exit_code" in outcome.given:
            ending = f"[exit code {outcome.json('exit_code')}]"
        texts += [chunk.text("stdout"), chunk.text("stderr"), ending]
    return "\n".join(filter(None, texts))


def _output(fields: _ItemReader) -> str:
    return fields.text("output")


# By the type of an item: what a call gave.
_OUTPUTS: Final[Mapping[str, Callable[[_ItemReader], str]]] = {
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "mcp_tool_call_output": _output,
    "local_shell_call_output": _output,
    "tool_search_output": _loaded_tools,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": lambda fields: _output(fields) or f"[{fields.text('status')}]",
}


def _file_search(fields: _ItemReader) -> str:
    found = [f"{each.text('filename')}: {each.text('text')}" for each in fields.objects("results")]
    return "\n".join([called("file_search", fields.given.get("queries")), *found])


def _code_interpreter(fields: _ItemReader) -> str:
    logs = [each.text("logs") for each in fields.objects("outputs")]
    return "\n".join([called("code_interpreter", fields.given.get("code")), *filter(None, logs)])


def _mcp_call(fields: _ItemReader) -> str:
    name = f"{fields.text('server_label')}.{fields.text('name')}"
    output = fields.text("output") or fields.text("error")
    try:
        arguments = loaded(fields.json("arguments"))
    except (ValueError, RecursionError):
        arguments = fields.text("arguments")
    return "\n".join(filter(None, [called(name, arguments), output]))


def _approval_request(fields: _ItemReader) -> str:
    name = f"{fields.text('server_label')}.{fields.text('name')}"
    return f"[asked whether {name} may be called with {fields.json('arguments')}]"


# By the type of an item: what stands in an answer for a call that this server offers no model.
_HOSTED: Final[Mapping[str, Callable[[_ItemReader], str]]] = {
    "web_search_call": lambda fields: called("web_search", fields.given.get("action")),
    "file_search_call": _file_search,
    "code_interpreter_call": _code_interpreter,
    "image_generation_call": lambda fields: called("image_generation", fields.given.get("revised_prompt")),
    "mcp_call": _mcp_call,
    "mcp_approval_request": _approval_request,
    "computer_call": lambda fields: called(
        "computer", fields.given.get("action") or fields.given.get("actions")
    ),
    "program": lambda fields: called("program", fields.given.get("code")),
}


def _approval_response(fields: _ItemReader) -> str:
    answer = "approved" if fields.given.get("approve") else "not approved"
    return "\n".join(filter(None, [f"[{answer}]", fields.text("reason")]))


def _agent_message(fields: _ItemReader) -> str:
    return f"[message of {fields.text('author') or 'another agent'}]\n{fields.text('content')}"


# By the type of an item: what stands for it in the user's turn.
_PLACEHOLDERS: Final[Mapping[str, Callable[[_ItemReader], str]]] = {
    "compaction": lambda _: "[earlier turns were summarised in a form that only their author can read]",
    "item_reference": lambda _: "[an earlier item that this server does not keep]",
    "mcp_approval_response": _approval_response,
    "computer_call_output": lambda fields: f"[result of computer]\n{_output(fields)}",
    "program_output": lambda fields: f"[result of program]\n{fields.text('result')}",
    "agent_message": _agent_message,
}
