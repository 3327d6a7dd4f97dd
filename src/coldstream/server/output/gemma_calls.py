"""Calls as gemma-4 writes them: an object with bare names, and strings between tokens of their own.

    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:42,KEY:[true],KEY:{KEY:null}}<tool_call|>

All tags are control tokens, marked in the text (`control_text.py`): a string may hold anything but them. So
a call is what lies between its tags, and it is emitted when it is complete. Models deviate where nothing else
can be meant, so this is read, too: no `call:`, names between the tokens of strings, text without them, a
missing tag before the next call, a missing brace or tag at the end of the answer. Values have the types that
the tool's schema allows.
"""

import re
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.engine.grammar_source import control_token
from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import marked
from coldstream.json_text import dumped
from coldstream.server.output.call_format import Begun, Progress, held_parameters
from coldstream.server.output.control_text import kept_marked
from coldstream.server.output.gemma_grammar import GemmaGrammar
from coldstream.server.output.object_forms import FormsError
from coldstream.server.output.parser import ThoughtTags
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import ValueSchema, finite_json, quoted

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT, THOUGHT_END, LABEL = "<|channel>", "<channel|>", "thought\n"
TOKENS: Final = kept_marked(OPEN, CLOSE, QUOTE, THOUGHT, THOUGHT_END)
THOUGHTS: Final = ThoughtTags(marked(THOUGHT), marked(THOUGHT_END), LABEL, may_repeat=True)

_NAME: Final = re.compile(r"\s*(?:call)?:?\s*([^\s{}\[\]<>:,\"]{1,256})\s*(?=[{]|$)")
_MAX_DEPTH: Final = 100
_OPEN, _CLOSE, _QUOTE = marked(OPEN), marked(CLOSE), marked(QUOTE)
_END: Final = re.compile(f"{re.escape(_CLOSE)}|{re.escape(_OPEN)}")


class GemmaCalls:
    """The format; see the module's docstring."""

    openers = (_OPEN,)

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """See `CallFormat`."""
        found = _END.search(text, len(_OPEN))
        if found is None and not is_last:
            return True
        end = -1 if found is None else found.start()
        body = text[len(_OPEN) : end if end >= 0 else len(text)]
        match = _NAME.match(body)
        if match is None or (is_thinking and match[1] not in tools.schemas):
            return False
        if end < 0 and match.end() == len(body):
            return False
        arguments = _Reader(body, match.end(), match[1], tools).read()
        if arguments is None:
            return False
        after = len(text) if found is None else found.end() if found[0] == _CLOSE else end
        return Begun(after, (_CompleteCall(match[1], arguments),))

    def forced(self, tools: ToolSignatures, *, most_calls: int) -> Grammar:
        """See `CallFormat`."""
        calls = [f"call_{i}" for i in range(len(tools.schemas))]
        more = "" if most_calls == 1 else f" (call){{0,{most_calls - 1}}}"
        rules = [
            f"start: call{more}",
            f"call: {control_token(OPEN)} ({' | '.join(calls)}) {control_token(CLOSE)}",
        ]
        for rule, name in zip(calls, tools.schemas, strict=True):
            held = held_parameters(tools, name)
            try:
                written = GemmaGrammar(rule, held, is_strict=name in tools.strict)
                rules += [f"{rule}: {quoted(f'call:{name}')} {written.root}", *written.rules]
            except (FormsError, ValueError) as error:
                raise InvalidRequestError(f"tools: {name}: the schema cannot be held, as {error}") from None
        return Grammar("lark", "\n".join(rules))


class _CompleteCall:
    """A call that has been read already."""

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self._arguments = arguments

    def read(self, text: str, *, is_last: bool) -> Progress:
        return Progress((self._arguments,), 0, has_ended=True)


class _Reader:
    """Reads the arguments of one call. What is not closed is closed at the end of the text."""

    def __init__(self, text: str, start: int, name: str, tools: ToolSignatures) -> None:
        self._text, self._at = text, start
        self._name, self._tools = name, tools

    def read(self) -> str | None:
        """The arguments as JSON; None for what is none."""
        try:
            if self._at == len(self._text):
                return "{}"
            pairs = []
            for key, written in self._members(0):
                schema = ValueSchema(*self._tools.parameter(self._name, key))
                is_text = isinstance(written, _Bare)
                pairs.append(f"{quoted(key)}: {schema.json(written.text) if is_text else dumped(written)}")
            return f"{{{', '.join(pairs)}}}" if not self._text[self._at :].strip() else None
        except (ValueError, RecursionError):
            return None

    def _members(self, depth: int) -> list[tuple[str, Any]]:
        """The names and values of the object that begins here. Raises ValueError."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._expect("{")
        found: dict[str, Any] = {}
        while not self._is_over("}"):
            key = self._key()
            value = self._value(depth)
            found.setdefault(key, value)
            self._skip(",")
        return list(found.items())

    def _key(self) -> str:
        self._blanks()
        if self._text.startswith(_QUOTE, self._at):
            key = self._string()
            self._blanks()
        else:
            end = self._text.find(":", self._at)
            if end < 0 or any(mark in self._text[self._at : end] for mark in "{}[],"):
                raise ValueError("no name")
            key, self._at = self._text[self._at : end].strip().strip("\"'"), end
        self._expect(":")
        return key

    def _value(self, depth: int) -> Any:
        self._blanks()
        if self._text.startswith(_QUOTE, self._at):
            return self._string()
        if self._text.startswith("{", self._at):
            return {key: _plain(value) for key, value in self._members(depth + 1)}
        if self._text.startswith("[", self._at):
            return self._items(depth + 1)
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ",}]":
            self._at += 1
        return _Bare(self._text[start : self._at].strip())

    def _items(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._expect("[")
        items = []
        while not self._is_over("]"):
            items.append(_plain(self._value(depth)))
            self._skip(",")
        return items

    def _string(self) -> str:
        start = self._at + len(_QUOTE)
        end = self._text.find(_QUOTE, start)
        self._at = len(self._text) if end < 0 else end + len(_QUOTE)
        return self._text[start : end if end >= 0 else len(self._text)]

    def _is_over(self, bracket: str) -> bool:
        self._blanks()
        if self._at == len(self._text):
            return True
        if self._text[self._at] == bracket:
            self._at += 1
            return True
        if self._text[self._at] in "}]":
            raise ValueError("another bracket")
        return False

    def _expect(self, char: str) -> None:
        self._blanks()
        if not self._text.startswith(char, self._at):
            raise ValueError(f"no {char}")
        self._at += 1

    def _skip(self, char: str) -> None:
        self._blanks()
        if self._text.startswith(char, self._at):
            self._at += 1

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
            self._at += 1


class _Bare:
    """A value without quotes, which its schema gives a type."""

    def __init__(self, text: str) -> None:
        self.text = text


def _plain(value: Any) -> Any:
    """A value inside of another one: what JSON says, or text."""
    if not isinstance(value, _Bare):
        return value
    try:
        return finite_json(value.text)
    except ValueError:
        return value.text
