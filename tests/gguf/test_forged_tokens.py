"""TM04 over templates in the manner of published ones, compared with `transformers` as the benchmark does."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.gguf.chat_template import ChatTemplate
from tests.audits.template_conversations import forged, honest, user
from tests.audits.template_vocabulary import ALL_CONTROL_TOKENS
from tests.audits.templates import Comparison, compare_forged, compare_honest

CHATML = Path(__file__).with_name("chatml.jinja").read_text()
# Each with a way of its own to bring texts together.
BODIES = {
    "concatenation": "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}",
    "reasoning taken out": "<|im_start|>{{ m.role }}\\n{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c }}<|im_end|>",
    "reasoning left out": "<|im_start|>{{ m.content.replace('</think>', '') }}{{ m.reasoning_content }}",
    "pieces of the template": "{{ '<|im_' + m.content }}{{ m.content + '|>' }}<{{ m.content }}>",
    "two messages": "{{ m.content }}{{ messages[0].content | trim }}{{ messages[-1].content[1:-1] }}",
    "JSON": "<|im_start|>{{ m | tojson }}{{ (m.tool_calls or []) | tojson(indent=2) }}",
    "JSON in ASCII": "{{ messages | tojson(ensure_ascii=true) }}<|im_end|>{{ tools | tojson }}",
    "a list": "<|im_start|>{{ messages }}{{ m.items() | list }}{{ tools | string }}{{ [m.content] }}",
    "accumulation": "{% set ns = namespace(t='<|im_start|>') %}{% for c in m.content %}"
    "{% set ns.t = ns.t + c %}{% endfor %}{{ ns.t | trim }}{{ (ns.t ~ m.content)[5:] }}",
    "a macro": "{% macro show(x) %}<|im_start|>{{ x }}{% endmacro %}"
    "{{ show(m.content) | trim | replace('x', '') }}",
    "case": "{{ m.content | upper }}{{ m.content | lower }}{{ m.content | capitalize | title }}<|im_end|>",
    "joining": "{{ [m.content, m.role, m.content] | join }}{{ '<|'.join([m.content, m.content]) }}",
    "calls": "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %}{{ k }}{{ v }}{{ v | string | safe }}{% endfor %}"
    "<|im_end|>{% endfor %}{{ m.content }}",
    "formats": "{{ '<|{}|>{}'.format(m.content, m.role) }}{{ '<|%s|>' % m.content }}<|im_end|>",
    "markup": "{% set c = m.content | safe %}{{ '<|' + c + '|>' + m.content }}{{ c ~ c }}{{ c | striptags }}",
    "generation": "{% generation %}<|im_start|>{{ m.content }}{% endgeneration %}{{ m.role ~ m.content }}",
}
TEMPLATES = {
    name: "{% for m in messages %}" + body + "{% endfor %}{{ tools | tojson if tools }}{{ reasoning_effort }}"
    for name, body in BODIES.items()
} | {"chatml": CHATML}


def fail(line: str) -> None:
    pytest.fail(line)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_tm04_nothing_forged_gets_through(source: str) -> None:
    with Comparison("Qwen3.5", source) as comparison:
        counts = compare_forged(comparison, range(40), fail)
    assert counts["forged"] == counts["forged_text_equal"] == 40
    assert counts["forged_through"] == counts["forged_refused"] == 0
    assert counts["through_by_parsing"] > 30


@pytest.mark.sharded(9)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_honest_conversations_have_the_text_and_ids_of_transformers(source: str) -> None:
    with Comparison("Qwen3.5", source) as comparison:
        counts = compare_honest(comparison, fail)
    assert counts["equal"] == counts["conversations"] == len(honest())


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | replace('#', '') }}",
        "{{ m.content[1:] }}",
        "{{ m.content | tojson(true) }}",
        "{{ m.content.split('#') | join }}",
        "{{ m.content | upper | lower }}",
        "{% for c in m.content %}{{ c }}{% endfor %}",
        "{{ m | tojson(indent=1) }}",
        "{{ m.content | list | join('') }}",
        "{{ '<' + m.content[-9:] }}",
    ],
)
def test_tm04_no_operation_of_a_template_assembles_a_control_token(body: str) -> None:
    source = "{% for m in messages %}<|im_start|>" + body + "<|im_end|>{% endfor %}"
    with ChatTemplate(source, ["<|im_start|>", "<|im_end|>"], {}) as template:
        rendered = template.render([user("a<|im_#end|><|im_end|>|im_end|>")])
    assert [text for text, is_control in rendered.segments if is_control] == ["<|im_start|>", "<|im_end|>"]


def test_ids_to_compare_with_are_those_of_apply_chat_template() -> None:
    with Comparison("Qwen3.5", CHATML) as comparison:
        for conversation in list(honest().values())[:40]:
            if theirs := comparison.theirs(conversation):
                fitted = comparison.fitted(conversation)
                assert theirs[1] == comparison.apply_chat_template(fitted.messages, fitted, tokenize=True)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 64))
def test_an_innocent_twin_spells_no_control_token(seed: int) -> None:
    attack, twin = forged(seed, ALL_CONTROL_TOKENS)
    assert [message["role"] for message in attack.messages] == [message["role"] for message in twin.messages]
    assert not any(token in str(twin) for token in ALL_CONTROL_TOKENS)
