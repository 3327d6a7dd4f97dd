"""Reasoning, content and calls are distinguished in any answer, wherever its text is split into pieces."""

import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.server.output import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    call_format,
    output_parser,
    prompt_opens_thought,
)
from output_samples import (
    ARGS_TEMPLATE,
    FAMILIES,
    HERMES_TEMPLATE,
    LINES_TEMPLATE,
    TOOLS,
    XML_TEMPLATE,
    Call,
    calls_of,
    content_of,
    events_of,
    is_json_prefix,
    joined,
    reasoning_of,
    rendered,
    truncated_calls_of,
)

WRITE: Call = ("write_file", {"path": "/tmp/a b.py", "content": "def f():\n\n    return '<b>'\n"})
LIST: Call = ("list_files", {})

every_family = pytest.mark.parametrize("family", FAMILIES)


def summary(events: Any) -> tuple[str, str, list[Call]]:
    return reasoning_of(events), content_of(events), calls_of(events)


# --- which format ----------------------------------------------------------------------------------------


def test_the_format_is_read_off_the_template() -> None:
    assert type(call_format(XML_TEMPLATE)).__name__ == "XmlCalls"
    assert type(call_format(HERMES_TEMPLATE)).__name__ == "HermesCalls"
    assert (
        type(call_format(LINES_TEMPLATE)).__name__ == type(call_format(ARGS_TEMPLATE)).__name__ == "ArgCalls"
    )
    assert call_format("{{ messages }}") is None


def test_without_a_format_or_tools_calls_are_content() -> None:
    text = f"Look: {rendered('xml', *WRITE)}\n"
    assert joined(events_of("none", text)) == [Content(text)]
    assert joined(events_of("xml", text, tools=[])) == [Content(text)]


@pytest.mark.parametrize(
    "tool",
    [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}},
        },
        {"type": "function", "name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}},
        {"name": "f", "input_schema": {"properties": {"n": {"type": "integer"}}}},
    ],
)
def test_tools_come_in_the_shapes_of_three_interfaces(tool: Any) -> None:
    assert calls_of(events_of("xml", rendered("xml", "f", {"n": 3}), tools=[tool])) == [("f", {"n": 3})]


# --- thoughts --------------------------------------------------------------------------------------------


@every_family
def test_a_thought_that_the_template_opened_is_reasoning_from_the_first_character(family: str) -> None:
    events = events_of(family, "So.\n\nYes.\n</think>\n\nHello.\n", is_thinking=True)
    assert joined(events) == [Reasoning("So.\n\nYes."), Content("Hello.\n")]


@every_family
def test_a_thought_that_the_model_opens(family: str) -> None:
    for is_thinking in (False, True):
        events = events_of(family, "\n<think>\nSo.\n</think>\n\nHello", is_thinking=is_thinking)
        assert joined(events) == [Reasoning("So."), Content("Hello")]


@every_family
def test_a_thought_that_never_closes_is_all_reasoning(family: str) -> None:
    events = events_of(family, "So <b> and </thin and so on", is_thinking=True)
    assert joined(events) == [Reasoning("So <b> and </thin and so on")]


def test_an_empty_thought_and_a_closing_tag_without_a_thought_are_nothing() -> None:
    assert joined(events_of("xml", "<think>\n\n</think>\n\nHi")) == [Content("Hi")]
    assert joined(events_of("xml", "</think>\n\nHi")) == [Content("Hi")]
    assert joined(events_of("xml", "</think>", is_thinking=True)) == []


def test_a_tag_inside_of_an_answer_is_content() -> None:
    text = "  Use <think> and </think>.\n"
    assert joined(events_of("xml", text)) == [Content(text)]


def test_a_template_without_thoughts_has_none() -> None:
    parser = output_parser("plain", TOOLS, is_thinking=False)
    assert joined([*parser.push("<think>a</think>b"), *parser.finish()]) == [Content("<think>a</think>b")]


def test_whether_a_prompt_leaves_a_thought_open() -> None:
    assert prompt_opens_thought("<|im_start|>assistant\n<think>\n")
    assert not prompt_opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not prompt_opens_thought("<|im_start|>assistant\n")


# --- calls -----------------------------------------------------------------------------------------------


