"""What a request's `Grammar` is to llguidance, and whether an answer can come to an end in it.

Unit of work: one `Grammar` → the text that llguidance compiles. Knows no vocabulary: dead ends are looked for
over bytes, by a bounded number of walks.

GBNF is llama.cpp's format. llguidance's own converter makes Lark of it, but leaves some of GBNF aside. So the
text is brought into a shape that it reads as meant: escapes by number become characters, and `.` is any
character. A grammar without recursion becomes one terminal, since rules are read lexeme by lexeme while GBNF
is read character by character.
"""

import json
import random
import re
from collections.abc import Mapping
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.engine.json_schema import held_schema
from coldstream.engine.regular_languages import END_ID, byte_matcher, one_line
from coldstream.errors import InvalidRequestError

MAX_GBNF_CHARS: Final = 1 << 15
MAX_GBNF_RULES: Final = 256
_PART: Final = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<name>[\w-]+)|(?P<any>\.)|(?P<other>.)""",
    re.DOTALL,
)
_NUMBER: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\(.)", re.DOTALL)
_ROOT: Final = "root-of-the-text"
_CONTROL_TOKEN: Final = re.compile(r"⟦(<[^\s⟦⟧]+>)⟧")


def lark_of_gbnf(text: str) -> str:
    """Raises ValueError for what is no GBNF, and for a grammar that is too large."""
    if len(text) > MAX_GBNF_CHARS or text.count("::=") > MAX_GBNF_RULES:
        raise ValueError(f"a GBNF has at most {MAX_GBNF_CHARS} characters and {MAX_GBNF_RULES} rules")
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


# JSON is compact: one blank at most, behind a comma or a colon, as blanks without a limit let a model write
# nothing else. `\u` is not written, so that a name is written in one way only.
JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}

_NUM_WALKS: Final = 8
_WALK_BYTES: Final = 96
_MAX_FORCED_BYTES: Final = 4096  # bytes without a choice, after which an answer counts as endless
_CLOSING: Final = frozenset(b'"}]>\n')  # bytes that end the texts of most grammars


def grammar_source(grammar: Grammar, *, is_of_bytes: bool = False) -> str:
    """The text for llguidance. Raises InvalidRequestError for what cannot be held.

    is_of_bytes: whether control tokens are texts in it, for a vocabulary that has none.
    """
    from llguidance import LLMatcher

    try:
        _ = [text.encode() for text in (grammar.text, grammar.whitespace, grammar.calls, grammar.frame)]
    except UnicodeEncodeError:
        raise InvalidRequestError(f"grammar ({grammar.kind}): it holds half a surrogate pair") from None
    if grammar.kind in ("json_schema", "json_object"):
        source = LLMatcher.grammar_from_json_schema(json.dumps(_schema(grammar)), overrides=_options(grammar))
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = _with_control_tokens(_lark(grammar), is_of_bytes)
    if not (grammar.calls or grammar.frame):
        return source
    own = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    parts = {"calls": {"lark_grammar": grammar.calls}} if grammar.calls else {}
    frame = grammar.frame or "start: @calls | @own"
    lark = [{"lark_grammar": frame}, *({**part, "name": name} for name, part in parts.items())]
    for part in lark:
        part["lark_grammar"] = _with_control_tokens(part["lark_grammar"], is_of_bytes)
    return json.dumps({"grammars": [*lark, {**own, "name": "own"}]})


def control_token(name: str) -> str:
    """A control token in the Lark of a `Grammar`."""
    return f"⟦{name}⟧"


def _with_control_tokens(lark: str, is_of_bytes: bool) -> str:
    return _CONTROL_TOKEN.sub(lambda match: json.dumps(match[1]) if is_of_bytes else match[1], lark)


def check_ends(grammar: Grammar, source: str) -> None:
    """Raises InvalidRequestError for a grammar with a dead end: an answer can neither go on nor end there, or
    must go on for ever. Some walks over the grammar look for one, and may miss it. They are the same for each
    call.
    """
    choose = random.Random(0)
    start = byte_matcher(source)
    for _ in range(_NUM_WALKS):
        matcher, text, num_forced = start.deep_copy(), bytearray(), 0
        while len(text) < _WALK_BYTES + num_forced and not matcher.is_stopped():
            allowed = _set_bits(matcher.compute_bitmask())
            if matcher.is_error():
                raise _dead_end(grammar, bytes(text), one_line(matcher.get_error()))
            num_forced = num_forced + 1 if len(allowed) == 1 else 0
            if num_forced > _MAX_FORCED_BYTES:
                raise InvalidRequestError(f"grammar ({grammar.kind}): no answer that matches it has an end")
            closing = [byte for byte in allowed if byte in _CLOSING or byte == END_ID]
            byte = choose.choice(closing if closing and choose.random() < 0.4 else allowed)
            if byte == END_ID:
                break
            text.append(byte)
            if not matcher.consume_token(byte):
                raise _dead_end(grammar, bytes(text), one_line(matcher.get_error()))


def _dead_end(grammar: Grammar, text: bytes, reason: str) -> InvalidRequestError:
    written = text.decode("utf-8", "replace")[-60:]
    if is_dead_end(reason):
        what = f"a dead end: nothing can follow {written!r}, and the answer cannot end there"
    else:
        what = f"too complex to be followed behind {written!r}, or without an end: {reason}"
    return InvalidRequestError(f"grammar ({grammar.kind}): {what}")


def is_dead_end(reason: str) -> bool:
    """Whether an error of llguidance says that nothing can follow, and not that a limit is reached."""
    return "NoExtension" in reason


def _set_bits(mask: bytes) -> list[int]:
    return [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "lark":
        return grammar.text
    try:
        return lark_of_gbnf(grammar.text)
    except ValueError as error:
        raise InvalidRequestError(f"grammar (gbnf): {error}") from None


def _options(grammar: Grammar) -> Any:
    options: dict[str, Any] = {**JSON_OPTIONS, "lenient": grammar.is_lenient}
    if grammar.whitespace:
        options |= {"item_separator": ",", "key_separator": ":", "whitespace_pattern": grammar.whitespace}
    return options


def _schema(grammar: Grammar) -> dict[str, Any]:
    """The schema of a grammar in the form that can be held."""
    if grammar.kind == "json_object":
        return {"type": "object"}
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"grammar (json_schema): the schema is not JSON: {error}") from None
    held = held_schema(schema, "grammar (json_schema)", is_strict=not grammar.is_lenient)
    return held.alone(held.root)
