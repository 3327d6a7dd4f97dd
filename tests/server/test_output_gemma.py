"""Answers of gemma-4, wherever their text is divided, and the grammars of demanded calls."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coldstream.engine.grammar_source import grammar_source
from coldstream.engine.regular_languages import byte_matcher
from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import MARKS
from coldstream.server.output import (
    forced_calls,
    marks_control_tokens,
    thought_after,
)
from output_samples import (
    TOOLS,
    TokenFamily,
    calls_of,
    content_of,
    is_matched_with_tokens,
    joined,
    reasoning_of,
    summary,
    truncated_calls_of,
)
from schema_samples import Schemas, walked

SOURCE = "{{ '<|turn>model\\n' }}{{ '<|channel>thought\\n<channel|>' }}{{ '<|tool_call>call:' }}"
TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>")
QUOTE = '<|"|>'
FAMILY = TokenFamily(SOURCE, TOKENS)
as_written, events_of = FAMILY.as_written, FAMILY.events_of


def value_of(value: Any) -> str:
    """A value as the published template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return object_of(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_of, value))}]"
    return json.dumps(value)


def object_of(arguments: dict[str, Any]) -> str:
    pairs = (f"{key}:{value_of(arguments[key])}" for key in sorted(arguments, key=str.lower))
    return f"{{{','.join(pairs)}}}"


def rendered(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{object_of(arguments)}<tool_call|>"


WRITE: Any = (
    "write_file",
    {"content": "a, {b}: [c]\n", "mode": 5, "options": {"deep": True}, "path": "/a", "tags": ["x", "y]"]},
)


def test_thought_text_and_calls() -> None:
    text = (
        f"<|channel>thought\nSo.\n\nYes.\n<channel|>I will.\n\n{rendered(*WRITE)}{rendered('list_files', {})}"
    )
    events = events_of(text)
    assert summary(events) == ("So.\n\nYes.", "I will.", [WRITE, ("list_files", {})])
    assert joined(events_of([as_written(text)])) == joined(events)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\n<channel|>Hi", "", "Hi"),
        ("<|channel>No label<channel|>Hi", "No label", "Hi"),
        ("Hi", "", "Hi"),
        ("Hi\n<|channel>thought\nWell.<channel|>\nHo", "Well.", "Hi\nHo"),
        ("Hi<channel|>", "", "Hi"),
        ("<|channel>thought\nnever closed", "never closed", ""),
        ("<channel|>Hi", "", "Hi"),
        ("Say §<|channel>thought and §<tool_call|>.", "", "Say <|channel>thought and <tool_call|>."),
    ],
)
def test_thoughts(text: str, reasoning: str, content: str) -> None:
    for pieces in (text, [as_written(text)]):
        assert summary(events_of(pieces)) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<|tool_call>write_file{path:<|\"|>/a<|\"|>}<tool_call|>", {"path": "/a"}),
        ("<|tool_call>call:write_file{ path : <|\"|>/a<|\"|> , mode : 5 }", {"path": "/a", "mode": 5}),
        ("<|tool_call>call:write_file{<|\"|>path<|\"|>:<|\"|>/a<|\"|>}<tool_call|>", {"path": "/a"}),
        ("<|tool_call>call:write_file{path:/a b,mode:7}<tool_call|>", {"path": "/a b", "mode": 7}),
        ("<|tool_call>call:write_file{path:<|\"|>/a<|\"|>", {"path": "/a"}),
        ("<|tool_call>call:write_file{path:<|\"|>/a", {"path": "/a"}),
        ("<|tool_call>call:write_file{path:5,ratio:108.}<tool_call|>", {"path": "5", "ratio": "108."}),
        ("<|tool_call>call:write_file{owner:null,mode:true}<tool_call|>", {"owner": None, "mode": True}),
        ("<|tool_call>call:write_file{options:{deep:true,<|\"|>x<|\"|>:[1,{y:<|\"|>z<|\"|>}]}}<tool_call|>",
         {"options": {"deep": True, "x": [1, {"y": "z"}]}}),
        ("<|tool_call>call:write_file{path:<|\"|>/a<|\"|>,path:<|\"|>/b<|\"|>}<tool_call|>", {"path": "/a"}),
        ("<|tool_call>call:write_file<tool_call|>", {}),
    ],
)  # fmt: skip
def test_calls_that_are_not_quite_right_are_read(text: str, call: dict[str, Any]) -> None:
    assert calls_of(events_of(text)) == [("write_file", call)]


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:write_file{path}<tool_call|>",
        "<|tool_call>call:write_file{path:[1}<tool_call|>",
        "<|tool_call>two words{}<tool_call|>",
        "<|tool_call>call:write_file{} and more<tool_call|>",
        "<|tool_call>call:write_file",
        "<|tool_call>call:write_file{a:" + "[" * 5000 + "<tool_call|>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    shown = text.replace("<|tool_call>", "").replace("<tool_call|>", "")
    assert summary(events_of([as_written(text)])) == ("", shown, [])


def test_a_call_without_its_closing_tag_ends_before_the_next() -> None:
    unclosed = rendered(*WRITE).removesuffix("<tool_call|>")
    assert calls_of(events_of(f"{unclosed}{rendered('list_files', {})}")) == [WRITE, ("list_files", {})]


