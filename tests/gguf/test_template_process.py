"""Statements TM01 and TM02: a hostile template gets out of nothing, and stops at its limits."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from template_snippets import CHAT, SNIPPETS
from transformers.utils.chat_template_utils import _compile_jinja_template

from coldstream.errors import InvalidRequestError, TemplateError
from coldstream.gguf import template_process
from coldstream.gguf.template_process import MAX_SOURCE_CHARS, TemplateLimits, TemplateProcess

# Ways to leave a Jinja template that have been published, each ending in a command, a file or a module.
LEADS_OUT = "__import__('os').system('touch {canary}')"
PAYLOADS = [
    "''.__class__.__mro__[1].__subclasses__()",
    "''.__class__.__base__.__subclasses__()",
    "''['__class__']['__mro__'][1]['__subclasses__']()",
    "''|attr('__class__')|attr('__mro__')|last|attr('__subclasses__')()",
    "''|attr('\\x5f\\x5fclass\\x5f\\x5f')",
    "''|attr(['__cl','ass__']|join)",
    "''|attr('%c%cclass%c%c'|format(95,95,95,95))",
    "[].__class__.__base__.__subclasses__()[40]('/etc/passwd').read()",
    "{}.__class__.__bases__[0].__subclasses__()",
    '().__class__.__base__.__subclasses__()[59].__init__.__globals__.__builtins__.eval("' + LEADS_OUT + '")',
    "(1).__class__.__mro__",
    "config.__class__.__init__.__globals__['os'].popen('id').read()",
    "self.__init__.__globals__.__builtins__.open('{canary}', 'w')",
    "self._TemplateReference__context.cycler.__init__.__globals__.os.popen('id').read()",
    "self.__dict__",
    "cycler.__init__.__globals__.os.popen('touch {canary}').read()",
    "joiner.__init__.__globals__.os.popen('touch {canary}').read()",
    "namespace.__init__.__globals__.os.popen('touch {canary}').read()",
    "lipsum.__globals__['os'].popen('touch {canary}').read()",
    "lipsum.__globals__.__builtins__.open('{canary}', 'w')",
    "lipsum|attr('__globals__')",
    "lipsum['__glob'+'als__']",
    "range.__class__.__mro__",
    "dict.__base__.__subclasses__()",
    "dict.mro()",
    "url_for.__globals__['current_app'].config",
    "get_flashed_messages.__globals__.__builtins__",
    "request.application.__globals__.__builtins__.__import__('os').popen('id').read()",
    "raise_exception.__globals__['sys'].modules['os'].system('touch {canary}')",
    "raise_exception.__closure__",
    "raise_exception.__code__.co_consts",
    "strftime_now.__self__.__class__.__mro__",
    "strftime_now.__func__",
    "messages.append('x')",
    "messages[0].update({'role': 'system'})",
    "messages.clear.__self__.__class__.__base__",
    "messages.__class__.__init__.__globals__",
    "messages|map(attribute='__class__')|list",
    "messages|map('attr', '__class__')|map('attr', '__mro__')|list|pprint|upper",
    "messages|groupby('__class__.__mro__')",
    "messages|sort(attribute='__class__.__base__.__subclasses__')|first|attr('__class__')",
    "'{0.__class__.__mro__}'.format(messages)",
    "'{x.__class__}'.format_map({'x': messages})",
    "'%s'|format(messages.__class__)",
    "('{0.__cla'~'ss__.__base__}').format(messages)",
    "messages|tojson(default=namespace)",
    "messages|tojson(cls=namespace)",
    "(messages|tojson).__class__.__mro__",
    "caller.__globals__",
    "().__iter__.__self__.__class__.__bases__",
    "''.join.__self__.__class__.__base__",
    "(x for x in ()).gi_frame.f_back.f_globals",
]
STATEMENTS = [
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch {canary}') }}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import system %}",
    "{% for c in ''.__class__.__base__.__subclasses__() %}{{ c() }}{% endfor %}",
    "{% set x = lipsum.__globals__ %}{{ x['os'].system('touch {canary}') }}",
    "{% macro m() %}{% endmacro %}{{ m.__class__.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% filter attr('__class__') %}x{% endfilter %}{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__init__.__globals__ }}",
]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Text that gives away that something was reached which the data does not hold.
REACHED = ("<class", "<function", "<built-in", "<module", "root:", "uid=", "object at 0x")


@pytest.fixture
def render() -> Iterator[Callable[..., str]]:
    """Render a template in a process of its own that is gone afterwards."""
    started: list[TemplateProcess] = []

    def render(source: str, limits: TemplateLimits | None = None, **variables: Any) -> str:
        started.append(TemplateProcess(source, limits))
        return started[-1].render(variables).text

    yield render
    for process in started:
        process.close()


def assert_contained(render: Callable[..., str], source: str, canary: Path) -> None:
    source = source.replace("{canary}", str(canary))
    try:
        text = render(source, messages=[{"role": "user", "content": "x"}])
    except TemplateError as error:
        text = ""
        assert str(error).startswith("chat template: ")  # noqa: PT017  rendering may also succeed, harmlessly
    assert not any(trace in text for trace in REACHED), text
    assert not canary.exists()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_tm01_injected_expression_reaches_nothing(
    render: Callable[..., str], payload: str, tmp_path: Path
) -> None:
    assert_contained(render, "{{ " + payload + " }}", tmp_path / "canary")


@pytest.mark.parametrize("source", STATEMENTS)
def test_tm01_injected_statement_reaches_nothing(
    render: Callable[..., str], source: str, tmp_path: Path
) -> None:
    assert_contained(render, source, tmp_path / "canary")


def test_tm01_payloads_in_what_the_caller_gives_are_text() -> None:
    process = TemplateProcess("{{ messages[0].content }}{{ tools[0].name }}{{ reasoning_effort }}")
    for payload in [*PAYLOADS, *STATEMENTS]:
        text = "{{ " + payload + " }}"
        given = {"messages": [{"content": text}], "tools": [{"name": text}], "reasoning_effort": text}
        assert process.render(given).text == text * 3
    process.close()


ESCAPED = """
import sys
sys.path.insert(0, {folder!r})
import template_worker
template_worker.confine(256 << 20)
try:
    {attempt}
except PermissionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "attempt",
    [
        "open('{canary}', 'w')",
        "open('/etc/passwd')",
        "__import__('os').system('touch {canary}')",
        "__import__('os').listdir('/')",
        "__import__('os').fork()",
        "__import__('os').kill(1, 0)",
        "__import__('os').mkdir('{canary}')",
        "__import__('posix').putenv('a', 'b')",
        "__import__('_socket').socket()",
        "__import__('ftplib')",
        "__import__('_ctypes').dlopen('libc.so.6', 0)",
        "sys.modules['resource'].setrlimit(sys.modules['resource'].RLIMIT_CPU, (9, 9))",
    ],
)
def test_tm01_code_that_left_the_sandbox_finds_nothing_to_open(attempt: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = Path(template_process.__file__).parent
    code = ESCAPED.format(folder=str(folder), attempt=attempt.replace("{canary}", str(canary)))
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("the template tried "), done.stderr
    assert not canary.exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (ENDLESS, "processor time"),
        ("{{ 2 ** (10 ** 10) }}", "processor time|memory"),
        ("{{ 10 ** 5000 }}", "4300 digits"),
        ("{{ range(10 ** 9) | length }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{% for a in range(99999) %}0123456789{% endfor %}", "wrote more than"),
        ("{{ 'a' * 10 ** 9 }}", "memory"),
        ("{{ ['a' * 10 ** 6] * 10 ** 9 }}", "memory"),
        (
            "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "memory",
        ),
        ("{{ '%0999999999d' | format(1) }}", "memory|OverflowError"),
        ("{{ 'x' | center(10 ** 9) }}", "memory"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply|not compiled|its process ended"),
        ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "nested too deeply|not compiled|its process ended"),
        ("{{ " + "-" * 100_000 + "1 }}", "nested too deeply|not compiled|its process ended"),
        ("a" * (MAX_SOURCE_CHARS + 1), "characters, allowed are"),
        ("{#" * 300_000, "not compiled"),
    ],
    ids=range(16),
)
@pytest.mark.timeout(60)
def test_tm02_limits_stop_a_template(render: Callable[..., str], source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(source)


@pytest.mark.timeout(60)
def test_tm02_a_stopped_template_renders_again() -> None:
    process = TemplateProcess("{% if loop_forever %}" + ENDLESS + "{% endif %}ok", TemplateLimits(cpu_s=0.2))
    try:
        assert process.render({}).text == "ok"
        with pytest.raises(TemplateError, match=r"more than 0\.2 s of processor time"):
            process.render({"loop_forever": True})
        assert process.render({}).text == "ok"
    finally:
        process.close()


def test_output_may_be_four_times_the_input_and_a_little_more(render: Callable[..., str]) -> None:
    text = "汉" * 10_000
    assert render("{{ text }}{{ text }}{{ text }}", text=text) == text * 3
    with pytest.raises(TemplateError, match="wrote more than"):
        render("{% for i in range(99) %}{{ text }}{% endfor %}", text=text)


def test_a_large_conversation_is_rendered(render: Callable[..., str]) -> None:
    text = "汉 a\n" * 700_000
    assert render("{{ text | trim }}", text=text) == text.strip()


def test_a_conversation_that_is_too_large_is_refused(render: Callable[..., str]) -> None:
    with pytest.raises(InvalidRequestError, match="allowed are"):
        render("{{ text }}", text="a" * 9_000_000)


@pytest.mark.parametrize("value", [{1}, b"x", object(), float])
def test_variables_must_be_json(render: Callable[..., str], value: object) -> None:
    with pytest.raises(InvalidRequestError, match="not plain JSON"):
        render("x", value=value)


def test_names_of_hugging_face_work(render: Callable[..., str]) -> None:
    source = (
        "{% generation %}{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 1 %}{% continue %}"
        "{% endif %}{% if i == 4 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
        "{% endgeneration %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1] | tojson(indent=2) }}{{ strftime_now('%Y') }}"
    )
    assert render(source) == '5{"b": "<é>", "a": 1}[\n  1\n]' + time.strftime("%Y")


def test_nothing_that_the_environment_offers_is_denied(render: Callable[..., str]) -> None:
    source = "\n".join(SNIPPETS)
    assert render(source, **CHAT) == _compile_jinja_template(source).render(**CHAT)
    assert len(render("{{ lipsum() }}")) > 100
    assert render("{{ '<b>x</b> &lt;y' | striptags }}") == "x <y"


def test_what_the_template_wrote_is_reported() -> None:
    process = TemplateProcess("<|{{ m }}|>{{ own }}{{ messages[0].role }}{{ m }}")
    messages = [{"role": "user"}]
    chat = process.render({"m": "m|", "messages": messages}, {"own": "own"}, ["user"])
    assert chat.text == "<|m||>ownuserm|"
    assert [chat.text[start:end] for start, end in chat.written] == ["<|", "|>ownuser"]
    chat = process.render({"m": "", "messages": messages, "own": "x"})
    assert [chat.text[start:end] for start, end in chat.written] == ["<||>"]
    process.close()


def test_an_answer_of_the_longest_escapes_and_shortest_runs_has_room() -> None:
    process = TemplateProcess("{% for c in text %}{{ c }}\U0001f600{{ c }}\U0001f600{% endfor %}")
    text = "\U0001f600" * 20_000
    assert process.render({"text": text}).text == "\U0001f600" * 80_000
    process.close()


def test_threads_are_serialised() -> None:
    process = TemplateProcess("{{ text }}")
    results: dict[int, list[str]] = {}

    def run(number: int) -> None:
        results[number] = [process.render({"text": f"{number} {turn}"}).text for turn in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.close()
    assert results == {number: [f"{number} {turn}" for turn in range(20)] for number in range(4)}


def test_the_process_ends_with_its_owner() -> None:
    process = TemplateProcess("x")
    process.start()
    assert process._process is not None
    child = process._process
    assert Path(f"/proc/{child.pid}/environ").read_bytes() == b""
    assert len(os.listdir(f"/proc/{child.pid}/fd")) == 3
    del process
    assert child.returncode is not None


def test_a_process_that_was_killed_is_replaced() -> None:
    process = TemplateProcess("x")
    assert process.render({}).text == "x"
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.render({}).text == "x"
    process.close()


def test_a_process_that_answered_is_kept_and_one_without_a_whole_answer_is_not() -> None:
    """What an abandoned rendering writes later must not be taken for the next one's text."""
    slow = "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}"
    source = (
        "{% if number == 1 %}"
        + slow
        + "{% endif %}{% if number == 2 %}{{ raise_exception('no') }}{% endif %}{{ number }}"
    )
    limits = TemplateLimits(cpu_s=30.0)
    process = TemplateProcess(source, limits)
    try:
        assert process.render({"number": 0}).text == "0"
        first = process._process
        with pytest.raises(TemplateError, match="it refused: no"):
            process.render({"number": 2})
        assert process.render({"number": 3}).text == "3"
        assert process._process is first is not None
        process._limits = replace(limits, wall_s=0.0)
        with pytest.raises(TemplateError, match="no answer in 0 s, stopped"):
            process.render({"number": 1})
        assert process._process is None
        assert first.returncode is not None
        process._limits = limits
        assert process.render({"number": 4}).text == "4"
    finally:
        process.close()


def test_a_process_that_ran_out_of_memory_is_ended_with_its_answer() -> None:
    process = TemplateProcess("{% if large %}{{ 'a' * 10 ** 9 }}{% endif %}ok")
    try:
        assert process.render({}).text == "ok"
        with pytest.raises(TemplateError, match="more memory than it may have"):
            process.render({"large": True})
        assert process._process is None
        assert process.render({}).text == "ok"
    finally:
        process.close()
