"""Calls as GLM-4.5 on and Laguna write them: the name in a tag, and a tag for each key and each value.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM-4.5 and Laguna XS break the lines, GLM-4.7 and Laguna S do not. Both are read everywhere. Values are not
escaped: strings stand there as they are, blanks included, everything else as JSON. As a value may hold any of
these tags, `</arg_value>` ends one only before the next key, the end of the call or the next call. A model
may leave it out before the closing tag of a call that another call follows, or that ends the answer.

Strings are emitted while they are written, other values when they are complete.
"""

import re
from typing import Final

from coldstream.decoding import Grammar
from coldstream.server.output.call_format import Begun, Progress, begins, num_held
from coldstream.server.output.parameters import Arguments, ParameterValue, follows, skip_blanks
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.xml_grammar import CallMarkup, tagged_calls_grammar

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
KEY: Final = "<arg_key>"
KEY_END: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
VALUE_END: Final = "</arg_value>"

_MAX_NAME_CHARS: Final = 256
_AFTER_VALUE: Final = (KEY, CLOSE, OPEN)
_NAME: Final = re.compile(rf"[^\s<>(){{}}\[\]\"]{{1,{_MAX_NAME_CHARS}}}")
_VALUE_END: Final = re.compile(f"{VALUE_END}|{CLOSE}")
_TEXT: Final = (
    r"/(?s:.*)/ & ~/(?s:.*)(<\/arg_value>[ \t\r\n]*<(arg_key>|\/tool_call>|tool_call>)"
    r"|<\/tool_call>[ \t\r\n]*<tool_call>)(?s:.*)/"
)


class ArgCalls:
    """The format; see the module's docstring."""

    openers = (OPEN,)

    def __init__(self, *, has_lines: bool) -> None:
        """has_lines: whether the model breaks lines between tags, as demanded calls do then."""
        self._line = "\n" if has_lines else ""

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`."""
        start = skip_blanks(text, len(OPEN))
        match = _NAME.match(text, start)
        if match is None:
            return start == len(text) and not is_last
        body = skip_blanks(text, match.end())
        tag = begins(text[body:], (KEY, CLOSE))
        if not isinstance(tag, str):
            is_too_long = match.end() - start == _MAX_NAME_CHARS and body == len(text) == match.end()
            return tag and not is_last and not is_too_long
        if is_thinking and match[0] not in tools.schemas:
            return False
        return Begun(body, (_ArgReader(match[0], tools),))

    def forced(self, tools: ToolSignatures, *, most_calls: int) -> Grammar:
        """See `CallFormat`."""
        line = self._line
        markup = CallMarkup(
            before_name=OPEN,
            after_name=line,
            before_key=KEY,
            before_value=f"{KEY_END}{line}{VALUE}",
            after_value=f"{VALUE_END}{line}",
            end=CLOSE,
            between_calls=line,
            text=_TEXT,
        )
        return tagged_calls_grammar(tools, markup, most_calls=most_calls)


class _ArgReader:
    """Reads the keys and values of one call."""

    def __init__(self, name: str, tools: ToolSignatures) -> None:
        self.name = name
        self._arguments = Arguments(name, tools)
        self._value: ParameterValue | None = None  # the value that is being read

    def read(self, text: str, *, is_last: bool) -> Progress:
        """See `CallReader`."""
        fragments: list[str] = []
        start = 0
        while True:
            if self._value is not None:
                end, after = _value_end(text, start, is_last=is_last)
                fragments += self._value.push(text[start:end])
                if after is None:
                    return Progress(tuple(fragments), end)
                fragments += self._value.finish()
                self._value, start = None, after
            tag_start = skip_blanks(text, start)
            tag = begins(text[tag_start:], _AFTER_VALUE)
            if tag == KEY:
                after = self._read_key(text, tag_start + len(KEY), fragments, is_last)
                if after is None:
                    return Progress(tuple(fragments), start)
                start = after
            elif isinstance(tag, str):
                fragments.append(self._arguments.end())
                end = tag_start + (len(tag) if tag == CLOSE else 0)
                return Progress(tuple(fragments), end, has_ended=True)
            else:
                assert tag, "a value ends before a tag only"
                return Progress(tuple(fragments), start)

    def _read_key(self, text: str, start: int, fragments: list[str], is_last: bool) -> int | None:
        """Reads a key and the tag of its value; where the value begins, None if that is not known yet."""
        end = text.find(KEY_END, start, start + _MAX_NAME_CHARS + len(KEY_END))
        if end < 0 and len(text) < start + _MAX_NAME_CHARS + len(KEY_END):
            return None
        key = text[start:end].strip() if end >= 0 else ""
        if not key:
            self._value = self._arguments.begin(None, fragments)
            return start
        after = skip_blanks(text, end + len(KEY_END))
        tag = begins(text[after:], (VALUE,))
        if tag is True and not is_last:
            return None
        self._value = self._arguments.begin(key, fragments)
        return after + len(VALUE) if isinstance(tag, str) else end + len(KEY_END)


def _value_end(text: str, start: int, *, is_last: bool) -> tuple[int, int | None]:
    """How far a value certainly goes, and where the text goes on behind its end, None if that is open."""
    while (match := _VALUE_END.search(text, start)) is not None:
        is_closed = match[0] == VALUE_END
        ends = follows(text, match.end(), _AFTER_VALUE if is_closed else (OPEN,), is_last=is_last)
        if ends is True:
            return match.start(), match.end() if is_closed else match.start()
        if ends is None and not is_last:
            return match.start(), None
        start = match.end()
    held = 0 if is_last else num_held(text[start:], (VALUE_END, CLOSE))
    return len(text) - held, None
