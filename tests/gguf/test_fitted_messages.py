"""Conversations that templates refuse or shorten in silence, and what they are given instead."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.errors import InvalidRequestError, TemplateError
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.fitted_messages import CALL_FRAME, NO_USER, RESULT_FRAME, SYSTEM_FRAME
from coldstream.gguf.template_capabilities import EFFORTS

Message = dict[str, Any]

TURNS = "{% for m in messages %}"
SHOWN = "<{{ m.role }}>{{ m.content }}</>"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
)
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
# Each with a restriction that published templates have.
TEMPLATES = {
    "anything": TURNS + SHOWN.replace("</>", CALLS + "</>") + "{% endfor %}",
    "chatml of Qwen3.5": Path(__file__).with_name("chatml.jinja").read_text(),
    "no system, alternating, as Gemma": TURNS + NO_SYSTEM + ALTERNATE + SHOWN + "{% endfor %}",
    "system into the first user, alternating, as Gemma 3": (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}"
        + ALTERNATE
        + "<{{ m.role }}>{{ s if loop.first }}{{ m.content }}</>{% endfor %}"
    ),
    "late systems left out in silence": (
        TURNS + "{% if m.role != 'system' or loop.first %}" + SHOWN + "{% endif %}{% endfor %}"
    ),
    "systems gathered at the beginning": (
        TURNS + "{% if m.role == 'system' %}" + SHOWN + "{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role != 'system' %}" + SHOWN + "{% endif %}{% endfor %}"
    ),
    "parts only": TURNS
    + "<{{ m.role }}>{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}</>{% endfor %}",
}


@pytest.fixture(scope="module", params=TEMPLATES.values(), ids=TEMPLATES.keys())
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    with ChatTemplate(request.param, ["<|im_start|>", "<|im_end|>"], {}) as template:
        yield template


def opened(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], [], {})


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def numbered(roles: list[str]) -> list[Message]:
    """Messages of these roles, each with a text that is in no other one."""
    texts = [f"text{index}." for index in range(len(roles))]
    return [message(role, text) for role, text in zip(roles, texts, strict=True)]


ROLES = st.lists(
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]), min_size=1, max_size=7
)


@settings(max_examples=60, deadline=None)
@given(roles=ROLES)
def test_every_order_of_roles_is_shown_whole_and_in_order(template: ChatTemplate, roles: list[str]) -> None:
    messages = numbered(roles)
    before = [dict(each) for each in messages]
    text = template.render(messages).text
    places = [text.find(each["content"]) for each in messages]
    assert -1 not in places
    assert places == sorted(places)
    assert messages == before


@pytest.mark.sharded(6)
@settings(max_examples=60, deadline=None)
@given(roles=ROLES, late=st.sampled_from(["system", "developer"]))
def test_a_late_system_message_keeps_the_prompt_before_it(
    template: ChatTemplate, roles: list[str], late: str
) -> None:
    """All up to the end of the last text is as it was, so that a kept prefix still fits."""
    messages = [message("user", "first."), *numbered([*roles, "user"])]
    last = messages[-1]["content"]
    before = template.render(messages).text
    after = template.render([*messages, message(late, "Be brief.")]).text
    end = before.index(last) + len(last)
    assert after[:end] == before[:end]
    assert "Be brief." in after[end:]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "anything"])
def test_what_a_template_accepts_stays_as_it_is(name: str) -> None:
    messages = numbered(["system", "user", "assistant", "user"])
    with opened(name) as template:
        is_accepted = template.capabilities.accepts_system
        fitted = template.render(messages[0 if is_accepted else 1 :]).text
    assert SYSTEM_FRAME[:8] not in fitted
    assert NO_USER not in fitted


def test_a_late_system_message_is_the_users_in_a_frame() -> None:
    with opened("late systems left out in silence") as template:
        text = template.render(numbered(["user", "system", "assistant"])).text
    framed = SYSTEM_FRAME.format("text1.")
    assert text == f"<user>text0.</><user>{framed}</><assistant>text2.</>"


def test_roles_that_must_alternate_are_joined() -> None:
    with opened("no system, alternating, as Gemma") as template:
        text = template.render(numbered(["system", "user", "user", "assistant", "assistant"])).text
    joined = "\n\n".join([SYSTEM_FRAME.format("text0."), "text1.", "text2."])
    assert text == f"<user>{joined}</><assistant>text3.\n\ntext4.</>"


def test_a_note_stands_where_a_user_is_needed() -> None:
    with opened("no system, alternating, as Gemma") as template:
        assert template.render([message("assistant", "Hi.")]).text == f"<user>{NO_USER}</><assistant>Hi.</>"
    with opened("anything") as template:
        assert template.render([message("assistant", "Hi.")]).text == "<assistant>Hi.</>"


def test_several_systems_at_the_beginning_are_one() -> None:
    with opened("anything") as template:
        text = template.render(numbered(["system", "developer", "user", "developer"])).text
    assert text == "<system>text0.\n\ntext1.</><user>text2.</><system>text3.</>"


def call(arguments: Any) -> Message:
    function = {"name": "turn", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}


def test_a_system_message_behind_a_result_keeps_the_thoughts_before_it() -> None:
    """A new message of the user would make this template leave out the thought, and change the prefix."""
    with opened("chatml of Qwen3.5") as template:
        assert template.capabilities.drops_thoughts
        turn = [message("user", "a"), {**call({}), "reasoning": "I turn."}, message("tool", "done")]
        before = template.render(turn).text
        after = template.render([*turn, message("system", "Be brief.")]).text
    end = before.index("done") + len("done")
    assert "I turn." in before
    assert after[:end] == before[:end]
    assert after[end:].startswith("\n\n" + SYSTEM_FRAME.format("Be brief.") + "\n</tool_response>")


def test_calls_that_a_template_leaves_out_are_texts() -> None:
    with opened("late systems left out in silence") as template:
        result = {"role": "tool", "tool_call_id": "a", "content": "done"}
        text = template.render([message("user", "x"), call('{"angle": 5}'), result]).text
    called, given = CALL_FRAME.format("turn", '{"angle": 5}'), RESULT_FRAME.format("turn", "done")
    assert text == f"<user>x</><assistant>{called}</><user>{given}</>"


@pytest.mark.parametrize("identity", [[], {}, 5], ids=repr)
def test_ids_of_calls_are_of_any_type(identity: Any) -> None:
    with opened("late systems left out in silence") as template:
        called = {**call({}), "tool_calls": [{**call({})["tool_calls"][0], "id": identity}]}
        result = {"role": "tool", "tool_call_id": identity, "content": "done"}
        text = template.render([message("user", "x"), called, result]).text
    assert text.endswith(f"<user>{RESULT_FRAME.format('turn', 'done')}</>")


def test_arguments_that_are_no_json_are_refused() -> None:
    with (
        opened("late systems left out in silence") as template,
        pytest.raises(InvalidRequestError, match="the arguments of a call are no JSON"),
    ):
        template.render([message("user", "x"), call({"angles": {5}})])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ("{}", "{}"),
        ('{"a": 1}', "{'a': 1}"),
        ({"a": 1}, "{'a': 1}"),
        ('{"a": ', """{'arguments': '{"a": '}"""),
        ("[1]", "{'arguments': [1]}"),
        ("5", "{'arguments': 5}"),
        ("null", "{}"),
        ([1], "{'arguments': [1]}"),
        ('{"a": "\\ud83d"}', "{'a': '\ufffd'}"),
        ('{"a": "\\ud83d\\ude00"}', "{'a': '😀'}"),
        ("[" * 100_000, "{'arguments': '" + "[" * 100_000 + "'}"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_of_earlier_calls_are_an_object(arguments: Any, shown: str) -> None:
    with opened("anything") as template:
        text = template.render([message("user", "x"), call(arguments)]).text
    assert text == f"<user>x</><assistant>turn{shown}</>"


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), (None, "{}"), ('{"a": ', '{"a": '), ({"a": 1}, '{"a": 1}')]
)
def test_templates_that_want_text_get_text(arguments: Any, shown: str) -> None:
    """As DeepSeek's, which add the arguments to a text."""
    source = TURNS + "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.name + c.function.arguments }}"
    with ChatTemplate(source + "{% endfor %}" + SHOWN + "{% endfor %}", [], {}) as template:
        text = template.render([message("user", "x"), call(arguments)]).text
    assert text == f"<user>x</>call turn{shown}<assistant></>"


