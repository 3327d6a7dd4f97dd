"""Texts that know who wrote them, and the environment of templates beside Hugging Face's."""

import json
from collections.abc import Iterable
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_snippets import CHAT, REFUSED, SNIPPETS
from transformers.utils.chat_template_utils import _compile_jinja_template

from coldstream.gguf import template_environment
from coldstream.gguf.template_environment import (
    GIVEN,
    WRITTEN,
    Refusal,
    TracedText,
    TracingEnvironment,
    joined,
    origin_of,
    runs,
    written,
)

# Who wrote a character is seen from itself, before and after a change of case.
BY_TEMPLATE = "αβγ|<\n\t"
BY_CALLER = "abß> \r"
CHARACTERS = st.text(BY_TEMPLATE + BY_CALLER, max_size=12)
SEPARATORS = st.text(BY_TEMPLATE + BY_CALLER, min_size=1, max_size=2)
COUNTS = st.integers(-1, 3)
BOUNDS = st.none() | st.integers(-14, 14)


def true_origin(text: str) -> str:
    template = BY_TEMPLATE + BY_TEMPLATE.upper()
    return "".join(WRITTEN if char in template else GIVEN for char in text)


def traced(text: str) -> TracedText:
    return TracedText(text, true_origin(text))


def either(text: str) -> str:
    """Plain text where all of it was given, as a template would meet it."""
    return traced(text) if WRITTEN in true_origin(text) else text


OPERATIONS: dict[str, Any] = {
    "+": st.tuples(CHARACTERS),
    "r+": st.tuples(CHARACTERS),
    "*": st.tuples(st.integers(-1, 3)),
    "[]": st.tuples(st.builds(slice, BOUNDS, BOUNDS, st.sampled_from([None, 1, 2, -1, -2]))),
    "for": st.just(()),
    "join": st.tuples(st.lists(CHARACTERS, max_size=4)),
    "split": st.tuples() | st.tuples(st.none() | SEPARATORS, COUNTS),
    "rsplit": st.tuples() | st.tuples(st.none() | SEPARATORS, COUNTS),
    "splitlines": st.tuples(st.booleans()),
    "partition": st.tuples(SEPARATORS),
    "rpartition": st.tuples(SEPARATORS),
    "strip": st.tuples() | st.tuples(st.none() | CHARACTERS),
    "lstrip": st.tuples() | st.tuples(st.none() | CHARACTERS),
    "rstrip": st.tuples() | st.tuples(st.none() | CHARACTERS),
    "removeprefix": st.tuples(CHARACTERS),
    "removesuffix": st.tuples(CHARACTERS),
    "replace": st.tuples(SEPARATORS, CHARACTERS) | st.tuples(SEPARATORS, CHARACTERS, COUNTS),
    "__str__": st.just(()),
    "__format__": st.just(("",)),
}
CASES = ("lower", "upper", "title", "capitalize")


def apply(name: str, text: str, arguments: tuple[Any, ...]) -> Any:
    if name == "+":
        return text + arguments[0]
    if name == "r+":
        return arguments[0] + text
    if name == "*":
        return text * arguments[0]
    if name == "[]":
        return text[arguments[0]]
    if name == "for":
        return list(text)
    return getattr(text, name)(*arguments)


def as_traced(value: Any) -> Any:
    if isinstance(value, list):
        return [either(item) for item in value]
    return either(value) if isinstance(value, str) else value


@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_operations_keep_the_text_and_who_wrote_it(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OPERATIONS)))
    text, arguments = data.draw(CHARACTERS), data.draw(OPERATIONS[name])
    result = apply(name, traced(text), tuple(map(as_traced, arguments)))
    expected = apply(name, text, arguments)
    assert result == expected
    for part in [result] if isinstance(result, str) else result:
        assert origin_of(part) == true_origin(part)


