"""Demanded calls satisfy the schemas of their tools, whatever a model writes along the grammar's masks."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coldstream.decoding import Grammar
from coldstream.engine.grammar_source import grammar_source
from coldstream.engine.regular_languages import byte_matcher
from coldstream.errors import InvalidRequestError
from coldstream.server.output import forced_calls
from coldstream.server.output.typed_values import finite_json
from output_samples import FAMILIES, TEMPLATES, calls_of, content_of, events_of, rendered
from schema_samples import Schemas, walked

every_family = pytest.mark.parametrize("family", FAMILIES)
seeds = st.integers(0, 2**32)


def check(value: Any, schema: Any, text: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    assert [str(error) for error in validator.iter_errors(value)] == [], (text, schema)


def tool(schema: Any, *, strict: bool = True) -> dict[str, Any]:
    return {"name": "f", "input_schema": schema, "strict": strict}


def source_of(family: str, schema: Any, *, strict: bool = True) -> str:
    return grammar_source(forced_calls(TEMPLATES[family], [tool(schema, strict=strict)]))


def is_matched(family: str, schema: Any, arguments: Any, *, strict: bool = True) -> bool:
    """Whether a call with these arguments may be written."""
    matcher = byte_matcher(source_of(family, schema, strict=strict))
    assert not matcher.is_error(), matcher.get_error()
    text = list(rendered(family, "f", arguments).encode())
    num_valid = matcher.validate_tokens(text)
    matcher.consume_tokens(text[:num_valid])
    return num_valid == len(text) and matcher.is_accepting()


@pytest.mark.sharded(of="processes")
@settings(max_examples=60)
@given(family=st.sampled_from(FAMILIES), seed=seeds)
def test_every_demanded_call_satisfies_the_schema_of_its_tool(family: str, seed: int) -> None:
    choose = random.Random(seed)
    schema = Schemas(choose).parameters()
    try:
        source = source_of(family, schema)
    except InvalidRequestError:
        assume(False)
    assume(not byte_matcher(source).is_error())
    for _ in range(2):
        text = walked(source, choose)
        if text is not None:
            events = events_of(family, [text], tools=[tool(schema)])
            assert content_of(events) == ""
            ((_, arguments),) = calls_of(events)
            check(arguments, schema, text)


@settings(max_examples=60)
@given(seed=seeds)
def test_every_answer_satisfies_the_schema_of_its_format(seed: int) -> None:
    choose = random.Random(seed)
    schema = Schemas(choose).document()
    try:
        source = grammar_source(Grammar("json_schema", json.dumps(schema)))
    except InvalidRequestError:
        assume(False)
    assume(not byte_matcher(source).is_error())
    for _ in range(2):
        text = walked(source, choose)
        if text is not None:
            check(finite_json(text, is_strict=False), schema, text)


COLOR: Any = {"$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}}}
NODE: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["name", "next"],
    "additionalProperties": False,
}


def obj(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


@every_family
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (obj({"c": {"$ref": "#/$defs/Color"}}) | COLOR, {"c": "red"}, {"c": "green"}),
        (
            obj({"s": obj({"x": {"type": "integer"}}), "e": {"$ref": "#/properties/s"}}),
            {"s": {"x": 1}, "e": {"x": 2}},
            {"s": {"x": 1}, "e": {"x": "2"}},
        ),
        ({"type": "object", "allOf": [obj({"a": {"type": "integer", "maximum": 9}})]}, {"a": 9}, {}),
        ({"$ref": "#/$defs/o", "$defs": {"o": obj({"a": {"const": "x"}})}}, {"a": "x"}, {"a": "y"}),
        ({"anyOf": [obj({"a": {"type": "boolean"}}), obj({"b": {"type": "null"}})]}, {"b": None}, {}),
        ({"oneOf": [obj({"k": {"const": 1}}), obj({"k": {"const": 2}})]}, {"k": 2}, {"k": 3}),
        (
            obj({"a": {"allOf": [{"type": "string", "maxLength": 3}, {"pattern": "^x"}]}}),
            {"a": "xyz"},
            {"a": "yx"},
        ),
        (obj({"a": {"type": "string", "pattern": "\\d"}}), {"a": "v1."}, {"a": "v."}),
        (obj({"a": {"type": "string", "minLength": 2, "maxLength": 3}}), {"a": "é\n"}, {"a": "abcd"}),
        (obj({"a": {"type": "string", "format": "date"}}), {"a": "2024-02-29"}, {"a": "2023-02-29"}),
        (
            obj({"a": {"type": "string", "format": "uuid"}}),
            {"a": "0" * 8 + "-0000-0000-0000-" + "0" * 12},
            {"a": "0"},
        ),
        (obj({"a": {"type": ["string", "null"], "enum": ["none", None]}}), {"a": "none"}, {"a": "nil"}),
        (
            obj({"a": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}}),
            {"a": 12345},
            {"a": "abc"},
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x y": 5}, {"x": "a"}),
        (
            {"type": "object", "patternProperties": {"^n_": {"type": "null"}}, "additionalProperties": False},
            {"n_1": None},
            {"m": None},
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["p", "q"]}, "additionalProperties": {"enum": [0]}},
            {"p": 0, "q": 0},
            {"r": 0},
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^p"}, "additionalProperties": {"enum": [0]}},
            {"pp": 0},
            {"r": 0},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "additionalProperties": False,
                "minProperties": 1,
            },
            {"b": 1},
            {},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "additionalProperties": False,
                "maxProperties": 1,
            },
            {"b": 1},
            {"a": 1, "b": 1},
        ),
        (
            obj({"tree": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": NODE}}),
            {"tree": {"name": "a", "next": {"name": "b", "next": None}}},
            {"tree": {"name": "a"}},
        ),
        (
            obj({"a": {"$ref": "#/$defs/x~1y%20z"}}, **{"$defs": {"x/y z": {"type": "null"}}}),
            {"a": None},
            {"a": 1},
        ),
        (
            obj({"a": {"$ref": "#here"}, "b": {"$anchor": "here", "type": "boolean"}}),
            {"a": True, "b": True},
            {"a": 1, "b": True},
        ),
        ({"required": ["a"], "type": "object", "additionalProperties": {"type": "boolean"}}, {"a": True}, {}),
        (
            obj({"a": {"type": "integer", "minimum": 1, "exclusiveMaximum": True, "maximum": 3}}),
            {"a": 2},
            {"a": 3},
        ),
        (
            obj({"a": {"type": "array", "items": [{"type": "null"}], "additionalItems": False}}),
            {"a": [None]},
            {"a": [None, 1]},
        ),
    ],
)
def test_a_demanded_call_is_held_to_its_schema(family: str, schema: Any, right: Any, wrong: Any) -> None:
    assert is_matched(family, schema, right)
    assert not is_matched(family, schema, wrong)


@every_family
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            obj({"a": {"type": "array", "uniqueItems": True}}),
            "tools: f: parameters at #/properties/a: uniqueItems",
        ),
        (obj({"a": {"not": {"type": "string"}}}), "#/properties/a: not cannot be held"),
        (obj({"a": {"pattern": "(?=x)"}}), "#/properties/a: pattern '(?=x)' cannot be held"),
        (obj({"a": {"format": "iri"}}), "#/properties/a: format 'iri' cannot be held"),
        (
            obj({"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}),
            "#/properties/a: oneOf cannot be held",
        ),
        ({"type": "object", "if": {}, "then": {}}, "at #: if cannot be held"),
        (
            {"type": "object", "additionalProperties": {}, "minProperties": 3},
            "at #: minProperties cannot be held",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_or_left_out(family: str, schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source_of(family, schema)
    assert said in str(caught.value)
    assert not byte_matcher(source_of(family, schema, strict=False)).is_error()


@every_family
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (obj({"a": {"$ref": "#/$defs/missing"}}), "#/properties/a: $ref '#/$defs/missing' leads nowhere"),
        (obj({"a": {"$ref": "https://example.com/a.json"}}), "is not within this schema"),
        (obj({"a": {"type": "strin"}}), "#/properties/a: type 'strin' is not one of"),
        (obj({"a": {"minLength": -1}}), "minLength must be a whole number"),
        (obj({"a": 5}), "#/properties/a: a schema is an object"),
        (obj({"a": {"enum": []}}), "#/properties/a: no answer can match it"),
        (obj({"a": {"$ref": "#"}}), "no answer can match it"),
        ({"type": "array"}, "must be the schema of an object"),
        ({"type": "object", "properties": []}, "properties must be an object"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_place(family: str, schema: Any, said: str) -> None:
    for strict in (True, False):
        with pytest.raises(InvalidRequestError) as caught:
            source_of(family, schema, strict=strict)
        assert said in str(caught.value)


def test_text_in_tags_holds_nothing_that_ends_it() -> None:
    schema = obj({"a": {"type": "string"}, "b": {"type": "string"}})
    for text in (
        "</parameter>\n<parameter=b>",
        "x\n<parameter=b>",
        "</parameter> </function>",
        "</tool_call><tool_call>",
    ):
        assert not is_matched("xml", schema, {"a": text, "b": ""}), text
    for text in (
        "</parameter>",
        "<function=f>",
        "</function>\n</tool_call>",
        "a <parameter=b>",
        "<tool_call>",
    ):
        assert is_matched("xml", schema, {"a": text, "b": ""}), text
