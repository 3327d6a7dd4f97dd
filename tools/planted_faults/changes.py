"""What a fault changes.

A change names a piece of a function by its kind and its number among those of its kind. In Python the kinds
are those of `python_pieces.py`; elsewhere a piece is a sequence of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Change:
    """The `nth` piece `at` of a function becomes `to`; None: it is dropped."""

    at: str
    nth: int = 1
    to: str | None = None


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a source become `text`. old: what stands there says, whatever its layout."""

    start: int
    end: int
    text: str
    old: str


def edited(source: bytes, edits: Sequence[Edit]) -> bytes:
    """`source` with all edits. Raises ValueError if two of them overlap."""
    ordered = sorted(edits, key=lambda edit: edit.start)
    for one, other in pairwise(ordered):
        if one.end > other.start:
            places = " and ".join(repr(source[edit.start : edit.end].decode()) for edit in (one, other))
            raise ValueError(f"{places} overlap")
    for edit in reversed(ordered):
        source = source[: edit.start] + edit.text.encode() + source[edit.end :]
    return source
