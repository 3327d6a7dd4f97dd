"""Answers match the grammar of their request, whatever drafts and batches do; bad grammars are refused."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding import Grammar, Thought
from coldstream.engine import LLM, SamplingParams
from coldstream.engine.grammar import MAX_COMPILED, Grammars
from coldstream.engine.json_schema import MAX_PROPERTIES
from coldstream.errors import InvalidRequestError
from grammar_cases import POINT, PROMPT, answer, of_schema, opened_demo

FIVES_TO_4 = {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}
ANY_OF_FOUR = {"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(4)]}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with opened_demo("none") as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with opened_demo("ngram") as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(plain: LLM) -> Grammars:
    return plain.opened.grammars


# --- answers ---------------------------------------------------------------------------------------------


def schemas(depth: int) -> st.SearchStrategy[Any]:
    """Schemas whose values are of bounded size."""
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-300, 300),
            st.integers(0, 500),
        ),
        st.builds(
            lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
            st.integers(0, 3),
            st.integers(0, 6),
        ),
        st.sampled_from(["[a-c]{1,3}", "\\d{2}-\\d{2}"]).map(
            lambda text: {"type": "string", "pattern": f"^{text}$"}
        ),
        st.lists(st.sampled_from(["a", "b\n", 'q"', "é", 1, 2.5, True, None]), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    if depth == 0:
        return leaves
    inner = schemas(depth - 1)
    objects = st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": [name for name, wanted in zip(properties, required, strict=False) if wanted],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "b", "key", 'q"']), inner, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
    )
    arrays = st.builds(
        lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
        inner,
        st.integers(0, 1),
        st.integers(0, 2),
    )
    choices = st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})
    return st.one_of(leaves, objects, arrays, choices)


def is_valid(value: Any, schema: Any) -> bool:
    """Whether a value is one of a schema that `schemas` makes."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(known) and value == known for known in schema["enum"])
    if schema["type"] in ("boolean", "null"):
        return value is None if schema["type"] == "null" else isinstance(value, bool)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        if "pattern" in schema:
            return isinstance(value, str) and re.fullmatch(schema["pattern"].strip("^$"), value) is not None
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if schema["type"] == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(is_valid(item, schema["items"]) for item in value)
        )
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(schema["properties"])
        and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
    )


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=300)
@given(schema=schemas(2), seed=st.integers(0, 2**32))
def test_every_answer_is_one_of_its_schema(plain: LLM, schema: Any, seed: int) -> None:
    output = answer(plain, of_schema(schema), seed=seed, max_tokens=1500)
    assert output.finish_reason == "stop"
    assert is_valid(json.loads(output.text), schema), (schema, output.text)


@pytest.mark.sharded(of="models on the CPU")
@settings(max_examples=40)
@given(schema=schemas(1), seed=st.integers(0, 2**32), temperature=st.sampled_from([0, 0.9]))
def test_drafts_change_no_token(
    plain: LLM, drafting: LLM, schema: Any, seed: int, temperature: float
) -> None:
    outputs = [
        answer(llm, of_schema(schema), seed=seed, temperature=temperature) for llm in (plain, drafting)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].finish_reason == outputs[1].finish_reason == "stop"


def test_gr03_a_grammar_that_is_complete_inside_an_accepted_draft_ends_there(
    plain: LLM, drafting: LLM
) -> None:
    line = '{"x": 7, "name": "abc"}\nprint(1)\n'
    outputs = [answer(llm, of_schema(POINT), prompt=line * 12, temperature=0) for llm in (plain, drafting)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].text == '{"x": 7, "name": "abc"}'
    assert outputs[1].finish_reason == "stop"
    statistics = outputs[1].statistics.speculation
    assert statistics is not None
    assert statistics.accepted > 0


def test_gr03_a_thought_that_ends_inside_an_accepted_draft_is_followed_by_its_grammar(
    plain: LLM, drafting: LLM
) -> None:
    line = 'so\n</think>\n\n{"x": 7, "name": "abc"}\nprint(1)\n'
    outputs = [
        answer(llm, of_schema(POINT), prompt=line * 12, temperature=0, thought=Thought(is_open=True))
        for llm in (plain, drafting)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].text == line.removesuffix("\nprint(1)\n")
    assert outputs[1].finish_reason == "stop"
    statistics = outputs[1].statistics.speculation
    assert statistics is not None
    assert statistics.accepted > 0


@pytest.mark.sharded(of="models on the CPU")
def test_answers_side_by_side_are_those_alone(plain: LLM) -> None:
    each = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=60, grammar=grammar)
        for seed, grammar in enumerate(
            [of_schema(POINT), Grammar("regex", "[0-9]{3}-x"), Grammar("json_object"), None]
        )
    ]
    alone = [plain.generate(PROMPT, params)[0].token_ids for params in each]
    assert [output.token_ids for output in plain.generate([PROMPT] * 4, each)] == alone
    several = plain.generate(PROMPT, replace(each[0], n=3))[0].outputs
    assert several[0].token_ids == alone[0]
    assert all(set(json.loads(output.text)) == {"x", "name"} for output in several)