@every_family
def test_text_before_calls_between_them_and_behind_them(family: str) -> None:
    text = (
        f"I will.\n</think>\n\nFirst.\n\n{rendered(family, *WRITE)}\n{rendered(family, *LIST)}\n"
        f"Then.\n\n{rendered(family, *WRITE)}\n"
    )
    events = events_of(family, text, is_thinking=True)
    assert summary(events) == ("I will.", "First.\nThen.", [WRITE, LIST, WRITE])
    kinds = [type(event).__name__ for event in joined(events)]
    call = ["ToolCallStart", "ToolCallArguments", "ToolCallEnd"]
    assert kinds == ["Reasoning", "Content", *call, *call, "Content", *call]


@every_family
def test_xml_of_a_streamed_call_never_leaks_as_content(family: str) -> None:
    for text in (rendered(family, *WRITE), rendered(family, *WRITE) + "\n", rendered(family, *LIST) * 2):
        assert content_of(events_of(family, text)) == ""


@every_family
def test_a_tool_call_inside_an_unclosed_thought_is_a_call(family: str) -> None:
    text = f"I should write it.\n{rendered(family, *WRITE)}"
    assert summary(events_of(family, text, is_thinking=True)) == ("I should write it.", "", [WRITE])
    late = events_of(family, f"{text}\n</think>\n\nDone.", is_thinking=True)
    assert summary(late) == ("I should write it.", "Done.", [WRITE])


@every_family
def test_a_call_of_no_tool_in_a_thought_is_a_thought(family: str) -> None:
    text = f"Like {rendered(family, 'other', {})}?"
    assert summary(events_of(family, f"{text}</think>Hi", is_thinking=True)) == (text, "Hi", [])


@every_family
def test_a_call_of_an_unknown_function_is_emitted_for_the_client_to_refuse(family: str) -> None:
    call = ("delete_all", {"n": 3, "why": "a b", "deep": {"x": [None]}})
    assert calls_of(events_of(family, rendered(family, *call))) == [call]


@every_family
def test_parameter_order_and_line_breaks_are_kept(family: str) -> None:
    arguments = {"content": "\n\na\n\tb  \n\n", "path": " x ", "mode": 7}
    text = rendered(family, "write_file", arguments)
    for pieces in (text, [text]):
        (call,) = calls_of(events_of(family, pieces))
        assert list(call[1].items()) == list(arguments.items())


def test_ids_are_different() -> None:
    events = events_of("xml", rendered("xml", *LIST) * 3)
    ids = {event.id for event in events if isinstance(event, ToolCallStart)}
    assert len(ids) == 3
    assert all(len(each) == 29 and each.startswith("call_") for each in ids)


def test_strings_are_emitted_while_they_are_written() -> None:
    parser = output_parser(XML_TEMPLATE, TOOLS, is_thinking=False)
    head = parser.push("<tool_call>\n<function=write_file>\n<parameter=content>\none\ntw")
    assert joined(head) == [ToolCallStart(0, "", "write_file"), ToolCallArguments(0, '{"content": "one\\ntw')]
    assert parser.push("o\n</par") == [ToolCallArguments(0, "o")]
    assert joined(parser.push("ameters>\n")) == [ToolCallArguments(0, "\\n</parameters>")]


