"""Calls as Hermes, Qwen2.5 and Qwen3 write them: JSON in a tag.

    <tool_call>
    {"name": NAME, "arguments": {KEY: VALUE, …}}
    </tool_call>

A call is emitted when it is complete, as only then it is known to be JSON. Models deviate where nothing else
can be meant, so this is read, too: line breaks in strings without an escape, `parameters` for `arguments`,
arguments as JSON within a string, the shape `{"function": {"name", "arguments"}}` of OpenAI's API, several
calls in one tag or in a list, and a missing closing tag before the next call or the end of the answer.
"""

import json
import re
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.errors import InvalidRequestError
from coldstream.json_text import dumped
from coldstream.server.output.call_format import Begun, Progress, held_parameters, lark_calls, lark_json
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import finite_json, finite_json_at, quoted

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_END: Final = re.compile(f"{_CLOSE}|{_OPEN}")
_BETWEEN: Final = re.compile(r"[\s,]*")
MAX_IN_ONE_TAG: Final = 256  # calls


class HermesCalls:
    """The format, for one answer; see the module's docstring."""

    openers = (_OPEN,)

    def __init__(self) -> None:
        self._num_tried = 0  # leading characters of an undecided call without a closing tag

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`. Without the closing tag a call ends with the answer."""
        begun = self._begin(text, tools, is_last=is_last, is_thinking=is_thinking)
        if begun is not True:
            self._num_tried = 0
        return begun

    def _begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        if text[len(_OPEN) :].lstrip()[:1] not in ("{", "[", ""):
            return False
        while (match := _END.search(text, max(self._num_tried, len(_OPEN)))) is not None:
            if (begun := self._tried(text, match.start(), tools, is_thinking)) is not True:
                return begun
            self._num_tried = match.start() + 1
        self._num_tried = max(self._num_tried, len(text) - len(_CLOSE) + 1)
        if not is_last:
            return True
        begun = self._tried(text, len(text), tools, is_thinking)
        return begun is not True and begun

    def _tried(self, text: str, end: int, tools: ToolSignatures, is_thinking: bool) -> Begun | bool:
        """The calls before a tag or the end of the text at `end`; True if that lies inside a string."""
        try:
            values = _values(text[len(_OPEN) : end])
        except ValueError as error:
            return _is_inside_string(error)
        calls = [_call(value) for value in values]
        names = [None if call is None else call.name for call in calls]
        if not calls or None in names or (is_thinking and not set(names) <= set(tools.schemas)):
            return False
        after = end + len(_CLOSE) if text.startswith(_CLOSE, end) else end
        return Begun(after, tuple(call for call in calls if call is not None))

    def forced(self, tools: ToolSignatures, *, most_calls: int) -> Grammar:
        """See `CallFormat`. Raises InvalidRequestError for a Lark grammar, as text in JSON is escaped."""
        if tools.with_lark is not None:
            raise InvalidRequestError(
                f"tool_choice: a call of {tools.with_lark} cannot be demanded, as this model writes calls as"
                " JSON, in which no Lark grammar can be obeyed: leave tool_choice out, or give a regex"
            )
        calls = [f"call_{i}" for i in range(len(tools.schemas))]
        rules = [lark_calls(most_calls)]
        rules.append(
            f"call: {quoted(_OPEN + chr(10))} ({' | '.join(calls)}) {quoted('}' + chr(10) + _CLOSE)}"
        )
        for rule, name in zip(calls, tools.schemas, strict=True):
            head = quoted('{"name": ' + quoted(name) + ', "arguments": ')
            held = held_parameters(tools, name)
            schema = lark_json(held.alone(held.root), is_strict=name in tools.strict)
            rules.append(f"{rule}: {head} {schema}")
        return Grammar("lark", "\n".join(rules))


class _Complete:
    """A call that has been read already."""

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self._arguments = arguments

    def read(self, text: str, *, is_last: bool) -> Progress:
        return Progress((self._arguments,), 0, has_ended=True)


def _values(text: str) -> list[Any]:
    """The JSON values that follow each other in `text`; those of a list are on their own.

    Raises ValueError for anything else.
    """
    values: list[Any] = []
    place = _skip(text, 0)
    while place < len(text):
        value, place = finite_json_at(text, place)
        values += value if isinstance(value, list) else [value]
        place = _skip(text, place)
        if len(values) > MAX_IN_ONE_TAG:
            raise ValueError("too many calls in one tag")
    return values


def _skip(text: str, start: int) -> int:
    between = _BETWEEN.match(text, start)
    assert between is not None, "it matches nothing, too"
    return between.end()


def _call(value: Any) -> _Complete | None:
    """The call that JSON says; None if it says none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # as the API carries them
        try:
            arguments = finite_json(arguments, is_strict=False) if arguments.strip() else {}
        except ValueError:
            return None
    arguments = {} if arguments is None else arguments
    return _Complete(value["name"], dumped(arguments)) if isinstance(arguments, dict) else None


def _is_inside_string(error: ValueError) -> bool:
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")
