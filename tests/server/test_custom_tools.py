"""The input of a custom tool is read out of its arguments, wherever these are split."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.server.http.custom_tools import CustomInput, arguments_of_input, function_of_custom

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


def read(arguments: str, splits: list[int]) -> tuple[str, str]:
    """What was reported piece by piece, and the whole input, of arguments that come split at some places."""
    reader = CustomInput()
    places = [0, *sorted(min(split, len(arguments)) for split in splits), len(arguments)]
    reported = "".join(reader.push(arguments[a:b]) for a, b in pairwise(places))
    return reported + reader.finish(), reader.text


@given(TEXTS, st.lists(st.integers(0, 60), max_size=5), st.sampled_from(["", ' , "more": 1']))
def test_an_input_is_emitted_whole_wherever_json_is_split(text: str, splits: list[int], more: str) -> None:
    arguments = f"{arguments_of_input(text)[:-1]}{more}}}"
    assert json.loads(arguments)["input"] == text
    assert read(arguments, splits) == (text, text)


def test_an_input_is_emitted_while_it_is_written() -> None:
    reader = CustomInput()
    pieces = ['{"input": "', "*** Begin", "\\", 'n"', " }"]
    assert [reader.push(piece) for piece in pieces] == ["", "*** Begin", "", "\n", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "p"}', "p"),
        ('{"note": 1, "input": "p"}', "p"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("{}", ""),
        ("", ""),
    ],
)
def test_an_input_under_another_name_is_found(arguments: str, text: str) -> None:
    assert read(arguments, []) == (text, text)


def test_the_model_sees_the_grammar() -> None:
    lark: Any = function_of_custom("patch", "Edits files.", "lark", "start: /x+/")
    assert lark["description"] == "Edits files."
    assert lark["parameters"]["properties"]["input"]["x-lark"] == "start: /x+/"
    regex: Any = function_of_custom("number", None, "regex", "a|b")
    assert regex["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert "description" not in function_of_custom("plain", None)
