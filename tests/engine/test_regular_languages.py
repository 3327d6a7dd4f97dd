"""Patterns of JSON schemas as languages: what a whole match is, what occurs where, and what is empty."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.regular_languages import is_empty, literal, occurs, of_length, term, whole_match

PATTERNS = [
    *(
        "^a+$",
        "a",
        "^a|b$",
        "(^a|b$)",
        "(?:^a$)|c",
        "",
        "\\S",
        "^$|^\\d+$",
        "^a\\$$",
        "[$^]",
        "\\^",
        "^[^/]+$",
    ),
    *("^(a|b)$", "^(?:a|b)c?$", "(a)(b)", "^\\w-\\d$"),
]


@given(pattern=st.sampled_from(PATTERNS), text=st.text("ab1c/$^-\n", max_size=3))
def test_a_pattern_occurs_where_python_finds_it(pattern: str, text: str) -> None:
    """Python's `$` also stands before a last line break, which that of JSON schemas does not."""
    found = re.search(re.sub(r"(?<!\\)\$(?=$|\||\))", r"\\Z", pattern), text, re.ASCII)
    assert occurs(pattern, text) == (found is not None)


@pytest.mark.parametrize(
    "pattern", ["(?=a)", "(?<!a)b", "a^b", "x(^a)", "\\bfoo", "(a)\\1", "(a", "a)(b", "[a"]
)
def test_a_pattern_that_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        whole_match(pattern)


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="characters"):
        whole_match("a" * 20_000)


@pytest.mark.parametrize(
    ("language", "empty"),
    [
        (f"{term('score')} & ~{literal('score')}", True),
        (f"{term('score|b')} & ~{literal('score')}", False),
        (f"{term('^a*$')} & {of_length(3, None)}", False),
        (f"{term('^a$')} & {of_length(2, 3)}", True),
        (f"{literal('')} & {of_length(0, 0)}", False),
        (f"{literal('é')} & {of_length(1, 1)}", False),
    ],
)
def test_whether_a_language_is_empty(language: str, empty: bool) -> None:
    assert is_empty(language) is empty
