"""Values of calls get the type that the tool's schema names, and are never lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.server.output.typed_values import JSON_TYPES, finite_json, typed_json, types_of


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, " 5\n", " 5\n"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "12345678901234567890123", 12345678901234567890123),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"type": ["string", "null"]}, '"quoted"', '"quoted"'),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5 apples", "5 apples"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '{"b": 1, "a": {"c": null}}', {"b": 1, "a": {"c": None}}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "7", 7),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "7", 7),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/n"}, "3", 3),
        ({"$ref": "#/$defs/a~1b"}, "3", "3"),
        (True, "3", 3),
        (True, "[3", "[3"),
        ({}, "null", None),
        ({"type": 7}, "x", "x"),
    ],
)
def test_values_have_the_type_of_their_schema(schema: Any, text: str, value: Any) -> None:
    whole = {"$defs": {"n": {"type": "integer"}, "a/b": {"type": "string"}}}
    read = json.loads(typed_json(text, types_of(schema, whole)))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "five", "five"),
        ("integer", "NaN", "NaN"),
        ("number", "1e999", "1e999"),
        ("number", "Infinity", "Infinity"),
        ("boolean", "yes", "yes"),
        ("object", "{'a': 1}", "{'a': 1}"),
        ("object", "[" * 100_000, "[" * 100_000),
        ("integer", "9" * 5000, "9" * 5000),
        ("array", '{"a": 1}', {"a": 1}),
        ("integer", "2.5", 2.5),
        ("object", "", ""),
    ],
)
def test_what_does_not_fit_stays_as_it_was_written(kind: str, text: str, value: Any) -> None:
    assert json.loads(typed_json(text, frozenset((kind,)))) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#/$defs/b"}] * 100},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/missing"},
    ],
)
def test_references_that_lead_nowhere_allow_everything(schema: Any) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/b"}] * 100}
    whole = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}, "b": loop}}
    assert types_of(schema, whole) == JSON_TYPES


@given(text=st.text(max_size=20), types=st.sets(st.sampled_from(sorted(JSON_TYPES)), min_size=1))
def test_every_text_becomes_strict_json(text: str, types: set[str]) -> None:
    value = finite_json(typed_json(text, frozenset(types)))
    if types == {"string"}:
        assert value == text
