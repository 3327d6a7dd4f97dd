"""Calls as Hermes, Qwen2.5 and Qwen3 write them: JSON in a tag.

    <tool_call>
    {"name": NAME, "arguments": {KEY: VALUE, …}}
    </tool_call>

A call is told when it is complete, as only then it is known to be JSON. Line breaks in strings need not be
escaped: models forget it, and nothing else can be meant.
"""

import json
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.errors import InvalidRequestError
from coldstream.server.output.call_format import Begun, Progress, lark_json
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import finite_json, quoted

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class HermesCalls:
    """The format, for one answer; see the module's docstring."""

    openers = (_OPEN,)

    def __init__(self) -> None:
        self._num_tried = 0  # characters of an undecided call before which no closing tag ends it

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`. Without the closing tag a call ends with the answer."""
        begun = self._begin(text, tools, is_last=is_last, is_thinking=is_thinking)
        if begun is not True:
            self._num_tried = 0
        return begun

    def _begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        if text[len(_OPEN) :].lstrip()[:1] not in ("{", ""):
            return False
        while (end := text.find(_CLOSE, max(self._num_tried, len(_OPEN)))) >= 0:
            try:
                call = finite_json(text[len(_OPEN) : end], is_strict=False)
            except ValueError as error:
                if not _is_inside_string(error):
                    return False
                self._num_tried = end + 1
                continue
            return _begun(call, end + len(_CLOSE), tools, is_thinking=is_thinking)
        self._num_tried = max(self._num_tried, len(text) - len(_CLOSE) + 1)
        if not is_last:
            return True
        try:
            call = finite_json(text[len(_OPEN) :], is_strict=False)
        except ValueError:
            return False
        return _begun(call, len(text), tools, is_thinking=is_thinking)

    def forced(self, tools: ToolSignatures, *, is_parallel: bool) -> Grammar:
        """See `CallFormat`. Raises InvalidRequestError for a Lark grammar, as text in JSON is escaped."""
        if tools.with_lark is not None:
            raise InvalidRequestError(
                f"tool_choice: a call of {tools.with_lark} cannot be demanded, as this model writes calls as"
                " JSON, in which no Lark grammar can be obeyed: leave tool_choice out, or give a regex"
            )
        calls = [f"call_{i}" for i in range(len(tools.schemas))]
        rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
        rules.append(
            f"call: {quoted(_OPEN + chr(10))} ({' | '.join(calls)}) {quoted('}' + chr(10) + _CLOSE)}"
        )
        for rule, (name, schema) in zip(calls, tools.schemas.items(), strict=True):
            head = quoted('{"name": ' + quoted(name) + ', "arguments": ')
            rules.append(f"{rule}: {head} {lark_json({'type': 'object', **schema})}")
        return Grammar("lark", "\n".join(rules))


class _Complete:
    """A call that has been read already."""

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self._arguments = arguments

    def read(self, text: str, *, is_last: bool) -> Progress:
        return Progress((self._arguments,), 0, has_ended=True)


def _begun(call: Any, num_read: int, tools: ToolSignatures, *, is_thinking: bool) -> Begun | bool:
    """The call that JSON says; False if it says none."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return False
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # as the API carries them
        try:
            arguments = finite_json(arguments)
        except ValueError:
            return False
    if not isinstance(arguments, dict) or (is_thinking and call["name"] not in tools.schemas):
        return False
    return Begun(num_read, _Complete(call["name"], json.dumps(arguments, ensure_ascii=False)))


def _is_inside_string(error: ValueError) -> bool:
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")
