"""Values of calls get the type that the tool's schema names, and are never lost."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.server.output.typed_values import JSON_TYPES, ValueSchema, finite_json


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
        # What the schema lists is what it says.
        ({"type": ["string", "null"], "enum": ["none", "all", None]}, "none", "none"),
        ({"type": ["string", "null"], "enum": ["none", "all", None]}, "null", None),
        ({"type": ["string", "null"], "enum": ["none", "all", None]}, "None", None),
        ({"enum": ["null", None]}, "null", "null"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["true", False]}, "true", "true"),
        ({"type": "string", "enum": ["red"]}, " red\n", "red"),
        ({"type": "string", "enum": ["red"]}, '"red"', "red"),
        ({"type": "string", "enum": ["red"]}, "blue", "blue"),
        ({"anyOf": [{"enum": ["off"]}, {"type": "boolean"}]}, "off", "off"),
        ({"anyOf": [{"enum": ["off"]}, {"type": "boolean"}]}, "True", True),
        # Null only where it is allowed, and other spellings of it only where no string fits.
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": ["integer", "null"]}, "none", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "null", None),
        ({"type": "boolean"}, "TRUE", True),
        # Bounds and parts decide between readings.
        ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMinimum": 5}]}, "5", "5"),
        ({"anyOf": [{"type": "string", "maxLength": 0}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"anyOf": [{"type": "object"}, {"type": "null"}]}]}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"$ref": "#/$defs/n"}], "description": "n"}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "3", 3),
        # Line breaks and tabs in the strings of JSON.
        ({"type": "array"}, '[{"old": "a\n\tb"}]', [{"old": "a\n\tb"}]),
        ({"type": "object"}, '{"a": "\r\n"}', {"a": "\r\n"}),
        ({"type": "string"}, '{"a": "\n"}', '{"a": "\n"}'),
        (True, '"a\nb"', '"a\nb"'),
        # What is inside decides only where more than one reading is allowed.
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, '["a"]', '["a"]'),
        ({"type": "array", "items": {"type": "integer"}}, '["a"]', ["a"]),
        (
            {"anyOf": [{"type": "string"}, {"properties": {"a": {}}, "required": ["a"]}]},
            '{"b": 1}',
            '{"b": 1}',
        ),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "multipleOf": 5}]}, "7", "7"),
    ],
)
def test_values_have_the_type_of_their_schema(schema: Any, text: str, value: Any) -> None:
    whole = {"$defs": {"n": {"type": "integer"}, "a/b": {"type": "string"}}}
    read = json.loads(ValueSchema(schema, whole).json(text))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "five", "five"),
        ("integer", "NaN", "NaN"),
        ("number", "1e999", sys.float_info.max),
        ("array", "[-1e999]", [-sys.float_info.max]),
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
    assert json.loads(ValueSchema({"type": kind}, {}).json(text)) == value


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
    assert ValueSchema(schema, whole).types == JSON_TYPES
    assert json.loads(ValueSchema(schema, whole).json("5")) == 5


@given(text=st.text(max_size=20), types=st.sets(st.sampled_from(sorted(JSON_TYPES)), min_size=1))
def test_every_text_becomes_strict_json(text: str, types: set[str]) -> None:
    value = finite_json(ValueSchema({"type": sorted(types)}, {}).json(text))
    if types == {"string"}:
        assert value == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["\\ud800\n"]', '["\ufffd\\n"]'),
        ('["a\\ud83d b"]', '["a\ufffd b"]'),
        ('["\\udc00", 1]', '["\ufffd", 1]'),
        ('["\\ud83d\\ude00",1]', '["\\ud83d\\ude00",1]'),
        ('["\\\\ud83d",1]', '["\\\\ud83d",1]'),
    ],
)
def test_half_a_surrogate_pair_is_read_as_the_replacement_character(text: str, expected: str) -> None:
    assert ValueSchema({"type": "array"}, {}).json(text) == expected
