"""The chat: messages, commands, settings; with scripted lines instead of a terminal."""

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from coldstream.cli.answer import ShownAnswer
from coldstream.cli.chat import ChatSession, complete_message, run_chat
from coldstream.engine import LLM, SamplingParams, Stream
from coldstream.errors import ContextFullError, InvalidRequestError

PARAMS = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)


@pytest.fixture
def chat(llm: LLM) -> ChatSession:
    return ChatSession(llm, PARAMS)


def _script(*lines: str | BaseException) -> Callable[[str], str]:
    remaining: Iterator[str | BaseException] = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(remaining, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


def test_answers_become_part_of_the_conversation(
    chat: ChatSession, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(chat, _script("def", "and"), quiet=True) == 0
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    (first,) = llm.chat([{"role": "user", "content": "def"}], PARAMS)
    (second,) = llm.chat(chat.messages[:3], PARAMS)
    assert [chat.messages[1]["content"], chat.messages[3]["content"]] == [first.text, second.text]
    printed = capsys.readouterr()
    assert printed.out.startswith(first.text)
    assert second.text in printed.out
    assert printed.err == ""


def test_statistics_follow_every_answer_unless_quiet(
    chat: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    run_chat(chat, _script("def"), quiet=False)
    assert "generated 6 tokens" in capsys.readouterr().err
    run_chat(chat, _script("/stats"), quiet=True)
    assert "seed 4" in capsys.readouterr().out


def test_regen_answers_the_last_message_again(chat: ChatSession) -> None:
    run_chat(chat, _script("def", "/set seed 5", "/regen"), quiet=True)
    assert len(chat.messages) == 2
    assert chat.messages[0]["content"] == "def"
    assert chat.params.seed == 5


def test_regen_without_a_message_is_an_error_and_the_chat_goes_on(
    chat: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(chat, _script("/regen", "def"), quiet=True) == 0
    assert "nothing to answer again" in capsys.readouterr().err
    assert len(chat.messages) == 2


def test_clear_and_system(chat: ChatSession, llm: LLM) -> None:
    run_chat(chat, _script("def", "/clear"), quiet=True)
    assert chat.messages == []
    run_chat(chat, _script("/system be brief", "def"), quiet=True)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def"}]
    assert chat.messages[1]["content"] == llm.chat(messages, PARAMS)[0].text
    run_chat(chat, _script("/system", "def"), quiet=True)
    assert chat.messages[1]["content"] == llm.chat(messages[1:], PARAMS)[0].text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/set temperature 0", replace(PARAMS, temperature=0.0)),
        ("/set top_k 7", replace(PARAMS, top_k=7)),
        ("/set seed none", replace(PARAMS, seed=None)),
        ("/set max_tokens none", replace(PARAMS, max_tokens=None)),
    ],
)
def test_set_changes_a_setting(chat: ChatSession, line: str, expected: SamplingParams) -> None:
    run_chat(chat, _script(line), quiet=True)
    assert chat.params == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 1", "no setting 'heat'"),
        ("/set temperature hot", "'hot' is not a number"),
        ("/set temperature -1", "temperature must be"),
        ("/set temperature none", "temperature must be"),
        ("/set top_k 1.5", "'1.5' is not a number"),
        ("/frobnicate", "no command /frobnicate"),
    ],
)
def test_wrong_commands_say_why_and_change_nothing(
    chat: ChatSession, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(chat, _script(line), quiet=True) == 0
    assert message in capsys.readouterr().err
    assert chat.params == PARAMS


def test_help_and_settings_are_listed(chat: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    run_chat(chat, _script("/help", "/set"), quiet=True)
    out = capsys.readouterr().out
    assert "/regen" in out
    assert "seed 4\n" in out
    assert "max_tokens 6\n" in out
    run_chat(chat, _script("/set max_tokens none", "/set max_tokens", "/set heat"), quiet=True)
    out, err = capsys.readouterr()
    assert out == "max_tokens none\n"
    assert "no setting 'heat'" in err


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_exit_leaves_at_once(chat: ChatSession, command: str) -> None:
    assert run_chat(chat, _script(command, "def"), quiet=True) == 0
    assert chat.messages == []


def test_ctrl_c_at_the_prompt_stays(chat: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    run_chat(chat, _script(KeyboardInterrupt(), "def"), quiet=True)
    assert len(chat.messages) == 2
    assert "Ctrl-D leaves" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [("def",), ("def", "/regen")])
@pytest.mark.parametrize("moment", [(Stream, "close"), (ShownAnswer, "describe"), (ChatSession, "keep")])
def test_ctrl_c_just_as_an_answer_ends_keeps_it_and_is_not_lost(
    chat: ChatSession,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: tuple[type, str],
    lines: tuple[str, ...],
) -> None:
    """In the last of these lines, and then the next line is read."""
    owner, name = moment
    method = getattr(owner, name)
    remaining = iter(lines)

    def interrupt(self: object, *arguments: str) -> object:
        signal.raise_signal(signal.SIGINT)
        return method(self, *arguments)

    def read_line(prompt: str) -> str:
        line = next(remaining, "")
        if line == lines[-1]:
            monkeypatch.setattr(owner, name, interrupt)
        if not line:
            raise EOFError
        return line

    assert run_chat(chat, read_line, quiet=True) == 0
    assert chat.messages[1]["content"] == llm.chat([{"role": "user", "content": "def"}], PARAMS)[0].text
    assert len(chat.messages) == 2
    assert capsys.readouterr().err.count("Ctrl-D leaves") == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one line"], "one line"),
        (['"""a', "b", 'c"""'], "a\nb\nc"),
        (['"""', "a", "", '"""'], "\na\n\n"),
        (['"""whole"""'], "whole"),
    ],
)
def test_quotes_hold_a_message_of_several_lines(lines: list[str], message: str) -> None:
    first, *rest = lines
    assert complete_message(first, _script(*rest)) == message