def test_what_is_written_here_is_no_control_token() -> None:
    source = TURNS + NO_SYSTEM + SHOWN + "{% endfor %}"
    with ChatTemplate(source, ["[System message]", "</>"], {}) as template:
        rendered = template.render([message("system", "</>"), message("user", "x")])
    assert [text for text, is_control in rendered.segments if is_control] == ["</>", "</>"]


# ---- efforts ---------------------------------------------------------------------------------------------

THINKS = "{% if enable_thinking is defined and not enable_thinking %}-{% else %}<think>{% endif %}"
THREE = (
    "{% if enable_thinking is undefined or enable_thinking %}"
    "{% set e = reasoning_effort | default('xhigh') %}"
    "{% if e not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected effort') }}{% endif %}{{ e }}"
    "{% endif %}"
)
BODY = TURNS + SHOWN + "{% endfor %}"
EFFORT_CASES = {
    "three words, others refused, as Qwen3.8": (
        THREE + BODY + THINKS,
        ["-", "low<think>", "low<think>", "medium<think>", "medium<think>", "xhigh<think>", "xhigh<think>"],
    ),
    "any word is printed, as gpt-oss": (
        BODY + "{{ reasoning_effort | default('medium') }}",
        ["low", "low", "low", "medium", "high", "high", "high"],
    ),
    "none is known, thinking can be off": (BODY + THINKS, ["-", "-", *["<think>"] * 5]),
    "nothing is known": (BODY + ".", ["."] * 7),
    "two words, others ignored": (
        BODY + "{% if reasoning_effort == 'low' %}few{% elif reasoning_effort == 'max' %}many{% endif %}",
        ["few", "few", "few", "few", "few", "many", "many"],
    ),
}


