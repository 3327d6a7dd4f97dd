"""The chat of `coldstream run`: a conversation, its commands, and the terminal around them."""

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from coldstream.cli.answer import SEPARATOR, cancelled_by_interrupt, show_answer
from coldstream.cli.interrupts import EXIT_TERMINATED, TerminatedError
from coldstream.cli.kept_chat import KeptChat
from coldstream.cli.main import current_interrupts
from coldstream.cli.tables import pair_lines, width_of, wrap
from coldstream.cli.terminal import ProgressLine, note
from coldstream.engine import LLM, SamplingParams, Stream
from coldstream.errors import ColdstreamError, ContextFullError, InvalidRequestError
from coldstream.models.runner import Progress

if TYPE_CHECKING:  # which takes long, and only a chat needs
    from prompt_toolkit.application import Application

    from coldstream.cli.readable_answer import ReadableAnswer

ReadLine = Callable[[str], str]  # prompt → line; EOFError at the end, KeyboardInterrupt on Ctrl-C

_QUOTES = '"""'
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("top_k", "repeat_last_n", "seed", "max_tokens")
_NEED_TEMPLATE = (
    "can only be given to a model that answers by a chat template, without --raw; this one continues text"
)
# Share of the context that a conversation fills at most after its oldest messages were dropped.
_ROOM_SHARE = 0.75
_LEAVE = "/exit or Ctrl-D leaves"  # to Ctrl-C where it has nothing to stop
_MAKE_ROOM = "/drop forgets the oldest messages, /clear all of them"
_COMMANDS = {
    "/help": "this list",
    "/exit": "leave (also Ctrl-D)",
    "/clear": "forget the conversation",
    "/drop N": "forget the N oldest messages and their answers; without N: one",
    "/system TEXT": "set the system prompt and start afresh; without TEXT: none",
    "/set NAME VALUE": "change a sampling setting; none: no value; without VALUE, or NAME: show them",
    "/resume": "go on with the last conversation with this model, of an earlier chat",
    "/regen": "answer the last message again; with a fixed seed the answer is the same",
    "/stats": "statistics of the last answer, and how full the context is",
    _QUOTES: "begins and ends a message of several lines, or one that begins with /",
    "Ctrl-C": "stop the answer; what was said so far stays",
}