# --- calls that are not quite right ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("xml", "<tool_call>\nwrite_file(path)\n</tool_call>"),
        ("xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("xml", "<tool_call>\n<function=write_file>{}</function>\n</tool_call>"),
        ("xml", "<tool_call>\n<function=wri\nte>\n</function>\n</tool_call>"),
        ("xml", "<function=other>\n</function>"),
        ("xml", "The tag <tool_call> begins a call, <function=NAME> follows."),
        ("xml", "<tool_call>"),
        ("xml", "<tool_call>\n<function=write_file>\n"),
        ("xml", f"<tool_call>\n<function={'x' * 300}>\n</function>"),
        ("hermes", "<tool_call>\n{'name': 'write_file'}\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "write_file", "arguments": {}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "write_file", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'),
        ("hermes", "<tool_call>\nlist_files\n</tool_call>"),
        ("args", "<tool_call>list_files(path)</tool_call>"),
        ("args", "<tool_call></tool_call>"),
        ("args", "<tool_call>list files</tool_call>"),
        ("args", "<tool_call>list_files"),
        ("args", "<tool_call>list_files\n<arg_k"),
        ("args", f"<tool_call>{'x' * 300}</tool_call>"),
        ("args", "The tag <tool_call> begins a call, <arg_key> follows."),
        ("hermes", '<tool_call>\n{"name": "list_files", "argu'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ' + "[" * 100_000),
    ],
)
def test_malformed_calls_come_back_as_content(family: str, text: str) -> None:
    events = joined(events_of(family, [text[:5000], text[5000:]]))
    assert events == [Content(text)]


@pytest.mark.parametrize(
    "text",
    [
        "<function=list_files>\n</function>",
        "<function=list_files>\n</function>\n</tool_call>",
        "<tool_call><function=list_files></function></tool_call>",
        "<tool_call>\n<function=list_files>\n</tool_call>",
        "<tool_call>\n<function=list_files>\n</function>",
        "<tool_call>\n<function=list_files>\n</function>\n</tool_c",
    ],
)
def test_tags_that_models_leave_out(text: str) -> None:
    assert summary(events_of("xml", text)) == ("", "", [LIST])


def test_a_value_without_its_closing_tag_ends_with_the_call() -> None:
    text = "<tool_call>\n<function=write_file>\n<parameter=path>\n/a\n</function>\n</tool_call>"
    call = ("write_file", {"path": "/a"})
    assert summary(events_of("xml", text)) == ("", "", [call])
    assert summary(events_of("xml", f"{text}\n{rendered('xml', *LIST)}")) == ("", "", [call, LIST])


def test_a_value_may_hold_the_tags_of_calls() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\nand\n</function>\n</tool_call>\n"
        "</parameter> or </function>"
    )
    call = ("write_file", {"content": text, "path": "/a"})
    assert summary(events_of("xml", rendered("xml", *call))) == ("", "", [call])
    assert summary(events_of("hermes", rendered("hermes", *call))) == ("", "", [call])
    tags = "</tool_call> <arg_key>x</arg_key> <arg_value>1</arg_value> and </arg_value> or </tool_call>."
    call = ("write_file", {"content": tags, "path": "/a"})
    assert summary(events_of("args", rendered("args", *call))) == ("", "", [call])


def test_a_repeated_parameter_counts_once() -> None:
    text = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n"
        "<parameter=path>\nb\n</parameter>\n<parameter=mode>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    assert summary(events_of("xml", text)) == ("", "", [("write_file", {"path": "a", "mode": 1})])


@every_family
def test_a_string_may_hold_any_number_of_closing_tags(family: str) -> None:
    """Each is looked at once: one by one, with all that came before, 1,500 of them would take minutes."""
    call = ("write_file", {"content": "</tool_call>, </parameter>, " * 1500})
    assert summary(events_of(family, rendered(family, *call))) == ("", "", [call])


def test_line_breaks_in_strings_of_json_need_no_escape() -> None:
    text = '<tool_call>\n{"name": "write_file", "arguments": {"content": "a\nb"}}\n</tool_call>'
    assert calls_of(events_of("hermes", text)) == [("write_file", {"content": "a\nb"})]


def test_arguments_of_json_within_a_string_are_opened() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert calls_of(events_of("hermes", text)) == [("f", {"a": 1})]


