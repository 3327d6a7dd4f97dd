"""What a family's format of calls is to the parser of answers, and what the formats share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from coldstream.decoding import Grammar
from coldstream.engine.grammar import JSON_WHITESPACE
from coldstream.server.output.tools import ToolSignatures

# A tool's schema guides what is written: what cannot be enforced of it is no reason to refuse a request.
_GUIDANCE: Final = {"lenient": True, "coerce_one_of": True, "whitespace_pattern": JSON_WHITESPACE}


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
    """A call has begun; `num_read` characters are done with."""

    num_read: int
    reader: CallReader


class CallFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Every call begins with one of these."""

    def begin(self, text: str, tools: ToolSignatures, *, is_last: bool, is_thinking: bool) -> Begun | bool:
        """Whether `text`, which begins with an opener, begins a call: True is for perhaps, False for no.

        In a thought only calls of `tools` are calls.
        """

    def forced(self, tools: ToolSignatures, *, is_parallel: bool) -> Grammar:
        """What matches one call of one of `tools`, or several if `is_parallel`, and nothing else."""


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


def lark_json(schema: dict[str, Any]) -> str:
    """What matches JSON of a schema within a rule of Lark."""
    return f"%json {json.dumps(schema | {'x-guidance': _GUIDANCE})}"