@settings(max_examples=300, deadline=None)
@given(text=CHARACTERS, name=st.sampled_from(CASES))
def test_changes_of_case_keep_who_wrote_it_unless_letters_grow(text: str, name: str) -> None:
    result, expected = getattr(traced(text), name)(), getattr(text, name)()
    assert result == expected
    kept = len(expected) == len(text)
    assert origin_of(result) == (true_origin(expected) if kept else GIVEN * len(expected))


PLACES = "".join(map(chr, range(0x4E00, 0x4E20)))
BARS = st.text("ab|", min_size=1, max_size=2)
PIECES: dict[str, Any] = {
    "split": st.tuples(st.none() | BARS, COUNTS),
    "rsplit": st.tuples(st.none() | BARS, COUNTS),
    "splitlines": st.tuples(st.booleans()),
    "partition": st.tuples(BARS),
    "rpartition": st.tuples(BARS),
}


@settings(max_examples=500, deadline=None)
@given(data=st.data(), text=st.text("ab| \n\r", max_size=16), name=st.sampled_from(sorted(PIECES)))
def test_pieces_are_those_at_their_own_places(data: st.DataObject, text: str, name: str) -> None:
    """With the place of each character as its origin: pieces that look alike may be of different origins."""
    arguments = data.draw(PIECES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_environment, "_traced", TracedText)
        pieces = getattr(TracedText(text, PLACES[: len(text)]), name)(*arguments)
    assert list(pieces) == list(getattr(text, name)(*arguments))
    end = 0
    for number, piece in enumerate(pieces):
        if not piece:
            end += len(arguments[0]) if name in ("split", "rsplit") and number and arguments[0] else 0
            continue
        start = PLACES.index(origin_of(piece)[0])
        assert origin_of(piece) == PLACES[start : start + len(piece)]
        if name in ("split", "rsplit") and arguments[0]:
            assert start == end + len(arguments[0]) * (number > 0)
        else:
            assert text[end:start].strip(" \n\r") == ""
        end = start + len(piece)


# All methods of text, so that none that a later Python adds can count given text as written unseen.
@pytest.mark.parametrize("name", [name for name in dir(str) if not name.startswith("_")])
def test_no_method_counts_given_text_as_written(name: str) -> None:
    text = "<|αb im|>\n"
    arguments: list[tuple[Any, ...]] = [(), ("|",), (14,), (14, "*"), ("b", "<"), ({98: "<|"},), (["b"],)]
    for given_arguments in arguments:
        try:
            result = getattr(traced(text), name)(*given_arguments)
        except (TypeError, KeyError, ValueError, LookupError):
            continue
        parts = result if isinstance(result, list | tuple) else [result]
        for part in parts:
            if isinstance(part, str):
                assert all(char not in BY_CALLER for char, origin in _zip(part) if origin == WRITTEN)


def _zip(text: str) -> Iterable[tuple[str, str]]:
    return zip(text, origin_of(text), strict=True)


@settings(deadline=None)
@given(texts=st.lists(CHARACTERS, max_size=5))
def test_runs_alternate_and_begin_with_given_text(texts: list[str]) -> None:
    text = joined(map(either, texts))
    assert text == "".join(texts)
    ends, position = [], 0
    for length in runs(text):
        position += length
        ends.append(position)
    owners = "".join((WRITTEN if index % 2 else GIVEN) * length for index, length in enumerate(runs(text)))
    assert owners == true_origin(text)
    assert not ends or ends[-1] == len(text)


def attempt(compile_and_render: Any) -> str:
    try:
        return f"text: {compile_and_render()}"
    except (Refusal, jinja2.TemplateError, TypeError, ValueError, SyntaxError):
        return "refused"


@pytest.mark.parametrize("source", SNIPPETS + REFUSED)
def test_text_equals_hugging_face(source: str) -> None:
    expected = attempt(lambda: _compile_jinja_template(source).render(**CHAT))
    assert (expected == "refused") == (source in REFUSED)

    def ours() -> str:
        pieces = TracingEnvironment().from_string(source).generate(CHAT, strftime_now=lambda form: "2026")
        return joined(pieces)

    assert attempt(ours) == expected


