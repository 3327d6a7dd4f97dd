"""Calls as Qwen3-Coder and Qwen3.5 on write them: a tag for the function, one for each parameter.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are not escaped: strings stand there as they are, everything else as JSON. One line break on either
side of a value belongs to the tags. As a value may hold any of these tags, `</parameter>` ends one only
before the next parameter or the end of the call. Models leave out tags: calls without `<tool_call>` around
them and values without `</parameter>` at the end of a call are read, too.

Strings are told while they are written, other values when they are complete.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.server.output.call_format import Begun, Progress, begins, lark_json, num_held
from coldstream.server.output.tools import LARK, ToolSignatures
from coldstream.server.output.typed_values import quoted, typed_json, types_of

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_MAX_NAME_CHARS: Final = 256

_AFTER_FUNCTION: Final = (_PARAMETER, _FUNCTION_END, _CLOSE)
_VALUE_ENDS: Final = (f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_FUNCTION_END}", _FUNCTION_END)
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_VALUE_END: Final = re.compile(f"\n?({re.escape(_PARAMETER_END)}|{re.escape(_FUNCTION_END)})")


class XmlCalls:
    """The format; see the module's docstring."""

    openers = (_OPEN, _FUNCTION)

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`. A call without `<tool_call>` has to be one of `tools`, too."""
        start = len(_OPEN) if text.startswith(_OPEN) else 0
        start = _skip_blanks(text, start)
        tag = begins(text[start:], (_FUNCTION,))
        if not isinstance(tag, str):
            return tag and not is_last
        start += len(tag)
        end = text.find(">", start, start + _MAX_NAME_CHARS)
        if end < 0 or "\n" in text[start:end]:
            return not is_last and len(text) - start < _MAX_NAME_CHARS and "\n" not in text[start:]
        name = text[start:end].strip()
        is_known = name in tools.schemas
        if not name or not (is_known or (text.startswith(_OPEN) and not is_thinking)):
            return False
        body = _skip_blanks(text, end + 1)
        follows = begins(text[body:], _AFTER_FUNCTION)
        if not isinstance(follows, str):
            return follows and not is_last
        return Begun(body, _XmlReader(name, tools))

    def forced(self, tools: ToolSignatures, *, is_parallel: bool) -> Grammar:
        """See `CallFormat`. Parameters come in the order of the schema; those not required may be missing."""
        functions = [f"function_{i}" for i in range(len(tools.schemas))]
        head, end = quoted(f"{_OPEN}\n"), quoted(f"{_FUNCTION_END}\n{_CLOSE}")
        rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
        rules.append(f"call: {head} ({' | '.join(functions)}) {end}")
        for rule, (name, schema) in zip(functions, tools.schemas.items(), strict=True):
            rules += _function_rules(rule, name, schema)
        return Grammar("lark", "\n".join(rules))


class _XmlReader:
    """Reads the parameters of one call."""

    def __init__(self, name: str, tools: ToolSignatures) -> None:
        self.name = name
        self._tools = tools
        self._keys: set[str] = set()
        self._value: _Value | None = None  # that is being read
        self._is_closed = False  # whether only the closing tag may follow

    def read(self, text: str, *, is_last: bool) -> Progress:
        """See `CallReader`."""
        fragments: list[str] = []
        start = 0
        while True:
            before = start
            if self._is_closed:
                return self._closing(text, start, is_last, fragments)
            if self._value is not None:
                start = self._read_value(text, start, is_last, fragments)
            else:
                start, has_ended = self._read_tag(text, start, fragments)
                if has_ended:
                    return Progress(tuple(fragments), start, has_ended=True)
            if start == before and not self._is_closed:
                return Progress(tuple(fragments), start)

    def _read_tag(self, text: str, start: int, fragments: list[str]) -> tuple[int, bool]:
        """Reads blanks and a tag between parameters; where it got to, and whether the call is over."""
        tag_start = _skip_blanks(text, start)
        tag = begins(text[tag_start:], _AFTER_FUNCTION)
        if tag == _PARAMETER:
            name_start = tag_start + len(_PARAMETER)
            end = text.find(">", name_start)
            if end < 0 or len(text) == end + 1:
                return start, False
            self._begin_value(text[name_start:end].strip(), fragments)
            return end + 1 + (text[end + 1] == "\n"), False
        if not isinstance(tag, str):
            assert tag, "a value ends before a tag only"
            return start, False
        fragments.append("}" if self._keys else "{}")
        self._is_closed = tag == _FUNCTION_END
        return tag_start + len(tag), not self._is_closed

    def _begin_value(self, key: str, fragments: list[str]) -> None:
        if key in self._keys:
            self._value = _Value(None)
            return
        fragments.append(f"{', ' if self._keys else '{'}{quoted(key)}: ")
        self._keys.add(key)
        self._value = _Value(types_of(*self._tools.parameter(self.name, key)))

    def _read_value(self, text: str, start: int, is_last: bool, fragments: list[str]) -> int:
        """Reads on in a value; where it got to."""
        assert self._value is not None
        end, after = _value_end(text, start, is_last=is_last)
        fragments += self._value.push(text[start:end])
        if after is None:
            return end
        fragments += self._value.finish()
        self._value = None
        return after

    def _closing(self, text: str, start: int, is_last: bool, fragments: list[str]) -> Progress:
        """Reads the closing tag, if there is one."""
        tag_start = _skip_blanks(text, start)
        tag = begins(text[tag_start:], (_CLOSE,))
        if tag is True and not is_last:
            return Progress(tuple(fragments), start)
        after = tag_start + len(_CLOSE) if isinstance(tag, str) else len(text) if tag else start
        return Progress(tuple(fragments), after, has_ended=True)


class _Value:
    """A value of some types, as JSON: a string at once, others when they are complete. None: is left out."""

    def __init__(self, types: frozenset[str] | None) -> None:
        self._types = types
        self._is_string = types == frozenset(("string",))
        self._has_begun = False
        self._texts: list[str] = []

    def push(self, text: str) -> Iterator[str]:
        if self._types is None or not text:
            return
        if self._is_string:
            yield ("" if self._has_begun else '"') + quoted(text)[1:-1]
            self._has_begun = True
        else:
            self._texts.append(text)

    def finish(self) -> Iterator[str]:
        if self._is_string:
            yield '"' if self._has_begun else '""'
        elif self._types is not None:
            yield typed_json("".join(self._texts), self._types)


def _value_end(text: str, start: int, *, is_last: bool) -> tuple[int, int | None]:
    """How far a value certainly goes, and where the text goes on behind its end, None if that is open."""
    while (match := _VALUE_END.search(text, start)) is not None:
        tag_end = _skip_blanks(text, match.end())
        if match[1] == _PARAMETER_END:
            follows = begins(text[tag_end:], _AFTER_FUNCTION)
            if isinstance(follows, str) or (is_last and tag_end == len(text)):
                return match.start(), match.end()
        else:
            follows = begins(text[tag_end:], (_CLOSE,))
            if isinstance(follows, str):
                call_end = _skip_blanks(text, tag_end + len(_CLOSE))
                follows = begins(text[call_end:], (_OPEN,))
                if isinstance(follows, str) or (is_last and call_end == len(text)):
                    return match.start(), match.end() - len(_FUNCTION_END)
        if follows is True and not is_last:
            return match.start(), None
        start = match.end()
    held = 0 if is_last else num_held(text[start:], _VALUE_ENDS)
    return len(text) - held, None


def _skip_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()


def _function_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Rules of Lark for one function: its tag and its parameters."""
    properties = schema.get("properties")
    required = schema.get("required")
    rules, parts = [], [quoted(f"{_FUNCTION}{name}>\n")]
    for i, (key, value) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
        part = f"{rule}_{i}"
        parts.append(part if isinstance(required, list) and key in required else f"{part}?")
        rules += _parameter_rules(part, key, value, schema)
    return [f"{rule}: {' '.join(parts)}", *rules]


def _parameter_rules(rule: str, key: str, schema: Any, whole: Mapping[str, Any]) -> list[str]:
    head, end = quoted(f"{_PARAMETER}{key}>\n"), f"\n{_PARAMETER_END}\n"
    if isinstance(schema, Mapping) and isinstance(lark := schema.get(LARK), str):
        return [f"{rule}: {head} {rule}_lark {quoted(end)}", f"{rule}_lark: %lark {{\n{lark}\n}}"]
    if not isinstance(schema, Mapping) or "string" in types_of(schema, whole):
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(options, list) and options:
            texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
            return [f"{rule}: {head} ({' | '.join(quoted(text + end) for text in texts)})"]
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={quoted(end)}]: /(?s:.*)/"]
    definitions = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return [
        f"{rule}: {head} {rule}_json {quoted(end)}",
        f"{rule}_json: {lark_json({**schema, **definitions})}",
    ]