def test_a_quoted_message_may_begin_like_a_command(chat: ChatSession) -> None:
    run_chat(chat, _script('"""', "/exit", '"""', "", "def"), quiet=True)
    assert [message["content"] for message in chat.messages[::2]] == ["/exit", "def"]


def test_a_request_that_fails_leaves_the_conversation_as_it_was(chat: ChatSession, llm: LLM) -> None:
    run_chat(chat, _script("def", "x" * 5000), quiet=True)
    assert len(chat.messages) == 2


def test_raw_messages_are_completed_on_their_own(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatSession(llm, PARAMS, raw=True)
    run_chat(chat, _script("def f"), quiet=True)
    assert capsys.readouterr().out.rstrip("\n") == llm.generate("def f", PARAMS)[0].text.rstrip("\n")
    run_chat(chat, _script("/drop"), quiet=True)
    assert "no conversation" in capsys.readouterr().err


def test_regen_continues_the_last_raw_text_again(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatSession(llm, PARAMS, raw=True)
    run_chat(chat, _script("and", "def f", "/set seed 5", "/regen", "/regen"), quiet=True)
    out, err = capsys.readouterr()
    again = llm.generate("def f", replace(PARAMS, seed=5))[0].text.rstrip("\n")
    assert out.count(again) == 2
    assert err == ""
    run_chat(chat, _script("/clear", "/regen"), quiet=True)
    assert "nothing to answer again" in capsys.readouterr().err


@pytest.fixture
def full_chat(chat: ChatSession) -> ChatSession:
    """A conversation that has no room for a message of 60 characters."""
    while True:
        try:
            chat.ask("y" * 60).close()
        except ContextFullError:
            return chat
        run_chat(chat, _script("x" * 10), quiet=True)
        assert 0 < chat.num_turns < 50


@pytest.mark.parametrize("reply", ["", "y", " Yes "])
def test_a_full_context_offers_to_forget_the_oldest_messages(
    full_chat: ChatSession, reply: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, num_turns = full_chat.messages, full_chat.num_turns
    asked: list[str] = []
    lines = iter(["y" * 60, reply])

    def read_line(prompt: str) -> str:
        asked.append(prompt)
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    assert run_chat(full_chat, read_line, quiet=True) == 0
    match = re.fullmatch(
        rf"forget the (\d+) oldest messages and their answers, of {num_turns}\? \[Y/n\] ", asked[1]
    )
    assert match, asked
    dropped = int(match[1])
    assert 1 < dropped < num_turns
    assert full_chat.messages[:-2] == before[2 * dropped :]
    assert full_chat.messages[-2]["content"] == "y" * 60
    assert "error" not in capsys.readouterr().err


def test_who_forgets_nothing_learns_what_else_there_is(
    full_chat: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    before = full_chat.messages
    run_chat(full_chat, _script("y" * 60, "n"), quiet=True)
    assert full_chat.messages == before
    assert "was not sent: /drop forgets the oldest messages, /clear all of them" in capsys.readouterr().err
    run_chat(full_chat, _script("/drop 2", "/drop"), quiet=True)
    assert full_chat.messages == before[6:]
    assert f"{full_chat.num_turns} messages left" in capsys.readouterr().out
    run_chat(full_chat, _script(f"/drop {full_chat.num_turns - 1}"), quiet=True)
    assert capsys.readouterr().out == "1 message left\n"
    full_chat.messages = before[6:]
    for command, problem in (
        ("/drop 0", "/drop 0: give a number from 1 to"),
        ("/drop 99", "/drop 99: give a number from 1 to"),
        ("/drop x", "/drop x: not a number of messages"),
    ):
        run_chat(full_chat, _script(command), quiet=True)
        assert problem in capsys.readouterr().err
    assert full_chat.messages == before[6:]


def test_a_message_that_never_fits_is_not_asked_about(
    full_chat: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    before = full_chat.messages
    run_chat(full_chat, _script("y" * 400), quiet=True)
    err = capsys.readouterr().err
    assert re.search(r"this message alone has \d+ tokens, the context holds 256", err)
    assert full_chat.messages == before
    run_chat(full_chat, _script("/clear", "y" * 400), quiet=True)
    assert "the limit is 255: shorten it, or choose a larger --ctx-size" in capsys.readouterr().err


def test_an_answer_that_ends_with_the_context_says_so(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ChatSession(llm, replace(PARAMS, max_tokens=None))
    run_chat(chat, _script("def"), quiet=False)
    assert "context 256 of 256" in capsys.readouterr().err.replace("\n", " ")
    run_chat(chat, _script("/regen"), quiet=True)
    assert "the context is full: /drop forgets the oldest messages" in capsys.readouterr().err


def test_white_space_is_no_message(chat: ChatSession) -> None:
    run_chat(chat, _script("", "   ", '"""', "\t", '"""'), quiet=True)
    assert chat.messages == []


def test_raw_text_takes_no_system_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatSession(llm, PARAMS, "be brief", raw=True)
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatSession(llm, PARAMS, template_kwargs={"enable_thinking": False}, raw=True)
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatSession(llm, PARAMS, raw=True).set_system_prompt("be brief")


def test_regen_that_fails_keeps_the_conversation(chat: ChatSession, llm: LLM) -> None:
    run_chat(chat, _script("def"), quiet=True)
    before = list(chat.messages)
    stream = llm.stream("the")
    next(stream)  # the model is taken, so the next request fails
    run_chat(chat, _script("/regen"), quiet=True)
    stream.close()
    assert chat.messages == before