def test_filters_tests_and_globals_are_those_of_hugging_face() -> None:
    theirs, ours = _compile_jinja_template("").environment, TracingEnvironment()
    assert ours.filters.keys() == theirs.filters.keys()
    assert ours.tests.keys() == theirs.tests.keys()
    assert ours.globals.keys() | {"strftime_now"} == theirs.globals.keys()
    assert (ours.trim_blocks, ours.lstrip_blocks) == (theirs.trim_blocks, theirs.lstrip_blocks)


# What a template wrote by each way of writing, `given` being the caller's.
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|x|>{{ given }}<|y|>", ["<|x|>", "<|y|>"]),
        ("{{ '<|x|>' + given + '<|y|>' }}", ["<|x|>", "<|y|>"]),
        ("{{ given + '<|x|>' }}", ["<|x|>"]),
        ("{{ '<|' ~ 'x' ~ '|>' ~ given }}", ["<|x|>"]),
        ("{% set t = '<|x|>' %}{% set t = t + given %}{{ t | trim }}", ["<|x|>"]),
        ("{% set n = namespace(t='<|x') %}{% set n.t = n.t ~ '|>' %}{{ n.t }}", ["<|x|>"]),
        ("{% for c in '<|x|>' %}{{ c }}{% endfor %}", ["<|x|>"]),
        ("{% macro m() %}<|x|>{% endmacro %}{{ m() }}", ["<|x|>"]),
        ("{% set t %}<|x|>{{ given }}{% endset %}{{ t.split('|') | join('|') }}", ["<|x|>"]),
        ("{{ ['<|x|>', given] | join }}{{ '-'.join(['<', given, '>']) }}", ["<|x|>", "<-", "->"]),
        ("{{ '<|{}|>'.format('x') }}{{ '<|{}|>'.format(given) }}", ["<|x|><|", "|>"]),
        ("{{ {'a': '<|x|>'}['a'] }}{{ ['<|x|>'][0] }}{{ ('<|X|>' | lower) }}", ["<|x|><|x|><|x|>"]),
        ("{{ given | default('d') }}{{ nope | default('<|x|>') }}", ["<|x|>"]),
        ("{{ given | replace('g', '<') }}{{ given.join(['<', '>']) }}", []),
        ("{{ given | upper }}{{ given[1:] }}{{ given ~ given }}{{ [given] }}{{ given | tojson }}", []),
        ("{{ ['<', '>'] | join(given) }}{{ '{:{}}'.format('ab', 4) }}", ["<", ">"]),
        ("{{ {'given': '<|x|>'}[given] }}{{ {'given': ('', '<|y|>')}[given][1] }}", ["<|x|><|y|>"]),
        ("{{ '<|x|>'.replace('x', given) }}", ["<|", "|>"]),
        ("{{ '<|x|>' | safe }}{{ ('<|y|>' ~ given) | safe }}", ["<|x|><|y|>"]),
        ("{% set g = given | safe %}{{ '[x<' + g + '[/x]' }}{{ g + given }}", ["[x&lt;", "[/x]"]),
        ("{% generation %}<|x|>{{ given }}{% endgeneration %}", ["<|x|>"]),
    ],
)  # fmt: skip
def test_what_a_template_wrote(source: str, expected: list[str]) -> None:
    text = joined(TracingEnvironment().from_string(source).generate(given="given"))
    found, position = [], 0
    for index, length in enumerate(runs(text)):
        if index % 2:
            found.append(text[position : position + length])
        position += length
    assert found == expected


def test_traced_text_is_text_to_json() -> None:
    text = written("é<|")
    assert json.dumps({text: [text]}) == json.dumps({"é<|": ["é<|"]})