def test_a_call_of_no_tool_in_a_thought_is_a_thought() -> None:
    text = f"<|channel>thought\nLike {rendered('other', {})}?<channel|>Hi"
    assert summary(events_of(text)) == ("Like call:other{}?", "Hi", [])
    inside = f"<|channel>thought\nI write.{rendered(*WRITE)}"
    assert summary(events_of(inside)) == ("I write.", "", [WRITE])


FRAGMENTS = [
    *TOKENS, "<|channel>thought\n", "<|tool_call>call:write_file{", "path:", '<|"|>', "}<tool_call|>",
    "mode:5", ",", ":", "{", "}", "[", "]", "call:", "write_file", "thought\n", "a", " ", "\n", "null",
    "§<|channel>", MARKS[0], MARKS[1], "é",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@settings(max_examples=400)
@given(text=texts, splits=st.lists(st.integers(0, 300)))
def test_events_do_not_depend_on_where_the_text_is_split(text: str, splits: list[int]) -> None:
    written = as_written(text)
    places = sorted({0, len(written), *(split for split in splits if split < len(written))})
    whole = joined(events_of([written]))
    assert joined(events_of([written[start:end] for start, end in pairwise(places)])) == whole
    assert joined(events_of(list(written))) == whole
    shown = (
        reasoning_of(whole) + content_of(whole) + "".join(truncated_calls_of(whole)) + str(calls_of(whole))
    )
    assert not set(shown) & set(MARKS)


strings = st.text(st.sampled_from("ab \n\t\"§<>/é{}':,[]"), max_size=12)
names = st.text(st.sampled_from("abXY_-"), min_size=1, max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(arguments=st.dictionaries(names, values, max_size=4), step=st.integers(1, 40))
def test_what_is_rendered_is_read(arguments: dict[str, Any], step: int) -> None:
    assume("§" not in str(arguments))
    text = as_written(f"Yes.\n{rendered('f', arguments)}")
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    assert summary(events_of(pieces)) == ("", "Yes.", [("f", arguments)])


# --- grammars -----------------------------------------------------------------------------------------------


def source_of(schema: Any, *, is_of_bytes: bool = False) -> str:
    tools = [{"name": "f", "input_schema": schema, "strict": True}]
    return grammar_source(forced_calls(SOURCE, tools), is_of_bytes=is_of_bytes)


def is_matched(source: str, text: str) -> bool:
    return is_matched_with_tokens(source, text, TOKENS)


def obj(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


TREE: Any = {
    "$defs": {
        "node": obj({"v": {"type": "integer"}, "n": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
    },
    **obj({"root": {"$ref": "#/$defs/node"}}),
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (obj({"a": {"type": "string"}, "B": {"type": "integer"}}), {"a": "x,y", "B": 5}, {"a": "x"}),
        (obj({"a": {"enum": ["x", 3, None, [1]]}}), {"a": [1]}, {"a": "y"}),
        (obj({"a": {"type": "array", "items": {"enum": [1]}, "maxItems": 2}}), {"a": [1]}, {"a": [1, 1, 1]}),
        (obj({"a": {"type": "array", "items": {"type": "null"}, "minItems": 1}}), {"a": [None]}, {"a": []}),
        (obj({"a": {"type": "string", "pattern": "^x+$"}}), {"a": "xx"}, {"a": "y"}),
        (obj({"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}), {"a": 12}, {"a": True}),
        (TREE, {"root": {"v": 1, "n": [{"v": 2, "n": []}]}}, {"root": {"v": 1}}),
        ({"type": "object", "properties": {"a": {}, "b": {}}}, {"b": {"c": ["d", {}]}}, {"c": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 1, "y": 2}, {"x": "a"}),
        (obj({"a": {"type": "object"}}), {"a": {"any": [1, "b"]}}, {"a": []}),
    ],
)  # fmt: skip
def test_a_demanded_call_is_held_to_its_schema(schema: Any, right: Any, wrong: Any) -> None:
    source = source_of(schema)
    assert is_matched(source, rendered("f", right))
    assert not is_matched(source, rendered("f", wrong))


def test_several_calls_and_strings_with_anything_in_them() -> None:
    grammar = forced_calls(SOURCE, TOOLS, most_calls=3)
    source = grammar_source(grammar)
    call = rendered("write_file", {"path": "}<", "content": ""})
    assert is_matched(source, call + call + rendered("list_files", {}))
    assert not is_matched(source, call * 4)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_every_demanded_call_can_be_read(seed: int) -> None:
    choose = random.Random(seed)
    schema = Schemas(choose).parameters()
    try:
        source = source_of(schema, is_of_bytes=True)
    except InvalidRequestError:
        assume(False)
    assume(not byte_matcher(source).is_error())
    text = walked(source, choose)
    if text is not None:
        assert text.startswith("<|tool_call>call:f{")
        assert (
            len(calls_of(events_of([as_written(text)], tools=[{"name": "f", "input_schema": schema}]))) == 1
        )


def test_what_the_model_cannot_write_is_refused() -> None:
    for schema in (
        obj({"a": {"type": "array", "prefixItems": [{"type": "null"}]}}),
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    ):
        with pytest.raises(InvalidRequestError, match="tools: f: the schema cannot be held"):
            source_of(schema)


def test_thought_and_marks_of_the_format() -> None:
    assert marks_control_tokens(SOURCE, ())
    thought = thought_after(SOURCE, "<|turn>model\n", budget=3, tools=TOOLS)
    assert thought is not None
    assert (thought.opening, thought.closing, thought.forced) == ("<|channel>", "<channel|>", "<channel|>")
    assert thought.tool_call == "<|tool_call>"