@given(length=st.integers(0, 200))
def test_an_answer_that_ends_inside_a_call_has_no_half_of_it(length: int) -> None:
    """Observing calls that end are whole; of others the text is there, for a client that wants it."""
    whole = rendered("xml", *WRITE)
    text = whole[: min(length, len(whole))]
    events = events_of("xml", text)
    if "</function>" in text:
        assert summary(events) == ("", "", [WRITE])
        return
    assert calls_of(events) == []
    assert truncated_calls_of(events) in ([], [text])
    assert not any(isinstance(event, ToolCallEnd) for event in events)
    if not truncated_calls_of(events):
        assert content_of(events) == text


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("args", "<tool_call> write_file \n<arg_key> path </arg_key> <arg_value>/a</arg_value></tool_call>"),
        ("lines", "<tool_call>write_file<arg_key>path</arg_key><arg_value>/a</arg_value></tool_call>"),
        ("args", "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>/a</arg_value>\n</tool_call>\n"),
        ("args", "<tool_call>write_file<arg_key>path</arg_key>/a</arg_value></tool_call>"),
        ("args", "<tool_call>write_file<arg_key>path</arg_key><arg_value>/a</tool_call>"),
        # A key without a name, and one that comes again.
        ("args", "<tool_call>write_file<arg_key></arg_key><arg_value>x</arg_value><arg_key>path</arg_key>"
         "<arg_value>/a</arg_value><arg_key>path</arg_key><arg_value>/b</arg_value></tool_call>"),
        ("args", f"<tool_call>write_file<arg_key>{'k' * 300}</arg_key><arg_value>x</arg_value>"
         "<arg_key>path</arg_key><arg_value>/a</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_calls_with_keys_and_values_that_are_not_quite_right_are_read(family: str, text: str) -> None:
    call = ("write_file", {"path": "/a"})
    for pieces in (text, [text]):
        assert summary(events_of(family, pieces)) == ("", "", [call])
    twice = f"{text}{rendered(family, *LIST)}"
    assert summary(events_of(family, twice)) == ("", "", [call, LIST])


def test_blanks_around_a_value_belong_to_it() -> None:
    call = ("write_file", {"content": "\n  a \n", "path": " "})
    assert summary(events_of("args", rendered("args", *call))) == ("", "", [call])


WEATHER: list[dict[str, Any]] = [
    {
        "name": "w",
        "input_schema": {
            "properties": {
                "city": {"type": "string"},
                "state": {"type": "string"},
                "days": {"type": "integer"},
            }
        },
    }
]
DALLAS: Call = ("w", {"city": "Dallas", "state": "TX"})


@pytest.mark.parametrize(
    "text",
    [
        # Without closing tags of values, functions and calls.
        "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</function>\n</tool_call>",
        "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</tool_call>",
        "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</function>",
        "<function=w>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</parameter>\n</tool_call>",
        # Blanks and quotes.
        "<tool_call><function=w><parameter=city>Dallas</parameter><parameter=state>TX</parameter></function>"
        "</tool_call>",
        "<tool_call>\n\n  <function= w >\n\n<parameter= city >\nDallas\n</parameter>\n \t<parameter=state>\n"
        "TX\n</parameter>\n\n</function> \n </tool_call>\n\n",
        '<tool_call>\n<function="w">\n<parameter="city">\nDallas\n</parameter>\n<parameter=\'state\'>\nTX\n'
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\r\n<function=w>\r\n<parameter=city>Dallas</parameter>\r\n<parameter=state>TX</parameter>"
        "\r\n</function>\r\n</tool_call>",
        # Parameters without a name, and names that come again.
        "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n</parameter>\n<parameter=\necho A; echo B\n"
        "</parameter>\n<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=w>\n<parameter=>\nx\n</parameter>\n<parameter=city>\nDallas\n</parameter>\n"
        "<parameter=state>\nTX\n</parameter>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_calls_in_tags_that_are_not_quite_right_are_read(text: str) -> None:
    for pieces in (text, [text], [text[:3], text[3:]]):
        assert summary(events_of("xml", pieces, tools=WEATHER)) == ("", "", [DALLAS])


def test_a_call_without_its_closing_tags_ends_before_the_next() -> None:
    call = "<tool_call>\n<function=w>\n<parameter=city>\nDallas\n</parameter>\n<parameter=state>\nTX"
    for end in ("\n", "\n</parameter>\n", "\n</parameter>\n</function>\n", "\n</function>\n</tool_call>\n"):
        for pieces in (f"{call}{end}{call}", [f"{call}{end}{call}"]):
            events = events_of("xml", pieces, tools=WEATHER)
            assert calls_of(events) == ([] if end == "\n" else [DALLAS]), end


def test_a_line_that_opens_no_parameter_of_the_tool_is_text() -> None:
    for tag in (
        "<parameter=other>",
        "<parameter=sta>",
        "<parameter=city>",
        "<parameter=",
        "x<parameter=state>",
    ):
        call = ("w", {"city": f"a\n{tag}\nb", "state": "TX"})
        text = rendered("xml", *call)
        for pieces in (text, [text]):
            assert summary(events_of("xml", pieces, tools=WEATHER)) == ("", "", [call])


def test_several_functions_in_one_tag() -> None:
    text = rendered("xml", *DALLAS)
    inner = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    events = events_of("xml", f"<tool_call>\n{inner}\n{inner}\n</tool_call>", tools=WEATHER)
    assert summary(events) == ("", "", [DALLAS, DALLAS])


def test_raw_line_breaks_in_the_json_of_a_value() -> None:
    tools = [{"name": "edit", "input_schema": {"properties": {"edits": {"type": "array"}}}}]
    text = rendered("xml", "edit", {"edits": '[{"old": "a\n\tb", "new": "c"}]'})
    assert calls_of(events_of("xml", text, tools=tools)) == [
        ("edit", {"edits": [{"old": "a\n\tb", "new": "c"}]})
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"n": {"type": "string"}}}]},
        {"$ref": "#/$defs/whole", "$defs": {"whole": {"properties": {"n": {"type": "string"}}}}},
        {"anyOf": [{"properties": {"m": {}}}, {"properties": {"n": {"type": "string"}}}]},
        {"properties": {"n": {"$ref": "#/properties/m"}, "m": {"type": "string"}}},
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"^n$": {"type": "string"}}},
    ],
)
def test_the_schema_of_a_parameter_is_found_wherever_it_stands(schema: Any) -> None:
    tools = [{"name": "f", "input_schema": schema}]
    assert calls_of(events_of("xml", rendered("xml", "f", {"n": "5"}), tools=tools)) == [("f", {"n": "5"})]


