"""Answers match the grammar of their request, whatever drafts and batches do; bad grammars are refused."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.assets import demo_model_path
from coldstream.decoding import FixedSizes, Grammar, RepetitionStop, Speculation, Thought
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model
from coldstream.engine.grammar import MAX_COMPILED, MAX_PROPERTIES, Grammars
from coldstream.errors import InvalidRequestError

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 9},
    },
    "required": ["x", "name"],
    "additionalProperties": False,
}
ANY_OF_FOUR = {"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(4)]}
PROMPT = 'points = [{"x": 1, "name": "a"}, {"x": 2, "name": "b"}, '


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM.from_opened(
        open_model(EngineConfig(str(demo_model_path()), device="cpu", spec_type="none"))
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    config = EngineConfig(str(demo_model_path()), device="cpu", spec_type="ngram")
    opened = open_model(config)
    assert opened.speculation is not None
    always = replace(opened, speculation=Speculation(opened.speculation.drafter, FixedSizes(8)))
    with LLM.from_opened(always) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(plain: LLM) -> Grammars:
    return plain.opened.grammars


def answer(llm: LLM, grammar: Grammar, prompt: str = PROMPT, **params: Any) -> Any:
    wanted = {"temperature": 0.9, "seed": 5, "max_tokens": 400, "grammar": grammar} | params
    return llm.generate(prompt, SamplingParams(**wanted))[0]


def of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


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


@settings(max_examples=300)
@given(schema=schemas(2), seed=st.integers(0, 2**32))
def test_every_answer_is_one_of_its_schema(plain: LLM, schema: Any, seed: int) -> None:
    output = answer(plain, of_schema(schema), seed=seed, max_tokens=1500)
    assert output.finish_reason == "stop"
    assert is_valid(json.loads(output.text), schema), (schema, output.text)


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


def test_blanks_between_tokens_of_json_are_bounded(grammars: Grammars, plain: LLM) -> None:
    matcher = grammars.matcher(Grammar("json_object"))
    encode = plain.opened.tokenizer.encode
    for token_id in encode("{\n" + " " * 60):
        assert matcher.accepts(token_id)
        matcher.append(token_id)
    assert not all(matcher.accepts(token_id) for token_id in encode(" " * 8))


# --- which tokens may follow -----------------------------------------------------------------------------


def test_end_tokens_may_follow_exactly_where_the_answer_may_end(grammars: Grammars, plain: LLM) -> None:
    tokenizer = plain.opened.tokenizer
    matcher = grammars.matcher(Grammar("regex", "ab(cd)?"))
    ends = sorted(tokenizer.eos_ids)
    seen = ""
    for character in "abcd":
        assert matcher.mask()[ends].all() == matcher.mask()[ends].any() == (seen in ("ab", "abcd"))
        matcher.append(tokenizer.encode(character)[0])
        seen += character
    assert np.flatnonzero(matcher.mask()).tolist() == ends


def test_no_control_token_is_text_of_an_answer(grammars: Grammars, plain: LLM) -> None:
    vocabulary = plain.opened.tokenizer.vocabulary
    mask = grammars.matcher(Grammar("regex", r"(?s:.)*")).mask()
    others = set(vocabulary.control_ids.values()) - plain.opened.tokenizer.eos_ids
    assert not mask[sorted(others)].any()
    assert mask.sum() > len(mask) // 2


class Request:
    """What `Grammars.constraint` reads of a request."""

    def __init__(self, params: SamplingParams, end_ids: frozenset[int]) -> None:
        self.params, self.prompt_token_ids, self.all_end_ids = params, (1, 2, 3), end_ids


@settings(max_examples=60)
@given(data=st.data())
def test_each_node_of_a_tree_sees_its_own_prefix(grammars: Grammars, plain: LLM, data: st.DataObject) -> None:
    """Whatever was asked before: the answer is a pure function of the prefix."""
    thought = data.draw(st.sampled_from([None, Thought(is_open=True, budget=4), Thought(is_open=True)]))
    params = SamplingParams(grammar=of_schema(POINT), thought=thought)
    request: Any = Request(params, plain.opened.tokenizer.eos_ids)
    used = grammars.constraint(request)
    assert used is not None
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(data.draw(st.integers(2, 25))):
        parent = data.draw(st.sampled_from(nodes))
        fresh = grammars.constraint(request)
        assert fresh is not None
        zeros = np.zeros(plain.opened.tokenizer.vocab_size, dtype=np.float32)
        expected = fresh((1, 2, 3, *parent), zeros.copy())
        assert np.array_equal(used((1, 2, 3, *parent), zeros.copy()), expected)
        allowed = set(np.flatnonzero(np.isfinite(expected)).tolist()) - plain.opened.tokenizer.eos_ids
        if allowed:
            nodes.append((*parent, data.draw(st.sampled_from(sorted(allowed)))))


# --- thoughts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_is_closed_at_its_budget_and_the_grammar_begins_behind_it(
    plain: LLM, drafting: LLM, budget: int
) -> None:
    thought = Thought(is_open=True, budget=budget)
    outputs = [answer(llm, of_schema(POINT), thought=thought) for llm in (plain, drafting)]
    assert outputs[0].token_ids == outputs[1].token_ids
    reasoning, closed, text = outputs[0].text.partition("\n</think>\n\n")
    assert closed
    assert bool(reasoning) == bool(budget)
    assert set(json.loads(text)) == {"x", "name"}
    assert "</think>" not in text


def test_a_budget_without_a_grammar_closes_the_thought_once(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, thought=Thought(is_open=True, budget=10))
    text = plain.generate(PROMPT, params)[0].text
    assert text.count("</think>") == 1
    free = plain.generate(PROMPT, replace(params, thought=None))[0]
    assert text.startswith(plain.opened.tokenizer.decode(free.token_ids[:10]))


def test_a_thought_that_never_began_is_not_closed(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, thought=Thought(is_open=False, budget=0))
    free = plain.generate(PROMPT, replace(params, thought=None))[0]
    assert plain.generate(PROMPT, params)[0].token_ids == free.token_ids


def test_a_budget_never_cuts_a_character(plain: LLM) -> None:
    """The character's bytes are tokens of their own; what closes the thought waits for the last of them."""
    tokenizer = plain.opened.tokenizer
    by_bytes = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    first, *rest = [by_bytes[bytes([byte])] for byte in "𝛑".encode()]
    params = SamplingParams(thought=Thought(is_open=True, budget=1))
    request: Any = Request(params, frozenset())
    constraint = plain.opened.grammars.constraint(request)
    assert constraint is not None
    context = [1, 2, 3, first]
    zeros = np.zeros(tokenizer.vocab_size, dtype=np.float32)
    for token_id in rest:
        assert np.isfinite(constraint(context, zeros.copy())).all()
        context.append(token_id)
    assert np.isfinite(constraint(context, zeros.copy())).sum() == 1