def test_each_kind_of_grammar(plain: LLM) -> None:
    assert isinstance(json.loads(answer(plain, Grammar("json_object"), temperature=0).text), dict)
    assert re.fullmatch(r"v\d{1,3}", answer(plain, Grammar("regex", r"v\d{1,3}")).text)
    lark = 'start: "(" item ("," item){1,2} ")"\nitem: /[a-z]{1,4}/'
    assert re.fullmatch(r"\([a-z]{1,4}(,[a-z]{1,4}){1,2}\)", answer(plain, Grammar("lark", lark)).text)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":[1,{"b":null}]}', True),
        ('{"a": [1, {"b": null}]}', True),
        ('{"a":  1}', False),
        ('{"a": 1 }', False),
        ('{ "a": 1}', False),
        ('{\n"a": 1}', False),
        (" {}", False),
        ("{}\n", False),
    ],
)
def test_json_is_compact(grammars: Grammars, plain: LLM, text: str, *, is_allowed: bool) -> None:
    for grammar in (Grammar("json_object"), of_schema({"type": "object"})):
        matcher = grammars.matcher(grammar)
        matched = 0
        for token_id in plain.opened.tokenizer.encode(text):
            if not matcher.accepts(token_id):
                break
            matcher.append(token_id)
            matched += 1
        assert (matched == len(plain.opened.tokenizer.encode(text))) is is_allowed


# --- bad grammars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (Grammar("json_schema", "{"), "line 1 column 2"),
        (Grammar("json_schema", "3"), "a schema is an object"),
        (Grammar("json_schema", "[" * 100_000), "not JSON"),
        (of_schema({"properties": {"a": {"type": "strin"}}}), "#/properties/a: type 'strin' is not one of"),
        (of_schema({"items": {"uniqueItems": True}}), "#/items: .*uniqueItems"),
        (of_schema({"type": "string", "pattern": "("}), "regex parse error"),
        (of_schema({"enum": []}), "at #: no answer can match"),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 2}), "at #: no answer can match"),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no answer can match"),
        (of_schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}), "more than 3000"),
        (of_schema({"allOf": [ANY_OF_FOUR] * 12}), "too large"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "(" * 60_000 + "a" + ")" * 60_000), "regex"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (Grammar("regex", r"[^\x00-\U0010ffff]"), "no answer can match"),
        (Grammar("lark", "start: foo"), "foo"),
        (Grammar("lark", "start: " + "(" * 60_000 + '"a"' + ")" * 60_000), "nested"),
        (Grammar("lark", "start: start"), "no answer can match"),
    ],
)  # fmt: skip
def test_gr01_a_bad_grammar_is_refused_with_its_place(plain: LLM, grammar: Grammar, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=place) as caught:
        answer(plain, grammar)
    assert str(caught.value).startswith("grammar (")


@pytest.mark.sharded(6)
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a+)+b"),
        Grammar("regex", "a{1,1000000}"),
        Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
        Grammar("lark", 'start: start "a" | "b"'),
        Grammar("lark", 'start: s\ns: s s s | "a" | "b" | /[a-z]*/'),
        Grammar("regex", "|".join(f"x{i}y" for i in range(50_000))),
        of_schema({"type": "array", "minItems": 100_000, "items": {"type": "string"}}),
    ],
)
def test_gr01_a_costly_grammar_is_cheap_or_ends_its_own_request(plain: LLM, grammar: Grammar) -> None:
    with suppress(InvalidRequestError):
        answer(plain, grammar, max_tokens=20)
    assert answer(plain, Grammar("regex", "fine")).text == "fine"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("lark", 'start: "x" A\nA: /a/ & /b/'), "dead end: nothing can follow 'x'"),
        (Grammar("lark", 'start: "a" start'), "without an end"),
        (Grammar("lark", 'start: "ab" /c/ x\nx: "y" B\nB: /[0-9]/ & /[a-z]/'), "nothing can follow 'abcy'"),
        (Grammar("gbnf", 'root ::= "a" root'), "without an end"),
        (of_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "no answer"),
        (of_schema({"items": FIVES_TO_4, "minItems": 1, "type": "array"}), "at #/items: no answer"),
        (of_schema({"type": "array", "minItems": 2, "maxItems": 1}), "at #: no answer"),
        (of_schema({"properties": {"a": False}, "required": ["a"], "type": "object"}), "no answer"),
        (of_schema(False), "no answer"),
    ],
)  # fmt: skip
def test_a_grammar_with_a_dead_end_is_refused(plain: LLM, grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        plain.opened.grammars.check(SamplingParams(grammar=grammar))


def test_a_pattern_of_names_that_are_all_listed_adds_no_name(grammars: Grammars, plain: LLM) -> None:
    """And its schema holds for the listed names."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}},
        "patternProperties": {"^score$": {"maximum": 9}},
        "additionalProperties": False,
    }
    for text, is_matched in (('{"score":5}', True), ('{"score":10}', False), ('{"score":5,', False)):
        matcher = grammars.matcher(of_schema(schema))
        ids = plain.opened.tokenizer.encode(text)
        num_taken = 0
        while num_taken < len(ids) and matcher.accepts(ids[num_taken]):
            matcher.append(ids[num_taken])
            num_taken += 1
        assert (num_taken == len(ids)) is is_matched


def test_gr02_compiled_grammars_are_bounded(plain: LLM) -> None:
    grammars = Grammars(plain.opened.tokenizer)
    for i in range(3 * MAX_COMPILED):
        grammars.check(SamplingParams(grammar=of_schema({"const": i})))
    assert len(grammars._compiled) == MAX_COMPILED


def test_keywords_that_cannot_be_enforced_are_ignored_only_if_asked_for(plain: LLM) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True})
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        answer(plain, Grammar("json_schema", schema))
    assert isinstance(json.loads(answer(plain, Grammar("json_schema", schema, is_lenient=True)).text), list)