LS: Call = ("run", {"cmd": "ls"})


@pytest.mark.parametrize(
    ("body", "num_calls"),
    [
        ('{"name": "run", "parameters": {"cmd": "ls"}}', 1),
        ('{"arguments": {"cmd": "ls"}, "name": "run"}', 1),
        ('{"name": "run", "arguments": "{\\"cmd\\": \\"ls\\"}"}', 1),
        ('{"type": "function", "function": {"name": "run", "arguments": {"cmd": "ls"}}}', 1),
        ('{"name":"run","arguments":{"cmd":"ls"}}', 1),
        ('\n\n  {\n  "name": "run",\n\t"arguments": {"cmd": "ls"}\n}  \n', 1),
        ('{"name": "run", "arguments": {"cmd": "ls"}}\n{"name": "run", "arguments": {"cmd": "ls"}}', 2),
        ('[{"name": "run", "arguments": {"cmd": "ls"}}, {"name": "run", "arguments": {"cmd": "ls"}}]', 2),
    ],
)
def test_calls_in_json_that_are_not_quite_right_are_read(body: str, num_calls: int) -> None:
    for end in ("</tool_call>", "\n</tool_call>\n", ""):
        text = f"<tool_call>\n{body}{end}"
        for pieces in (text, [text]):
            assert summary(events_of("hermes", pieces)) == ("", "", [LS] * num_calls)
    twice = f"<tool_call>\n{body}\n<tool_call>\n{body}\n</tool_call>"
    assert summary(events_of("hermes", twice)) == ("", "", [LS] * 2 * num_calls)


@pytest.mark.parametrize("arguments", ["null", '""', "{}", '"{}"', '" "'])
def test_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
    assert calls_of(events_of("hermes", text)) == [("run", {})]


