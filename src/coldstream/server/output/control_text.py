"""Control tokens in the text of an answer, which are marked there: see `coldstream.gguf.tokenizer.MARKS`.

So a tag that a model spells, in an explanation or in a file, is no tag. The parser of a format sees the
tokens that the format has. All others are left out, as from any text.
"""

import re
from collections.abc import Mapping
from typing import Final

from coldstream.gguf.tokenizer import MARKS, marked

_FIRST, _LAST = MARKS
_MARKED: Final = re.compile(f"{_FIRST}[^{_LAST}]*{_LAST}")
_MAX_HELD: Final = 4096 + 2  # characters of a marked token, which is one of a vocabulary


class ControlText:
    """Text with marked tokens → text for a parser. The pieces may be divided anywhere."""

    def __init__(self, kept: Mapping[str, str]) -> None:
        """kept: by token what the parser sees of it."""
        self._kept = kept
        self._held = ""

    def push(self, text: str) -> str:
        """What is known now. Never raises."""
        text = self._held + text
        self._held = ""
        if _FIRST not in text:
            return text.replace(_LAST, "")
        shown, *rest = text.split(_FIRST)
        pieces = [shown.replace(_LAST, "")]
        for index, piece in enumerate(rest):
            token, end, plain = piece.partition(_LAST)
            if not end:
                is_open = index == len(rest) - 1 and len(piece) < _MAX_HELD
                self._held = _FIRST + piece if is_open else ""
                continue
            pieces += (self._kept.get(token, ""), plain.replace(_LAST, ""))
        return "".join(pieces)


def without_control(text: str) -> str:
    """A text of whole marked tokens and others, without the tokens."""
    return _MARKED.sub("", text) if _FIRST in text else text


def kept_marked(*tokens: str) -> dict[str, str]:
    """Tokens that stay marked, so that no text is taken for one."""
    return {token: marked(token) for token in tokens}


def kept_plain(*tokens: str) -> dict[str, str]:
    """Tokens that are text for the parser, since other files of the same models have them as text."""
    return {token: token for token in tokens}