def test_a_thought_before_a_grammar_holds_no_end_token_and_runs_into_no_text(plain: LLM) -> None:
    tokenizer = plain.opened.tokenizer
    request: Any = Request(
        SamplingParams(grammar=of_schema(POINT), thought=Thought(is_open=True)), tokenizer.eos_ids
    )
    constraint = plain.opened.grammars.constraint(request)
    assert constraint is not None
    context = [1, 2, 3, *tokenizer.encode("so </think")]
    left = constraint(context, np.zeros(tokenizer.vocab_size, dtype=np.float32))
    kept = [tokenizer.token_bytes(index) for index in np.flatnonzero(np.isfinite(left))]
    assert all(not text.startswith(b">") or not text[1:].strip() for text in kept)
    assert b">" in kept
    assert not np.isfinite(left[sorted(tokenizer.eos_ids)]).any()


# --- repetition ------------------------------------------------------------------------------------------


def test_endless_repetition_ends_and_says_so(plain: LLM, drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, repetition=RepetitionStop(min_tokens=40))
    prompt = "x = 1\n" * 6
    outputs = [llm.generate(prompt, params)[0] for llm in (plain, drafting)]
    assert [output.finish_reason for output in outputs] == ["repetition", "repetition"]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert len(outputs[0].token_ids) == 40
    assert plain.generate(prompt, replace(params, repetition=None))[0].finish_reason == "length"


# --- bad grammars ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (Grammar("json_schema", "{"), "line 1 column 2"),
        (Grammar("json_schema", "3"), "a schema is an object"),
        (Grammar("json_schema", "[" * 100_000), "not JSON"),
        (of_schema({"properties": {"a": {"type": "strin"}}}), "#/properties/a: Invalid type: strin"),
        (of_schema({"items": {"uniqueItems": True}}), "#/items: .*uniqueItems"),
        (of_schema({"type": "string", "pattern": "("}), "regex parse error"),
        (of_schema({"enum": []}), "Unsatisfiable"),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no answer can match"),
        (of_schema({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}), "at most"),
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