def test_a_number_beyond_a_double_is_the_largest_one() -> None:
    """So that a client can read the arguments, and that a demanded call is one."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": -1e999}}\n</tool_call>'
    assert calls_of(events_of("hermes", text)) == [("f", {"a": -sys.float_info.max})]


def test_too_many_calls_in_one_tag_are_content() -> None:
    body = '{"name": "run"}' * 300
    text = f"<tool_call>{body}</tool_call>"
    assert summary(events_of("hermes", [text])) == ("", text, [])


# --- properties ------------------------------------------------------------------------------------------

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=write_file>", "<function=other>", "</function>"),
    *("<parameter=path>", "<parameter=mode>", "<parameter=x>", "</parameter>", "<think>", "</think>"),
    *(
        "<parameter=",
        "\n<parameter=path>\n",
        "\n</parameter>\n",
        "<parameter=tags>\n",
        "</function>\n</tool_call>",
    ),
    *("\n", "\n\n", " ", "a", "é", '"', "<", ">", "</", "5", "true", "null", "[1]", "{}", "\\"),
    *('{"name": "write_file", "arguments": {"path": "x"}}', '{"name": ', '"</tool_call>"', "}"),
    *(
        "write_file",
        "<arg_key>path</arg_key>",
        "<arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg_key>",
        "mode",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@pytest.mark.sharded(of="processes")
@settings(max_examples=400)
@given(
    family=st.sampled_from(FAMILIES),
    text=texts,
    splits=st.lists(st.integers(0, 200)),
    is_thinking=st.booleans(),
)
def test_events_do_not_depend_on_where_the_text_is_split(
    family: str, text: str, splits: list[int], is_thinking: bool
) -> None:
    places = sorted({0, len(text), *(split for split in splits if split < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = joined(events_of(family, [text], is_thinking=is_thinking))
    assert joined(events_of(family, pieces, is_thinking=is_thinking)) == whole
    assert joined(events_of(family, text, is_thinking=is_thinking)) == whole
    for _, arguments in calls_of(whole):
        assert isinstance(arguments, dict)


@pytest.mark.sharded(of="processes")
@settings(max_examples=400)
@given(family=st.sampled_from(FAMILIES), text=texts, is_thinking=st.booleans())
def test_what_is_emitted_of_a_call_is_always_the_beginning_of_json(
    family: str, text: str, is_thinking: bool
) -> None:
    """Of complete calls and of those that the end of the answer truncates, after each character."""
    reported: dict[int, str] = {}
    for event in events_of(family, text, is_thinking=is_thinking):
        if isinstance(event, ToolCallArguments):
            reported[event.index] = reported.get(event.index, "") + event.json_fragment
            assert is_json_prefix(reported[event.index]), reported


TAGS = (
    *("</parameter>", "<parameter=a>", "</function>", "</tool_call>", "<tool_call>", "null", "5", "\n", ""),
    *("</arg_value>", "<arg_key>a</arg_key>"),
)
strings = st.text(st.sampled_from("ab \n\t\"\\<>/é{}'"), max_size=12) | st.sampled_from(TAGS)
values = {
    "path": strings,
    "content": strings,
    "mode": st.integers(-(2**70), 2**70),
    "executable": st.booleans(),
    "owner": st.none() | st.text("abc ", min_size=1).filter(str.strip),
    "tags": st.lists(strings, max_size=3),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "options": st.fixed_dictionaries({}, optional={"deep": st.booleans()}),
}
arguments = st.lists(st.sampled_from(sorted(values)), unique=True).flatmap(
    lambda names: st.tuples(*(st.tuples(st.just(name), values[name]) for name in names)).map(dict)
)
calls = st.lists(st.tuples(st.just("write_file"), arguments), max_size=3)
plain_texts = st.text("abc <>é", max_size=8).map(str.strip)


@settings(max_examples=300)
@given(
    family=st.sampled_from(FAMILIES),
    reasoning=plain_texts,
    content=plain_texts,
    calls=calls,
    step=st.integers(1, 9),
)
def test_what_is_rendered_is_read(
    family: str, reasoning: str, content: str, calls: list[Call], step: int
) -> None:
    text = f"{reasoning}\n</think>\n\n{content}"
    if calls:
        text += "\n\n" + "\n".join(rendered(family, *call) for call in calls)
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    events = events_of(family, pieces, is_thinking=True)
    assert summary(events) == (reasoning, content, calls)
    assert [list(call[1]) for call in calls_of(events)] == [list(call[1]) for call in calls]


def test_a_long_string_is_not_held_back() -> None:
    call = ("write_file", {"content": "x y\n" * 50_000})
    text = rendered("xml", *call)
    parser = output_parser(XML_TEMPLATE, TOOLS, is_thinking=False)
    events = []
    for start in range(0, len(text), 400):
        events += parser.push(text[start : start + 400])
        assert len(parser._text) < 50
    assert calls_of([*events, *parser.finish()]) == [call]
