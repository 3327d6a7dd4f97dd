"""Grammars that force a call match calls of the tools, in the format of the model, and nothing else."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from coldstream.assets import demo_model_path
from coldstream.decoding import Grammar, Thought
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model
from coldstream.errors import InvalidRequestError
from coldstream.kernels.sample.settings import bitmask_of
from coldstream.server.output import forced_calls, thought_after
from output_samples import (
    ARGS_TEMPLATE,
    FAMILIES,
    HERMES_TEMPLATE,
    LINES_TEMPLATE,
    TEMPLATES,
    TOOLS,
    XML_TEMPLATE,
    calls_of,
    content_of,
    events_of,
    reasoning_of,
    rendered,
)

BOUNDED: list[dict[str, Any]] = [
    {
        "name": "turn",
        "input_schema": {
            "type": "object",
            "properties": {
                "angle": {"type": "integer", "minimum": -90, "maximum": 90},
                "side": {"type": "string", "enum": ["left", "right"]},
                "steps": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True},
                "speed": {"$ref": "#/$defs/speed"},
            },
            "required": ["angle", "side"],
            "additionalProperties": False,
            "$defs": {"speed": {"enum": [1, 2, 3]}},
        },
    },
    {"name": "stop", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
PROMPT = "def turn(angle: int, side: str) -> None:\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_opened(
        open_model(EngineConfig(str(demo_model_path()), device="cpu", spec_type="none"))
    ) as llm:
        yield llm


def matches(llm: LLM, grammar: Grammar, text: str) -> bool:
    """Whether `text` is all of an answer that the grammar allows."""
    matcher = llm.opened.grammars.matcher(grammar)
    for token_id in llm.opened.tokenizer.encode(text):
        if not matcher.accepts(token_id):
            return False
        matcher.append(token_id)
    ends = bitmask_of(llm.opened.tokenizer.eos_ids, llm.opened.tokenizer.vocab_size)
    return bool(np.array_equal(matcher.mask() & ends, ends))


def is_turn(call: Any) -> bool:
    name, arguments = call
    if name == "stop":
        return bool(arguments == {})
    return (
        name == "turn"
        and {"angle", "side"} <= set(arguments) <= {"angle", "side", "steps", "speed"}
        and type(arguments["angle"]) is int
        and -90 <= arguments["angle"] <= 90
        and arguments["side"] in ("left", "right")
        and all(isinstance(step, bool) for step in arguments.get("steps", []))
        and arguments.get("speed", 1) in (1, 2, 3)
    )


@pytest.mark.sharded(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_forced_answer_is_a_call(llm: LLM, family: str) -> None:
    grammar = forced_calls(TEMPLATES[family], BOUNDED)
    for seed in range(12):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=300, grammar=grammar)
        output = llm.generate(PROMPT, params)[0]
        assert output.finish_reason == "stop"
        events = events_of(family, output.text, tools=BOUNDED)
        assert content_of(events) == ""
        (call,) = calls_of(events)
        assert is_turn(call), call


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_behind_a_thought(llm: LLM, family: str) -> None:
    thought = thought_after(TEMPLATES[family], "<think>\n", budget=6, tools=BOUNDED)
    params = SamplingParams(
        temperature=0.9,
        seed=1,
        max_tokens=300,
        grammar=forced_calls(TEMPLATES[family], BOUNDED),
        thought=thought,
    )
    events = events_of(family, llm.generate(PROMPT, params)[0].text, is_thinking=True, tools=BOUNDED)
    assert reasoning_of(events)
    (call,) = calls_of(events)
    assert is_turn(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_writes_matches(llm: LLM, family: str) -> None:
    grammar = forced_calls(TEMPLATES[family], TOOLS)
    calls = [
        rendered(
            family,
            "write_file",
            {"path": "/a b", "content": "x\n\n<b>\n</parameter", "mode": 5, "tags": ["é"]},
        ),
        rendered(family, "write_file", {"path": "", "content": "", "options": {"deep": True}}),
        rendered(family, "list_files", {}),
    ]
    for call in calls:
        assert matches(llm, grammar, call), call
    both = ("" if family == "args" else "\n").join(calls[:2])
    assert not matches(llm, grammar, both)
    assert matches(llm, forced_calls(TEMPLATES[family], TOOLS, most_calls=3), both)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_call_of_the_tools_does_not_match(llm: LLM, family: str) -> None:
    grammar = forced_calls(TEMPLATES[family], TOOLS, most_calls=3)
    for text in (
        "",
        "Hello",
        rendered(family, "other", {}),
        rendered(family, "write_file", {"path": "a"}),
        rendered(family, "write_file", {"path": "a", "content": "", "mode": "x"}),
        rendered(family, "list_files", {}) + " Done.",
    ):
        assert not matches(llm, grammar, text), text


def test_a_call_without_tools_or_a_format_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no tools"):
        forced_calls(XML_TEMPLATE, [])
    with pytest.raises(InvalidRequestError, match="no known format"):
        forced_calls("{{ messages }}", TOOLS)


def test_the_thought_of_an_answer_is_in_the_words_of_the_template() -> None:
    source = "{{ '<think>\\n' + reasoning + '\\n\\n</think>\\n' }} {% if '</think>' in content %}"
    opened = thought_after(source, "assistant\n<think>\n", budget=9)
    assert opened == Thought(is_open=True, budget=9, forced="\n\n</think>\n", tool_call="")
    assert thought_after(source, "assistant\n") == Thought(
        is_open=False, forced="\n\n</think>\n", tool_call=""
    )
    assert thought_after(source, "assistant\n<think>\n\n</think>\n\n") is None
    assert thought_after("{{ messages }}", "<think>") is None
    called = thought_after(HERMES_TEMPLATE, "<think>", tools=TOOLS)
    assert called is not None
    assert called.tool_call == "<tool_call>"
    for template, closing in ((LINES_TEMPLATE, "\n</think>\n"), (ARGS_TEMPLATE, "</think>")):
        found = thought_after(template, "<assistant>\n<think>", budget=9)
        assert found == Thought(is_open=True, budget=9, forced=closing, tool_call="")


LARK_TOOL: Any = {
    "name": "patch",
    "parameters": {
        "properties": {"input": {"type": "string", "x-lark": 'start: "{" line+ "}"\nline: /[a-c]+/ "\\n"'}},
        "required": ["input"],
    },
}


@pytest.mark.parametrize(("text", "fits"), [("{ab\nc\n}", True), ("{ab}", False), ("{d\n}", False)])
def test_a_forced_text_obeys_its_lark_grammar(llm: LLM, text: str, fits: bool) -> None:
    grammar = forced_calls(XML_TEMPLATE, [*BOUNDED, LARK_TOOL])
    assert matches(llm, grammar, rendered("xml", "patch", {"input": text})) == fits


def test_a_lark_grammar_that_cannot_be_obeyed_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="patch cannot be demanded"):
        forced_calls(HERMES_TEMPLATE, [*BOUNDED, LARK_TOOL])
    broken: Any = {"name": "f", "parameters": {"properties": {"input": {"x-lark": 'start: "a" }'}}}}
    with pytest.raises(InvalidRequestError, match="grammar"):
        llm.opened.grammars.check(SamplingParams(grammar=forced_calls(XML_TEMPLATE, [broken])))
