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
before the next parameter, the end of the call or the next call. Models leave out tags, so two other things
end a value. One is a line that opens a parameter which the tool declares and the call does not have yet. The
other is the closing tags of the call, before another call or the end of the answer. `<tool_call>` may be
missing. A parameter whose tag has no name is left out.

Strings are emitted while they are written, other values when they are complete.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from coldstream.decoding import Grammar
from coldstream.server.output.call_format import Begun, Progress, begins, num_held
from coldstream.server.output.parameters import Arguments, ParameterValue, follows, skip_blanks
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.xml_grammar import CallMarkup, tagged_calls_grammar

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
_MAX_NAME_CHARS: Final = 256

_AFTER_FUNCTION: Final = (PARAMETER, FUNCTION_END, CLOSE)
_AFTER_VALUE: Final = (*_AFTER_FUNCTION, OPEN, FUNCTION)
_VALUE_ENDS: Final = tuple(
    f"{before}{tag}" for before in ("\n", "") for tag in (PARAMETER_END, FUNCTION_END, CLOSE, PARAMETER)
)
_AROUND_NAMES: Final = " \t\r'\""
_NAME: Final = re.compile(rf"([^<>\n]{{0,{_MAX_NAME_CHARS}}})>")
_VALUE_END: Final = re.compile(
    f"\n?({'|'.join(re.escape(tag) for tag in (PARAMETER_END, FUNCTION_END, CLOSE, PARAMETER))})"
)
# Text without what ends a value.
_TEXT: Final = (
    r"/(?s:.*)/ & ~/(?s:.*)(<\/parameter>[ \t\r\n]*<(parameter=|\/function>|\/tool_call>|tool_call>"
    r"|function=)|<\/tool_call>[ \t\r\n]*<tool_call>|\n<parameter=)(?s:.*)/ & ~/<parameter=(?s:.*)/"
)
_MARKUP: Final = CallMarkup(
    before_name=f"{OPEN}\n{FUNCTION}",
    after_name=">\n",
    before_key=PARAMETER,
    before_value=">\n",
    after_value=f"\n{PARAMETER_END}\n",
    end=f"{FUNCTION_END}\n{CLOSE}",
    between_calls="\n",
    text=_TEXT,
)


