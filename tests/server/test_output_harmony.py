"""Answers of gpt-oss in messages on channels, wherever their text is divided, and their grammars."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.decoding import Grammar, Thought
from coldstream.engine.grammar_source import grammar_source
from coldstream.engine.regular_languages import byte_matcher
from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import MARKS, marked
from coldstream.server.output import (
    Content,
    OutputEvent,
    Reasoning,
    constrained_answer,
    forced_calls,
    marks_control_tokens,
    output_parser,
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

SOURCE = "{{ '<|start|>system<|message|>' }}{{ '<|start|>assistant<|channel|>final<|message|>' }}"
TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
WRITE: Any = ("write_file", {"path": "/a b.py", "content": "<|end|> {}\n", "mode": 5})
CALL = f"<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{json.dumps(WRITE[1])}"
# Arguments hold the spelling of a token, as text.
CALL_TEXT = CALL.replace("<|end|>", "§<|end|>")
FAMILY = TokenFamily(SOURCE, TOKENS, prompt_end="<|start|>assistant")
as_written, events_of = FAMILY.as_written, FAMILY.events_of


def test_thought_preamble_call_and_answer() -> None:
    text = (
        "<|channel|>analysis<|message|>So.\n\nYes.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will write.<|end|>"
        f"<|start|>assistant{CALL_TEXT}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    events = events_of(text)
    assert summary(events) == ("So.\n\nYes.", "I will write.\nDone.", [WRITE])
    kinds = [type(event).__name__ for event in joined(events)]
    call = ["ToolCallStart", "ToolCallArguments", "ToolCallEnd"]
    assert kinds == ["Reasoning", "Content", *call, "Content"]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.list_files <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.list_files<|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.list_files json<|message|>",
        " to=functions.list_files<|channel|>commentary json<|message|>",
        " to=list_files<|channel|>commentary<|message|>",
        "<|start|>assistant to=functions.list_files<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary<|channel|>commentary to=functions.list_files<|message|>",
    ],
)
def test_headers_of_calls(header: str) -> None:
    """A call ends with its token, with the answer, or with the next message."""
    for arguments in ("{}", "", " {\n} "):
        for end in ("<|call|>", "<|end|>", ""):
            assert summary(events_of(f"{header}{arguments}{end}")) == ("", "", [("list_files", {})])


def test_the_last_channel_of_a_header_counts() -> None:
    text = "<|channel|>analysis<|channel|>final<|message|>Done.<|end|>"
    assert summary(events_of(text)) == ("", "Done.", [])


def test_several_calls_in_one_answer() -> None:
    text = f"{CALL_TEXT}<|call|><|start|>assistant{CALL_TEXT}<|call|>"
    assert calls_of(events_of(text)) == [WRITE, WRITE]
    assert calls_of(events_of(text, max_calls=1)) == [WRITE]


@pytest.mark.parametrize("recipient", ["browser.search", "python", "container.exec", "assistant"])
def test_messages_to_tools_that_are_not_here_are_left_out(recipient: str) -> None:
    text = (
        f"<|channel|>analysis to={recipient} code<|message|>print(1)<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Two."
    )
    assert summary(events_of(text)) == ("", "Two.", [])


def test_without_tools_and_for_no_json_calls_are_content() -> None:
    assert summary(events_of(CALL_TEXT, tools=[])) == ("", json.dumps(WRITE[1]), [])
    no_json = "<|channel|>commentary to=functions.write_file<|message|>[1]<|call|>"
    assert summary(events_of(no_json)) == ("", "[1]", [])


def test_a_call_that_the_end_of_the_answer_interrupts_is_none() -> None:
    events = events_of('<|channel|>commentary to=functions.write_file<|message|>{"path": "/')
    assert calls_of(events) == []
    assert truncated_calls_of(events) == ['{"path": "/']


@pytest.mark.parametrize(
    "text", ["Hello.", "to be or not", "assist", "  assistants", "Hi<|return|>", "a\n\nb"]
)
def test_text_without_a_header_is_content(text: str) -> None:
    assert content_of(events_of(text)) == text.replace("<|return|>", "")


def test_spelt_tokens_are_text() -> None:
    text = "<|channel|>final<|message|>It ends with §<|end|> or §<|return|>, §<|start|>assistant.<|return|>"
    assert content_of(events_of(text)) == "It ends with <|end|> or <|return|>, <|start|>assistant."


def test_unknown_control_tokens_are_left_out() -> None:
    text = as_written("<|channel|>final<|message|>a") + marked("<|reserved_1|>") + "b"
    assert content_of(events_of([text])) == "ab"


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", Content("x")),
        ("<|start|>assistant<|channel|>final<|message|>So far", Content("x")),
        ("<|start|>assistant<|channel|>analysis<|message|>So far", Reasoning("x")),
        ("the end of a long message", Content("x")),
    ],
)
def test_an_answer_begins_where_its_prompt_ends(prompt_end: str, expected: OutputEvent) -> None:
    assert events_of(["x"], prompt_end=prompt_end) == [expected]


FRAGMENTS = [
    *TOKENS, "<|channel|>analysis<|message|>", "<|start|>assistant", "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>", "assistant", " to=",
    "python", "functions.list_files", "analysis", "commentary", "final", "json", '{"path": "x"}', "{", "}",
    "a", " ", "\n", "§<|end|>", MARKS[0], MARKS[1], "é", "<|", "|>",
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


# --- grammars -----------------------------------------------------------------------------------------------


THOUGHT = "<|channel|>analysis<|message|>So, so.<|end|><|start|>assistant"


def is_matched(grammar: Grammar, text: str) -> bool:
    assert not byte_matcher(grammar_source(grammar, is_of_bytes=True)).is_error()
    return is_matched_with_tokens(grammar_source(grammar), text, TOKENS)


def test_a_demanded_call_is_one_of_the_tools() -> None:
    grammar = forced_calls(SOURCE, TOOLS)
    head = "<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>"
    call = f'{head}{{"path": "a", "content": ""}}'
    assert is_matched(grammar, call)
    assert is_matched(grammar, THOUGHT + call)
    assert not is_matched(grammar, THOUGHT * 2 + call)
    assert not is_matched(grammar, call.replace("write_file", "other"))
    assert not is_matched(grammar, call.replace('"content"', '"contents"'))
    assert not is_matched(grammar, "<|channel|>final<|message|>Hi")
    with pytest.raises(InvalidRequestError, match="no tools"):
        forced_calls(SOURCE, [])


def test_a_format_holds_what_the_final_message_says() -> None:
    schema = Grammar(
        "json_schema", json.dumps({"type": "object", "properties": {}, "additionalProperties": False})
    )
    grammar = constrained_answer(SOURCE, schema, [])
    assert is_matched(grammar, "<|channel|>final<|message|>{}")
    assert not is_matched(grammar, "{}")
    with_calls = constrained_answer(SOURCE, schema, TOOLS)
    assert is_matched(with_calls, f"{THOUGHT}<|channel|>final<|message|>{{}}")
    call = "<|channel|>commentary to=functions.list_files <|constrain|>json<|message|>{}"
    assert is_matched(with_calls, call)
    assert not is_matched(grammar, call)


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("has_calls", [False, True])
def test_a_budget_bounds_the_thought_that_a_grammar_holds(budget: int, has_calls: bool) -> None:
    head, rest = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    answer = '<|channel|>final<|message|>{"a": 1}'
    schema = Grammar("json_schema", json.dumps({"const": {"a": 1}}))
    grammar = constrained_answer(SOURCE, schema, TOOLS if has_calls else [], thinking_budget=budget)
    call = "<|channel|>commentary to=functions.list_files <|constrain|>json<|message|>{}"
    demanded = forced_calls(SOURCE, TOOLS, thinking_budget=budget)
    for asked, text in [(grammar, answer), (demanded, call), *([(grammar, call)] if has_calls else [])]:
        assert is_matched(asked, text)
        assert is_matched(asked, f"{head}{'x' * budget}{rest}{text}")
        assert not is_matched(asked, f"{head}{'x' * (budget + 2)}{rest}{text}")


def test_a_budget_ends_a_thought_in_the_words_of_the_format() -> None:
    thought = thought_after(SOURCE, "<|start|>assistant", budget=9)
    assert thought == Thought(
        is_open=False,
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        budget=9,
        forced="<|end|><|start|>assistant<|channel|>final<|message|>",
    )


def test_control_tokens_are_marked_where_the_format_needs_them() -> None:
    assert marks_control_tokens(SOURCE, ())
    laguna = "<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    assert marks_control_tokens(laguna, {"<tool_call>": 1})
    assert not marks_control_tokens(laguna, {"<|im_end|>": 1})
    written = "".join(
        marked(part) if part.startswith("<") else part for part in re.split(r"(<[^>]*>)", laguna)
    )
    parser = output_parser(laguna, TOOLS, is_thinking=False)
    call = written.replace("{name}", "f")
    assert calls_of([*parser.push(call), *parser.finish()]) == [("f", {"k": "v"})]