class ChatSession:
    """A conversation with a model: its messages, settings and last statistics. Knows no terminal.

    With `raw` there is no conversation: each message is a text to be continued, and only the last is kept, to
    be continued again.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        raw: bool = False,
        kept: KeptChat | None = None,
    ) -> None:
        """kept: where `keep` also writes the conversation; None: nowhere."""
        if raw and (system_prompt or template_kwargs):
            raise InvalidRequestError(f"a system prompt and template settings {_NEED_TEMPLATE}")
        self._llm = llm
        self._template_kwargs = template_kwargs
        self._system_prompt = system_prompt
        self.kept = kept
        self.raw = raw
        self.params = params
        self.messages: list[dict[str, str]] = []
        self.last_statistics = ""
        self.reader: ReadableAnswer | None = None  # of the last answer that was asked for

    @property
    def ctx_size(self) -> int:
        """Tokens of context, for the whole conversation or, with `raw`, for a text and what continues it."""
        ctx_size = self._llm.opened.config.ctx_size
        assert ctx_size, "an opened model has a concrete context"
        return ctx_size

    @property
    def num_turns(self) -> int:
        """Messages with their answers that the conversation holds."""
        return 0 if self.raw else len(self.messages) // 2

    def ask(self, text: str, progress: Progress | None = None) -> Stream:
        """The stream of the answer to `text`. Becomes part of the conversation only by `keep`.

        Raises ContextFullError if the conversation with `text` is longer than the context.
        """
        if self.raw:
            return self._llm.stream(text, self.params, progress=progress)
        messages = self._with_turns(self.messages, text)
        self.reader = self._reader()
        is_marking = self.reader is not None
        params = dataclasses.replace(self.params, marks_control_tokens=True) if is_marking else self.params
        return self._llm.stream_chat(
            messages, params, chat_template_kwargs=self._template_kwargs, progress=progress
        )

    def _reader(self) -> "ReadableAnswer | None":
        source = self._llm.opened.chat_template.source or ""
        if "<|channel" not in source:  # other models' answers are text for people as they are
            return None
        from coldstream.cli.readable_answer import readable_answer

        return readable_answer(self._llm)

    def keep(self, text: str, answer: str) -> None:
        """Make a message and its answer, complete or not, part of the conversation, if there is one."""
        turn = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.messages = turn if self.raw else self.messages + turn
        if self.kept is not None and not self.raw:
            self.kept.write(self._system_prompt, self.messages)

    def resume(self) -> None:
        """Replace the conversation and the system prompt by those that were kept last.

        Raises InvalidRequestError if none are kept.
        """
        if self.raw:
            raise InvalidRequestError(f"a conversation {_NEED_TEMPLATE}")
        if self.kept is None:
            raise InvalidRequestError("no conversations are kept in this chat: leave --no-history out")
        conversation = self.kept.read()
        self._system_prompt, self.messages = conversation.system_prompt, list(conversation.messages)

    def drop(self, num_turns: int) -> None:
        """Forget so many of the oldest messages, with their answers. Raises InvalidRequestError beyond those
        that there are.
        """
        if not self.num_turns:
            raise InvalidRequestError("there is no conversation to forget messages of")
        if not 1 <= num_turns <= self.num_turns:
            raise InvalidRequestError(f"/drop {num_turns}: give a number from 1 to {self.num_turns}")
        self.messages = self.messages[2 * num_turns :]

    def num_turns_to_drop(self, text: str) -> int:
        """How many of the oldest messages make room for `text` and some answers when they are forgotten.

        All of them if not even that makes much room. Raises ContextFullError if `text` alone has no room.
        """
        num_tokens = self._num_tokens([], text)
        if num_tokens >= self.ctx_size:
            raise ContextFullError(
                f"this message alone has {num_tokens} tokens, the context holds {self.ctx_size}: shorten it, "
                "or start again with a larger --ctx-size"
            )

        def leaves_room(count: int) -> bool:
            return self._num_tokens(self.messages[2 * count :], text) <= _ROOM_SHARE * self.ctx_size

        return bisect_left(range(self.num_turns), True, lo=min(1, self.num_turns), key=leaves_room)

    def take_back(self) -> str:
        """Remove the last exchange and return its message. Raises InvalidRequestError if there is none."""
        if not self.messages:
            raise InvalidRequestError("there is nothing to answer again")
        self.messages, (message, _) = self.messages[:-2], self.messages[-2:]
        return message["content"]

    def clear(self) -> None:
        """Forget all messages; the system prompt and the settings stay."""
        self.messages = []

    def set_system_prompt(self, text: str) -> None:
        """Replace the system prompt (none if empty) and forget all messages."""
        if self.raw:
            raise InvalidRequestError(f"a system prompt {_NEED_TEMPLATE}")
        self._system_prompt = text or None
        self.clear()

    def set_param(self, name: str, value: str) -> None:
        """Change a sampling setting given as text. Raises InvalidRequestError naming what is wrong."""
        _check_setting(name)
        parse: Callable[[str], Any] = float if name in _NUMBERS else int
        try:
            parsed: Any = None if value == "none" else parse(value)
        except ValueError:
            raise InvalidRequestError(f"{name}: {value!r} is not a number") from None
        self.params = dataclasses.replace(self.params, **{name: parsed})

    def describe_params(self) -> str:
        """All settings, one a line."""
        return "\n".join(map(self.describe_param, _NUMBERS + _COUNTS))

    def describe_param(self, name: str) -> str:
        """A setting and its value, as `set_param` takes them. Raises InvalidRequestError if there is none."""
        _check_setting(name)
        value = getattr(self.params, name)
        return f"{name} {'none' if value is None else value}"

    def _with_turns(self, turns: Sequence[Mapping[str, str]], text: str) -> list[Mapping[str, str]]:
        return [*self._opening(), *turns, {"role": "user", "content": text}]

    def _num_tokens(self, turns: Sequence[Mapping[str, str]], text: str) -> int:
        """Tokens of a conversation of these turns followed by `text`."""
        opened = self._llm.opened
        settings = self._template_kwargs or {}
        rendered = opened.chat_template.render(self._with_turns(turns, text), **settings)
        return len(opened.tokenizer.encode_segments(rendered.segments))

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []


def _check_setting(name: str) -> None:
    if name not in _NUMBERS + _COUNTS:
        raise InvalidRequestError(f"no setting {name!r}: there are {', '.join(_NUMBERS + _COUNTS)}")


def chat_in_terminal(chat: ChatSession, quiet: bool) -> int:
    """Chats until the user leaves; returns the exit code."""
    note("/help lists the commands, Ctrl-D leaves")
    if chat.raw:
        note("this model continues text: type how it begins; every message starts afresh")
    return run_chat(chat, _terminal_reader(chat.kept), quiet)


def run_chat(chat: ChatSession, read_line: ReadLine, quiet: bool) -> int:
    """Read messages and commands by `read_line` and answer them, until its end or /exit; gives the exit code.

    Errors of a request are shown and the chat goes on.
    """
    while True:
        try:
            line = read_line(">>> ")
            if line.startswith("/"):
                if not _obey(chat, line, read_line, quiet):
                    return 0
            elif (text := complete_message(line, read_line).strip("\n")).strip():
                _answer(chat, text, read_line, quiet)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if interrupts := current_interrupts():
                interrupts.forget()
            note(_LEAVE)
        except ColdstreamError as error:
            click.echo(f"error: {error}", err=True)


def complete_message(line: str, read_line: ReadLine) -> str:
    '''The message that begins with `line`: that line, or all lines between """ and """.'''
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].endswith(_QUOTES):
        lines.append(read_line("... "))
    return "\n".join(lines).removesuffix(_QUOTES)


def _answer(chat: ChatSession, text: str, read_line: ReadLine, quiet: bool) -> None:
    with ProgressLine() as line:
        progress = partial(line.update, "reading the prompt")
        try:
            stream = chat.ask(text, progress)
        except ContextFullError as error:
            _make_room(chat, text, error, read_line)
            stream = chat.ask(text, progress)
        with cancelled_by_interrupt(stream) as interruption:
            answer = show_answer(stream, line, quiet, chat.ctx_size, reader=chat.reader)
            chat.last_statistics = answer.describe()
            if answer.text or answer.finish_reason != "cancelled":
                chat.keep(text, answer.content)
    if interruption.missed(answer):
        note(_LEAVE)
    if answer.fills_context and chat.num_turns:
        note(f"the context is full: {_MAKE_ROOM}")


def _make_room(chat: ChatSession, text: str, error: ContextFullError, read_line: ReadLine) -> None:
    """Forget the oldest messages, if the user wants to, so that there is room for `text`.

    Raises ContextFullError, which says what else can be done, if that is not wanted or does not help.
    """
    if not chat.num_turns:
        raise error
    count = chat.num_turns_to_drop(text)
    oldest = "oldest message and its answer" if count == 1 else f"{count} oldest messages and their answers"
    note(f"the context of {chat.ctx_size} tokens is full")
    reply = read_line(f"forget the {oldest}, of {chat.num_turns}? [Y/n] ").strip().lower()
    if reply not in ("", "y", "yes"):
        raise ContextFullError(f"the message has no room and was not sent: {_MAKE_ROOM}")
    chat.drop(count)


def _answer_again(chat: ChatSession, read_line: ReadLine, quiet: bool) -> None:
    before = chat.messages
    try:
        _answer(chat, chat.take_back(), read_line, quiet)
    except BaseException:
        chat.messages = before
        raise


def _drop(chat: ChatSession, argument: str) -> None:
    if not (argument.isascii() and argument.isdecimal()):
        raise InvalidRequestError(f"/drop {argument}: not a number of messages")
    chat.drop(int(argument))
    click.echo(f"{chat.num_turns} message{'' if chat.num_turns == 1 else 's'} left")


def _obey(chat: ChatSession, text: str, read_line: ReadLine, quiet: bool) -> bool:
    """Carry out a command; False if it was the one to leave."""
    name, _, argument = text.strip().partition(" ")
    argument = argument.strip()
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/help" | "/?":
            click.echo("\n".join(pair_lines(_COMMANDS, width_of(sys.stdout))))
        case "/clear":
            chat.clear()
        case "/drop":
            _drop(chat, argument or "1")
        case "/system":
            chat.set_system_prompt(argument)
        case "/stats":
            statistics = chat.last_statistics or "no answer yet"
            click.echo("\n".join(wrap(statistics, width_of(sys.stdout), SEPARATOR)))
        case "/resume":
            chat.resume()
            click.echo(f"{chat.num_turns} message{'' if chat.num_turns == 1 else 's'} and their answers")
        case "/regen":
            _answer_again(chat, read_line, quiet)
        case "/set" if not argument:
            click.echo(chat.describe_params())
        case "/set":
            setting, _, value = argument.partition(" ")
            if value.strip():
                chat.set_param(setting, value.strip())
            else:
                click.echo(chat.describe_param(setting))
        case _:
            raise InvalidRequestError(f"no command {name}: /help lists them")
    return True


def _terminal_reader(kept: KeptChat | None) -> ReadLine:
    """A line editor, with the lines of earlier chats if they are kept."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    history = InMemoryHistory() if kept is None else FileHistory(str(kept.typed_lines))
    session: PromptSession[str] = PromptSession(history=history)

    interrupts = current_interrupts()
    if interrupts is None:
        return session.prompt
    watched = interrupts
    leave = partial(_leave, session.app)

    def read_line(prompt: str) -> str:
        try:
            return session.prompt(prompt, pre_run=lambda: watched.defer(leave))
        finally:
            watched.watch_again()

    return read_line


def _leave(application: "Application[str]") -> None:
    """End a line editor at SIGTERM, from outside of its event loop."""

    def leave() -> None:
        if not application.is_done:
            application.exit(exception=TerminatedError(EXIT_TERMINATED))

    if application.loop is not None:
        application.loop.call_soon_threadsafe(leave)
