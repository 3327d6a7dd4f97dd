"""Changes of C++, CUDA, JavaScript and CSS: a sequence of tokens in a function is replaced or dropped.

Blanks and comments are no tokens, so the layout does not matter. A function is found by its name and the
braces around it; a member's name has its class before it, as in `ExpertPool::end_step`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tools.planted_faults.changes import Change, Edit

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |\#[ ]*(?:include|define|undef|if|ifdef|ifndef|elif|else|endif|pragma|error)\b(?:\\\n|[^\n])*
    |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`
    |operator(?:\(\)|\[\]|[-+*/%<>=!&|^~]+)
    |[A-Za-z_$][\w$]*|\.?\d(?:[\w.']|(?<=[eEpP])[+-])*
    |<<=|>>=|\.\.\.|===|!==|=>|->|::|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.""",
    re.VERBOSE | re.DOTALL,
)
OPENING, CLOSING = "({[", ")}]"
TRANSPARENT = {"namespace", "extern"}
ATTRIBUTES = {"__launch_bounds__", "alignas", "__attribute__", "decltype"}
ACCESS = {"public", "private", "protected"}
CLASSES = {"struct", "class", "union", "enum"}


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int


@lru_cache(maxsize=8)  # faults of a file stand beside each other
def tokens_of(text: str) -> tuple[Token, ...]:
    """Places count characters."""
    return tuple(
        Token(found[0], found.start(), found.end()) for found in TOKEN.finditer(text) if not found["skip"]
    )


def find_edit(text: str, function: str, change: Change) -> Edit:
    """What a change does to the source. Raises ValueError if there is no such function or piece."""
    tokens = tokens_of(text)
    words = [token.text for token in tokens]
    parts = function_ranges(words, function) if function else [(0, len(words))]
    if not parts:
        raise ValueError(f"there is no {function}")
    wanted = [token.text for token in tokens_of(change.at)]
    size = len(wanted)
    found = [i for start, end in parts for i in range(start, end - size + 1) if words[i : i + size] == wanted]
    if len(found) < change.nth:
        raise ValueError(f"of {change.at} there are {len(found)}, not {change.nth}")
    first = found[change.nth - 1]
    start, end = tokens[first].start, tokens[first + size - 1].end
    new = "" if change.to is None else change.to.replace("@", text[start:end])
    in_bytes = len(text[:start].encode()), len(text[:end].encode())
    return Edit(*in_bytes, new, " ".join(wanted))


def function_ranges(words: list[str], function: str) -> list[tuple[int, int]]:
    """Indices of the tokens of all functions, and of all classes, of a name, with their heads."""
    return [(start, end) for name, start, end in scopes_of(words) if name == function]


def scopes_of(words: list[str]) -> Iterator[tuple[str, int, int]]:
    """All functions and classes: their names, and where they begin and end."""
    return _scopes(words, 0, len(words), "")


def _scopes(words: list[str], first: int, end: int, prefix: str) -> Iterator[tuple[str, int, int]]:
    head = at = first
    while at < end:
        word = words[at]
        if word == "{":
            before, inside = words[head:at], at + 1
            close = _end_of_brackets(words, at)
            at = close + 1
            if {":", "("} <= {*before} and before[-1].isidentifier():
                continue  # it initialises a member before the body
            if set(before) & TRANSPARENT and "(" not in before:
                yield from _scopes(words, inside, close, prefix)
            elif name := _name_of(before):
                yield prefix + name, head, close + 1
                if set(before) & CLASSES:
                    yield from _scopes(words, inside, close, f"{prefix}{name}::")
            head = at
        elif word == "(":
            at = _end_of_brackets(words, at) + 1
        else:
            at += 1
            if word == ";" or (word == ":" and words[at - 2] in ACCESS):
                head = at


def _name_of(words: list[str]) -> str | None:
    """The name of the function or class with this head; None if it is neither."""
    words = _without_template(words)
    if classes := [i for i, word in enumerate(words) if word in CLASSES]:
        names = [
            word
            for word in words[classes[-1] + 1 :]
            if word.isidentifier() and word not in ATTRIBUTES | CLASSES
        ]
        return names[0] if names else None
    if "(" not in words:
        return None
    at = words.index("(")
    while words[at - 1] in ATTRIBUTES:
        words = words[: at - 1] + words[_end_of_brackets(words, at) + 1 :]
        if "(" not in words:
            return None
        at = words.index("(")
    name = words[at - 1]
    if "=" in words[:at]:  # const name = (…) => {…}
        name = words[words.index("=") - 1]
    while at >= 3 and words[at - 2] == "::":
        name, at = f"{words[at - 3]}::{name}", at - 2
    return name


def _end_of_brackets(words: list[str], at: int) -> int:
    """The index of the bracket that closes the one at `at`; the last word's if none does."""
    depth = 0
    for i in range(at, len(words)):
        depth += (words[i] in OPENING) - (words[i] in CLOSING)
        if depth == 0:
            return i
    return len(words) - 1


def _without_template(words: list[str]) -> list[str]:
    while words[:2] == ["template", "<"]:
        depth = 0
        for i, word in enumerate(words):
            depth += {"<": 1, ">": -1, ">>": -2}.get(word, 0)
            if i and depth <= 0:
                break
        words = words[i + 1 :]
    return words