@pytest.mark.parametrize(("source", "endings"), EFFORT_CASES.values(), ids=EFFORT_CASES.keys())
def test_efforts_are_mapped_to_those_that_a_template_knows(source: str, endings: list[str]) -> None:
    with ChatTemplate(source, [], {}) as template:
        for effort, ending in zip(EFFORTS, endings, strict=True):
            text = template.render([message("user", "x")], reasoning_effort=effort).text
            assert text.replace("<user>x</>", "") == ending, effort


def test_thinking_that_is_asked_for_stays_on() -> None:
    with ChatTemplate(EFFORT_CASES["none is known, thinking can be off"][0], [], {}) as template:
        text = template.render([message("user", "x")], reasoning_effort="none", enable_thinking=True).text
    assert text.endswith("<think>")


def test_an_effort_that_is_no_word_for_one_is_refused() -> None:
    with (
        opened("anything") as template,
        pytest.raises(InvalidRequestError, match="reasoning_effort: 'frantic'"),
    ):
        template.render([message("user", "x")], reasoning_effort="frantic")


# ---- the last message continued --------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["import ", "", "a\n", "</think>x", "qvzwend0x"])
def test_the_last_message_is_continued(template: ChatTemplate, content: str) -> None:
    messages = [message("user", "x"), message("assistant", content)]
    options: Any = {"add_generation_prompt": False}
    whole = template.render([*messages[:1], message("assistant", f"{content}qvzwend1x")], **options).text
    continued = template.render(messages, continue_final_message=True, **options)
    assert continued.text == whole[: whole.index("qvzwend1x")]
    assert continued.text.endswith(content.removeprefix("</think>"))


def test_a_continued_message_forges_nothing() -> None:
    with ChatTemplate(TEMPLATES["chatml of Qwen3.5"], ["<|im_start|>", "<|im_end|>"], {}) as template:
        messages = [message("user", "x"), message("assistant", "a<|im_end|>b")]
        rendered = template.render(messages, continue_final_message=True, add_generation_prompt=False)
    control = [text for text, is_control in rendered.segments if is_control]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert rendered.text.endswith("a<|im_end|>b")


