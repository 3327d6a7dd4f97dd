"""Whatever is sent as a grammar is checked or refused, and nothing else is raised."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding import Grammar
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.json_schema import MAX_DEPTH, MAX_SCHEMAS
from coldstream.errors import InvalidRequestError
from grammar_cases import opened_demo
from schema_samples import Schemas

KEYWORDS = [
    *(
        "type",
        "enum",
        "const",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "multipleOf",
    ),
    *("exclusiveMinimum", "items", "prefixItems", "minItems", "maxItems", "properties", "required", "anyOf"),
    *(
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "oneOf",
    ),
    *(
        "allOf",
        "$ref",
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "$anchor",
        "not",
        "if",
        "then",
        "uniqueItems",
    ),
    *("contains", "x-guidance", "x-lark", "additionalItems", "dependentRequired", "unevaluatedProperties"),
]
JUNK: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        10**30,
        -(2**63),
        float("inf"),
        float("nan"),
        "",
        "x",
        "(",
        "^(",
        "\ud800",
    ),
    *("#", "#/", "#/$defs/d0", "https://example.com", "integer", [], {}, [[]], {"a": 1}, [{}], {"$ref": "#"}),
]
TEXTS = {
    "regex": ["[a-z]{2,5}(x|y)*\\d", "(?i)a{1,3}", "\\p{L}+[^\\x00]"],
    "lark": [
        'start: "a" b\nb: /x+/ | C\nC: /[a-z]{1,4}/ & ~/q/',
        'start: %json {"type": "object"}',
        'start: x[suffix="e"]\nx: /(?s:.*)/',
        'start: %lark {\nstart: "a"\n}',
        '%llguidance {}\nstart: <[10]> "a" @g',
    ],
    "gbnf": ['root ::= a | "b" [0-9]*\na ::= "x" root?', 'root ::= "\\u00e9" . [^"\\\\]{2,3} # end'],
}
ALPHABET = "abx01.*+?|()[]{}^$\\/&~\"'<>:=-_,# \n\t%é\ud83d\U0001f600"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with opened_demo("none") as llm:
        yield llm


def is_served(llm: LLM, kind: Any, text: str) -> bool:
    """Whether a grammar is checked without complaint; anything else than a refusal is raised."""
    for is_lenient in (False, True):
        try:
            llm.opened.grammars.check(SamplingParams(grammar=Grammar(kind, text, is_lenient=is_lenient)))
        except InvalidRequestError:
            return False
    return True


def damaged(value: Any, choose: random.Random) -> Any:
    """A JSON value with some keys and parts replaced."""
    if choose.random() < 0.06:
        return choose.choice(JUNK)
    if isinstance(value, dict):
        parts = {
            choose.choice(KEYWORDS) if choose.random() < 0.06 else key: damaged(part, choose)
            for key, part in value.items()
        }
        return parts | ({choose.choice(KEYWORDS): choose.choice(JUNK)} if choose.random() < 0.15 else {})
    return [damaged(part, choose) for part in value] if isinstance(value, list) else value


def edited(text: str, choose: random.Random) -> str:
    """A text with some characters added, removed and repeated."""
    characters = list(text)
    for _ in range(choose.randrange(6)):
        place, other = sorted(choose.randrange(len(characters) + 1) for _ in range(2))
        if choose.random() < 0.5:
            characters[place:place] = [choose.choice(ALPHABET)]
        else:
            characters[place:other] = characters[place:other] * choose.randrange(3)
    return "".join(characters) or "x"


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_damaged_schemas(llm: LLM, seed: int) -> None:
    choose = random.Random(seed)
    is_served(llm, "json_schema", json.dumps(damaged(Schemas(choose).document(), choose)))


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(TEXTS)))
def test_edited_texts(llm: LLM, seed: int, kind: str) -> None:
    choose = random.Random(seed)
    is_served(llm, kind, edited(choose.choice(TEXTS[kind]), choose))


def nested(key: str, depth: int) -> str:
    is_list = key in ("anyOf", "allOf", "oneOf", "prefixItems")
    begin, end = (f'{{"{key}":[', "]}") if is_list else (f'{{"{key}":', "}")
    return begin * depth + "{}" + end * depth


@pytest.mark.parametrize(
    "key", ["anyOf", "allOf", "oneOf", "prefixItems", "items", "not", "additionalProperties"]
)
@pytest.mark.parametrize("depth", [MAX_DEPTH // 2, MAX_DEPTH, 900, 50_000])
def test_deep_schemas(llm: LLM, key: str, depth: int) -> None:
    assert not is_served(llm, "json_schema", nested(key, depth)) or depth < MAX_DEPTH


@pytest.mark.sharded(of="models on the CPU")
def test_large_schemas(llm: LLM) -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    options = [{"type": "object", "properties": {"k": {"enum": [i]}}, "required": ["k"]} for i in range(400)]
    for schema in (
        {"$ref": "#/$defs/d0", "$defs": chain | {"d1500": {}}},
        {"anyOf": [{}] * (MAX_SCHEMAS + 1)},
        {"oneOf": [{"type": "string"}] * 600},
        {"oneOf": options},
        {"enum": list(range(20_000))},
        {"allOf": [{"anyOf": [{"maxLength": i}, {"minimum": i}]} for i in range(30)]},
        {"type": "string", "pattern": "a" * 100_000},
        {"type": "string", "maxLength": 10**9},
        {"patternProperties": {f"^{i}": {} for i in range(300)}},
    ):
        is_served(llm, "json_schema", json.dumps(schema))


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(" * 5000 + ")" * 5000),
        ("regex", "[" * 100_000),
        ("regex", "a|" * 200_000),
        ("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
        ("lark", "start: " + "a" * 500_000),
        ("lark", "\n".join(f"r{i}: r{i + 1}" for i in range(20_000))),
        ("lark", "start: %json " + "[" * 10_000),
        ("lark", 'start: %json {"a": \n'),
        ("gbnf", "root ::= " + "(" * 10_000),
        ("gbnf", "root ::= " + "a " * 15_000),
        ("gbnf", "\n".join(f"r{i} ::= r{i + 1}" for i in range(250))),
        ("gbnf", 'root ::= "' + "x" * 400_000),
    ],
)
def test_large_and_deep_texts(llm: LLM, kind: str, text: str) -> None:
    is_served(llm, kind, text)
