"""What a family's format of calls is to the parser of answers, and what the formats share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from coldstream.decoding import Grammar
from coldstream.engine.grammar_source import JSON_OPTIONS
from coldstream.engine.json_schema import HeldSchema, held_schema
from coldstream.errors import InvalidRequestError
from coldstream.json_text import dumped
from coldstream.server.output.tools import ToolSignatures

MAX_CALLS: Final = 128  # of one answer, as weak models write calls without end


@dataclass(frozen=True)
class Progress:
    """What a reader made of a text: pieces of JSON, how much of the text is done with, and the end."""

    fragments: tuple[str, ...]
    num_read: int
    has_ended: bool = False


class CallReader(Protocol):
    """Reads one call, whose name is known."""

    name: str

    def read(self, text: str, *, is_last: bool) -> Progress:
        """Reads on in `text`, what is left of the answer so far. What is not done with comes again, with
        more behind it; `is_last`: nothing will.
        """


@dataclass(frozen=True)
class Begun:
    """A call has begun, or several that follow each other; `num_read` characters are done with."""

    num_read: int
    readers: tuple[CallReader, ...]


class CallFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Every call begins with one of these."""

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """Whether `text`, which begins with an opener, begins a call: True is for perhaps, False for no.

        In a thought only calls of `tools` are calls.
        """

    def forced(self, tools: ToolSignatures, *, most_calls: int) -> Grammar:
        """What matches 1 to `most_calls` calls of `tools`, and nothing else.

        Raises InvalidRequestError for a tool whose schema cannot be held.
        """


def begins(text: str, words: Sequence[str]) -> str | bool:
    """The word that `text` begins with; True if it may become one, False if not."""
    found = next((word for word in words if text.startswith(word)), None)
    return found if found is not None else any(word.startswith(text) for word in words)


def num_held(text: str, words: Sequence[str]) -> int:
    """Characters at the end of `text` that may become one of `words`."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(word.startswith(end) for word in words):
            return length
    return 0


def held_parameters(tools: ToolSignatures, name: str) -> HeldSchema:
    """The schema of a tool's arguments, an object, in the form that a grammar can hold.

    What cannot be held of it is left out, unless the tool is strict. Raises InvalidRequestError.
    """
    schema = dict(tools.schemas[name])
    types = schema.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types if isinstance(types, list) else ()):
        raise InvalidRequestError(f"tools: {name}: parameters must be the schema of an object")
    return held_schema(
        {**schema, "type": "object"}, f"tools: {name}: parameters", is_strict=name in tools.strict
    )


def lark_json(schema: dict[str, Any], *, is_strict: bool) -> str:
    """What matches JSON of a held schema within a rule of Lark."""
    return f"%json {json.dumps(schema | {'x-guidance': {**JSON_OPTIONS, 'lenient': not is_strict}})}"


def lark_calls(most_calls: int, between: str = "\n") -> str:
    """The rule of an answer that is 1 to `most_calls` calls, with `between` between each two."""
    if most_calls == 1:
        return "start: call"
    return f"start: call ({f'{dumped(between)} ' if between else ''}call){{0,{most_calls - 1}}}"