@pytest.mark.parametrize(
    ("messages", "add", "problem"),
    [
        ([message("user", "x"), message("assistant", "y")], True, "not together with add_generation_prompt"),
        ([message("user", "x")], False, "must be the assistant's"),
        ([], False, "must be the assistant's"),
        ([message("user", "x"), call({})], False, "tool_calls"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: list[Message], add: bool, problem: str) -> None:
    with opened("anything") as template, pytest.raises(InvalidRequestError, match=problem):
        template.render(messages, continue_final_message=True, add_generation_prompt=add)


def test_a_template_that_does_not_show_the_last_message_cannot_continue_it() -> None:
    with ChatTemplate("{{ messages[0].content }}", [], {}) as template:
        messages = [message("user", "x"), message("assistant", "y")]
        with pytest.raises(TemplateError, match="does not show the last message"):
            template.render(messages, continue_final_message=True, add_generation_prompt=False)


# ---- calls that a template shows one at a time ----------------------------------------------------------

HARMONY = Path(__file__).with_name("harmony.jinja").read_text()


def numbered_call(number: int, name: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": {"n": number}}}


def test_calls_of_one_message_are_messages_of_their_own_with_their_results() -> None:
    calls = [numbered_call(i, name) for i, name in enumerate(("first", "second", "third"))]
    messages = [
        message("user", "Go."),
        {"role": "assistant", "content": "I go.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "three"},
        {"role": "tool", "tool_call_id": "c0", "content": "one"},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
        message("user", "More."),
    ]
    with ChatTemplate(HARMONY, [], {}) as template:
        text = template.render(messages).text
    wanted = [
        "I go.",
        "to=functions.first",
        "one",
        "to=functions.second",
        "two",
        "to=functions.third",
        "three",
    ]
    places = [text.index(each) for each in [*wanted, "More."]]
    assert places == sorted(places)


def test_a_text_beside_a_thought_ends_the_thought() -> None:
    turn = {
        "role": "assistant",
        "content": "Then this.",
        "reasoning": "Think.",
        "tool_calls": [numbered_call(0, "f")],
    }
    messages = [message("user", "Go."), turn, {"role": "tool", "tool_call_id": "c0", "content": "one"}]
    with ChatTemplate(HARMONY, [], {}) as template:
        text = template.render(messages).text
        assert "<|channel|>analysis<|message|>Think.\n\nThen this.<|end|>" in text
        # Once there is an answer, the template leaves the thought out, and the text with it.
        assert "Think." not in template.render([*messages, message("assistant", "Done.")]).text


def test_templates_that_show_all_calls_get_them_as_they_are() -> None:
    with opened("chatml of Qwen3.5") as template:
        assert template.capabilities.accepts_several_calls
        assert template.capabilities.accepts_text_beside_thoughts_of_calls


# ---- tools that a template fails at ----------------------------------------------------------------------

DESCRIBED = (
    "{% for t in tools or [] %}{{ '//' + t.function.description + t.function.name }}"
    "{% for n, p in t.function.parameters.properties | items %}"
    "{{ n + (p.default if p.enum and p.default is defined else '') }}"
    "{% endfor %}{% endfor %}"
)


def test_tools_are_given_what_a_template_fails_without() -> None:
    listed = {"type": "integer", "enum": [1, 2], "default": 2}
    words = {"type": "string", "enum": ["a", "b"], "default": "b"}
    parameters = {"type": "object", "properties": {"n": listed, "w": words}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with ChatTemplate(DESCRIBED + TEMPLATES["anything"], [], {}) as template:
        assert template.render([message("user", "x")], tools=[tool]).text == "//fnwb<user>x</>"
    with ChatTemplate("{{ tools | tojson }}" + TEMPLATES["anything"], [], {}) as template:
        assert '"default": 2' in template.render([message("user", "x")], tools=[tool]).text
    assert listed["default"] == 2
