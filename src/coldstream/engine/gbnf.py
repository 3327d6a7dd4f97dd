"""Grammars in llama.cpp's GBNF as llguidance's Lark, by llguidance's own converter.

The converter leaves some of GBNF aside, so the text is brought into a shape that it reads as meant: escapes
by number become characters, `.` is any character, and a grammar without recursion becomes one terminal, since
rules are read lexeme by lexeme while GBNF is read character by character.
"""

import re
from typing import Final

from coldstream.engine.regular_languages import require_llguidance

MAX_GBNF_CHARS: Final = 1 << 15
MAX_GBNF_RULES: Final = 256
_PART: Final = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<name>[\w-]+)|(?P<any>\.)|(?P<other>.)""",
    re.DOTALL,
)
_NUMBER: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\(.)", re.DOTALL)
_ROOT: Final = "root-of-the-text"


def lark_of_gbnf(text: str) -> str:
    """Raises ValueError for what is no GBNF, and for a grammar that is too large."""
    if len(text) > MAX_GBNF_CHARS or text.count("::=") > MAX_GBNF_RULES:
        raise ValueError(f"a GBNF has at most {MAX_GBNF_CHARS} characters and {MAX_GBNF_RULES} rules")
    require_llguidance()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    prepared = "".join(_prepared(match) for match in _PART.finditer(text))
    try:
        return gbnf_to_lark(f"{prepared}\nroot ::= {_ROOT}\n")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the converter's own are plain exceptions
        raise ValueError(str(error).replace(_ROOT, "root")) from None


def _prepared(part: re.Match[str]) -> str:
    if part["comment"]:
        return ""
    if part["literal"] or part["class"]:
        return _NUMBER.sub(_character, part[0]).replace("\r", r"\r").replace("\n", r"\n")
    if part["any"]:
        return r"[^\x00-\x00]"
    return _ROOT if part[0] == "root" else part[0]


def _character(escape: re.Match[str]) -> str:
    """An escape by number as the character that it means, others as they are."""
    number = escape[1] or escape[2] or escape[3]
    if number is None:
        return escape[0]
    character = chr(int(number, 16)) if int(number, 16) < 0x110000 else ""
    if not character or "\ud800" <= character <= "\udfff":
        raise ValueError(f"{escape[0]} is no character")
    return rf"\x{ord(character):02x}" if ord(character) < 0x80 else character
