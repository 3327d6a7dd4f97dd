"""The parameters of a call that have tags of their own: from the texts between the tags to JSON.

Strings are emitted while they are written, other values when they are complete. A parameter without a name,
and one whose name has a value already, is left out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from coldstream.server.output.call_format import begins
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import ValueSchema, quoted

_BLANKS: Final = re.compile(r"[ \t\r\n]*")


class Arguments:
    """The JSON object of one call's parameters."""

    def __init__(self, name: str, tools: ToolSignatures) -> None:
        self._name, self._tools = name, tools
        self.keys: set[str] = set()  # names that have a value

    def begin(self, key: str | None, fragments: list[str]) -> "ParameterValue":
        """A value begins; its name is appended to `fragments`."""
        if key is None or key in self.keys:
            return ParameterValue(None)
        fragments.append(f"{', ' if self.keys else '{'}{quoted(key)}: ")
        self.keys.add(key)
        return ParameterValue(ValueSchema(*self._tools.parameter(self._name, key)))

    def end(self) -> str:
        """The last fragment."""
        return "}" if self.keys else "{}"


class ParameterValue:
    """A value of a schema, as JSON: a string at once, others when they are complete. None: is left out."""

    def __init__(self, schema: ValueSchema | None) -> None:
        self._schema = schema
        self._is_string = schema is not None and schema.is_any_string
        self._has_begun = False
        self._texts: list[str] = []

    def push(self, text: str) -> Iterator[str]:
        if self._schema is None or not text:
            return
        if self._is_string:
            yield ("" if self._has_begun else '"') + quoted(text)[1:-1]
            self._has_begun = True
        else:
            self._texts.append(text)

    def finish(self) -> Iterator[str]:
        if self._is_string:
            yield '"' if self._has_begun else '""'
        elif self._schema is not None:
            yield self._schema.json("".join(self._texts))


def follows(text: str, start: int, tags: Sequence[str], *, is_last: bool) -> bool | None:
    """Whether one of `tags` comes at `start`, perhaps after blanks, or the answer ends; None if it may."""
    start = skip_blanks(text, start)
    if is_last and start == len(text):
        return True
    tag = begins(text[start:], tags)
    return isinstance(tag, str) or (None if tag else False)


def skip_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()