class XmlCalls:
    """The format; see the module's docstring."""

    openers = (OPEN, FUNCTION)

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`. A call without `<tool_call>` has to be one of `tools`, too."""
        start = len(OPEN) if text.startswith(OPEN) else 0
        start = skip_blanks(text, start)
        tag = begins(text[start:], (FUNCTION,))
        if not isinstance(tag, str):
            return tag and not is_last
        found = _tag_name(text, start + len(tag))
        if not isinstance(found, _TagName):
            return found and not is_last
        is_known = found.name in tools.schemas
        if not (is_known or (text.startswith(OPEN) and not is_thinking)):
            return False
        body = skip_blanks(text, found.end)
        follows = begins(text[body:], _AFTER_FUNCTION)
        if not isinstance(follows, str):
            return follows and not is_last
        return Begun(body, (_XmlReader(found.name, tools),))

    def forced(self, tools: ToolSignatures, *, most_calls: int) -> Grammar:
        """See `CallFormat`."""
        return tagged_calls_grammar(tools, _MARKUP, most_calls=most_calls)


@dataclass(frozen=True)
class _TagName:
    """The name in an opening tag, and where the text goes on behind the tag."""

    name: str
    end: int


class _XmlReader:
    """Reads the parameters of one call."""

    def __init__(self, name: str, tools: ToolSignatures) -> None:
        self.name = name
        self._arguments = Arguments(name, tools)
        self._declared = tools.parameters(name)
        self._value: ParameterValue | None = None  # the value that is being read
        self._is_value_empty = True  # whether the value is empty so far
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
        tag_start = skip_blanks(text, start)
        tag = begins(text[tag_start:], _AFTER_VALUE)
        if tag == PARAMETER:
            found = _tag_name(text, tag_start + len(PARAMETER))
            if isinstance(found, _TagName) and found.end < len(text):
                self._begin_value(found.name, fragments)
                return found.end + (text[found.end] == "\n"), False
            if found is not False:
                return start, False
            self._begin_value(None, fragments)
            return tag_start + len(PARAMETER), False
        if not isinstance(tag, str):
            assert tag, "a value ends before a tag only"
            return start, False
        fragments.append(self._arguments.end())
        self._is_closed = tag == FUNCTION_END
        return tag_start + (len(tag) if tag in _AFTER_FUNCTION else 0), not self._is_closed

    def _begin_value(self, key: str | None, fragments: list[str]) -> None:
        """None: the value has no name, and is left out."""
        self._is_value_empty = True
        self._value = self._arguments.begin(key, fragments)

    def _read_value(self, text: str, start: int, is_last: bool, fragments: list[str]) -> int:
        """Reads on in a value; where it got to."""
        assert self._value is not None
        names = self._declared - self._arguments.keys
        end, after = _value_end(text, start, names, is_empty=self._is_value_empty, is_last=is_last)
        self._is_value_empty &= end == start
        fragments += self._value.push(text[start:end])
        if after is None:
            return end
        fragments += self._value.finish()
        self._value = None
        return after

    def _closing(self, text: str, start: int, is_last: bool, fragments: list[str]) -> Progress:
        """Reads the closing tag, if there is one."""
        tag_start = skip_blanks(text, start)
        tag = begins(text[tag_start:], (CLOSE,))
        if tag is True and not is_last:
            return Progress(tuple(fragments), start)
        after = tag_start + len(CLOSE) if isinstance(tag, str) else len(text) if tag else start
        return Progress(tuple(fragments), after, has_ended=True)


def _value_end(
    text: str, start: int, names: Set[str], *, is_empty: bool, is_last: bool
) -> tuple[int, int | None]:
    """How far a value certainly goes, and where the text goes on behind its end, None if that is open.

    names: parameters that may still come. is_empty: whether nothing of the value lies before `start`.
    """
    value_start = start if is_empty else -1
    while (match := _VALUE_END.search(text, start)) is not None:
        tag = match[1]
        if tag == PARAMETER:
            is_line = match.start() in (match.start(1) - 1, value_start)
            verdict = is_line and _may_open(text, match.end(), names)
        elif tag == PARAMETER_END:
            verdict = follows(text, match.end(), _AFTER_VALUE, is_last=is_last)
        else:
            verdict = _closes_call(text, match.start(1), is_last=is_last)
        if verdict is True:
            return match.start(), match.end() if tag == PARAMETER_END else match.start(1)
        if verdict is None and not is_last:
            return match.start(), None
        start = match.end()
    held = 0 if is_last else num_held(text[start:], _VALUE_ENDS)
    return len(text) - held, None


def _may_open(text: str, start: int, names: Set[str]) -> bool | None:
    """Whether a tag whose name begins at `start` opens one of the parameters `names`; None if it may."""
    found = _tag_name(text, start)
    if isinstance(found, _TagName):
        return found.name in names
    begun = text[start:].lstrip(_AROUND_NAMES)
    return None if found and any(name.startswith(begun.rstrip(_AROUND_NAMES)) for name in names) else False


def _closes_call(text: str, start: int, *, is_last: bool) -> bool | None:
    """Whether closing tags at `start` end a call: with them the answer ends, or another call follows."""
    if text.startswith(FUNCTION_END, start):
        start = skip_blanks(text, start + len(FUNCTION_END))
        if is_last and start == len(text):
            return True
        if (closed := follows(text, start, (CLOSE,), is_last=False)) is not True:
            return closed
    return follows(text, start + len(CLOSE), (OPEN,), is_last=is_last)


def _tag_name(text: str, start: int) -> _TagName | bool:
    """The name in a tag that begins at `start`; True if it is not all there, False if there is none."""
    match = _NAME.match(text, start)
    if match is None:
        rest = text[start:]
        return len(rest) < _MAX_NAME_CHARS and not any(char in rest for char in "<>\n")
    name = match[1].strip(_AROUND_NAMES)
    return _TagName(name, match.end()) if name else False
