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
from coldstream.server.output.call_format import Begun, Progress, lark_json
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import finite_json, quoted

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class HermesCalls:
    """The format; see the module's docstring."""

    openers = (_OPEN,)

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`. Without the closing tag a call ends with the answer."""
        body = text[len(_OPEN) :].lstrip()
        if body and body[0] != "{":
            return False
        end = text.find(_CLOSE)
        while end >= 0:
            written = text[len(_OPEN) : end]
            try:
                return _begun(
                    finite_json(written, is_strict=False), end + len(_CLOSE), tools, is_thinking=is_thinking
                )
            except ValueError as error:
                if not _is_inside_string(error):
                    return False
            end = text.find(_CLOSE, end + 1)
        if not is_last:
            return True
        try:
            return _begun(finite_json(body, is_strict=False), len(text), tools, is_thinking=is_thinking)
        except ValueError:
            return False

    def forced(self, tools: ToolSignatures, *, is_parallel: bool) -> Grammar:
        """See `CallFormat`."""
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
