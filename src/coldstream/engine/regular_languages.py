"""Questions about regular languages, answered by llguidance over single bytes, without a model's vocabulary.

A language is a term of Lark: a literal, a regular expression between slashes, or these with `&`, `|` and `~`.
An answer takes about a millisecond. Raises ConfigError where llguidance is not installed.
"""

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_STATES: Final = 20_000  # of the automaton for one question
MAX_PATTERN_CHARS: Final = 1 << 14
ANYTHING: Final = "(?s:.*)"
END_ID: Final = 256
_SOURCE_LINES: Final = re.compile(r"\n\s*\d+ \| ")


@lru_cache(maxsize=1024)
def is_empty(language: str) -> bool:
    """Whether no text is in a language. Raises ValueError for one that is wrong or too large."""
    matcher = byte_matcher(f"start: TEXT\nTEXT: {language}")
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return not any(matcher.compute_bitmask()) or matcher.is_error()


def occurs(pattern: str, text: str) -> bool:
    """Whether a pattern of a JSON schema occurs in `text`. Raises ValueError for one that cannot be held."""
    return not is_empty(f"{term(whole_match(pattern))} & {literal(text)}")


def term(expression: str) -> str:
    """A regular expression in the syntax of JSON schemas as a language: the texts that it matches whole."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(expression, use_ascii='dw')}/"


def literal(text: str) -> str:
    """The language of one text."""
    return json.dumps(text) if text else "/()/"


def of_length(least: int, most: int | None) -> str:
    """The texts of `least` to `most` characters."""
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


@lru_cache(maxsize=256)
def whole_match(pattern: str) -> str:
    """An expression that matches a text, all of it, exactly if a pattern of a JSON schema occurs in it.

    Raises ValueError for a pattern that cannot be held. Its syntax is wrong, it looks ahead or back, or it
    has `^` or `$` at another place than around the whole or one of its alternatives.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern of {len(pattern)} characters, at most {MAX_PATTERN_CHARS} can be held")
    depths = [depth for _, _, depth in _structure(pattern)]
    if min(depths, default=0) < 0:
        raise ValueError("a group is closed that was not opened")
    expression = _unanchored(pattern)
    matcher = byte_matcher(f"start: TEXT\nTEXT: {term(expression)}")
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return expression


def byte_matcher(source: str) -> "LLMatcher":
    """A matcher of Lark, or of another text for llguidance, over the 256 bytes and an end token."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
    return LLMatcher(_byte_tokens(), source, log_level=0, limits=limits)


def one_line(text: str) -> str:
    """A message of llguidance without line breaks, marks, and the lines of the source that it shows."""
    return " ".join(_SOURCE_LINES.split(text.replace("<non-verbose/>", ""), maxsplit=1)[0].split())


class _Bytes:
    """The attributes that llguidance reads of a tokenizer."""

    eos_token_id = END_ID
    bos_token_id = None
    tokens = [*(bytes((value,)) for value in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = (END_ID,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokens() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), END_ID + 1, [END_ID])


def _unanchored(pattern: str, depth: int = 0) -> str:
    """The expression of `whole_match`, before its syntax is checked."""
    alternatives = []
    for alternative in _alternatives(pattern):
        inner = _inside_group(alternative)
        if inner is not None and depth < 16 and any(True for _ in _anchors(inner)):
            alternatives.append(_unanchored(inner, depth + 1))
            continue
        is_start = alternative.startswith("^")
        body = alternative[1:] if is_start else alternative
        places = list(_anchors(body))
        is_end = places[-1:] == [len(body) - 1] and body.endswith("$")
        if len(places) > is_end:
            raise ValueError("^ and $ can be held only around a pattern or one of its alternatives")
        body = body[:-1] if is_end else body
        alternatives.append(f"{'' if is_start else ANYTHING}(?:{body}){'' if is_end else ANYTHING}")
    return "|".join(f"(?:{each})" for each in alternatives)


def _structure(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Characters of an expression that are neither escaped nor in a class: place, character, and depth of
    groups around it.
    """
    depth, place, is_in_class = 0, 0, False
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 2
            continue
        if is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        else:
            depth -= char == ")"
            yield place, char, depth
            depth += char == "("
        place += 1


def _alternatives(pattern: str) -> list[str]:
    bars = [place for place, char, depth in _structure(pattern) if char == "|" and depth == 0]
    starts, ends = [0, *(bar + 1 for bar in bars)], [*bars, len(pattern)]
    return [pattern[start:end] for start, end in zip(starts, ends, strict=True)]


def _anchors(pattern: str) -> Iterator[int]:
    return (place for place, char, _ in _structure(pattern) if char in "^$")


def _inside_group(pattern: str) -> str | None:
    """What is inside of a group that is the whole pattern; None if there is no such group."""
    closing = [place for place, char, depth in _structure(pattern) if char == ")" and depth == 0]
    if not pattern.startswith("(") or closing != [len(pattern) - 1]:
        return None
    if not pattern.startswith("(?"):
        return pattern[1:-1]
    return pattern[3:-1] if pattern.startswith("(?:") else None
