"""The chat of `coldstream run`: a conversation, its commands, and the terminal around them."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from coldstream.cli.answer import show_answer
from coldstream.cli.terminal import ProgressLine, note
from coldstream.decoding import Progress
from coldstream.engine import LLM, SamplingParams, Stream
from coldstream.errors import ColdstreamError, InvalidRequestError

ReadLine = Callable[[str], str]  # prompt → line; EOFError at the end, KeyboardInterrupt on Ctrl-C

_QUOTES = '"""'
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_COUNTS = ("top_k", "repeat_last_n", "seed", "max_tokens")
_NEED_TEMPLATE = "can only be given to a model with a chat template, and without --raw"
_HELP = f"""\
/help               this list
/exit               leave (also Ctrl-D)
/clear              forget the conversation
/system TEXT        set the system prompt and start afresh; without TEXT: none
/set NAME VALUE     change a sampling setting; none for no value; without arguments: list them
/regen              answer the last message again
/stats              statistics of the last answer
{_QUOTES}                 begins and ends a message of several lines
Ctrl-C              stop the answer; what was said so far stays"""


class Chat:
    """A conversation with a model: its messages, settings and last statistics. Knows no terminal.

    With `raw` there is no conversation: each message is a text to be continued.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        raw: bool = False,
    ) -> None:
        if raw and (system_prompt or template_kwargs):
            raise InvalidRequestError(f"a system prompt and template settings {_NEED_TEMPLATE}")
        self._llm = llm
        self._template_kwargs = template_kwargs
        self._system_prompt = system_prompt
        self.raw = raw
        self.params = params
        self.messages: list[dict[str, str]] = []
        self.last_statistics = ""

    def ask(self, text: str, progress: Progress | None = None) -> Stream:
        """The stream of the answer to `text`. Becomes part of the conversation only by `keep`."""
        if self.raw:
            return self._llm.stream(text, self.params, progress=progress)
        messages = [*self._opening(), *self.messages, {"role": "user", "content": text}]
        return self._llm.stream_chat(messages, self.params, self._template_kwargs, progress=progress)

    def keep(self, text: str, answer: str) -> None:
        """Make a message and its answer, complete or not, part of the conversation, if there is one."""
        if not self.raw:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

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
        parse: Callable[[str], Any]
        if name in _NUMBERS:
            parse = float
        elif name in _COUNTS:
            parse = int
        else:
            raise InvalidRequestError(f"no setting {name!r}: there are {', '.join(_NUMBERS + _COUNTS)}")
        try:
            parsed: Any = None if value == "none" else parse(value)
        except ValueError:
            raise InvalidRequestError(f"{name}: {value!r} is not a number") from None
        self.params = dataclasses.replace(self.params, **{name: parsed})

    def describe_params(self) -> str:
        """All settings, one a line."""
        return "\n".join(f"{name} {getattr(self.params, name)}" for name in _NUMBERS + _COUNTS)

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []


def chat_in_terminal(chat: Chat, quiet: bool) -> int:
    """Chat until the user leaves; returns the exit code."""
    note("/help lists the commands, Ctrl-D leaves")
    if chat.raw:
        note("this model continues text; every message starts afresh")
    return run_chat(chat, _terminal_reader(), quiet)


def run_chat(chat: Chat, read_line: ReadLine, quiet: bool) -> int:
    """Read messages and commands by `read_line` and answer them, until its end or /exit; gives the exit code.

    Errors of a request are shown and the chat goes on.
    """
    while True:
        try:
            line = read_line(">>> ")
            if line.startswith("/"):
                if not _obey(chat, line, quiet):
                    return 0
            elif text := complete_message(line, read_line).strip("\n"):
                _answer(chat, text, quiet)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            note("/exit or Ctrl-D leaves")
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


def _answer(chat: Chat, text: str, quiet: bool) -> None:
    with ProgressLine() as line:
        answer = show_answer(chat.ask(text, partial(line.update, "reading the prompt")), line, quiet)
    chat.last_statistics = answer.describe()
    if answer.text or answer.finish_reason != "cancelled":
        chat.keep(text, answer.text)


def _answer_again(chat: Chat, quiet: bool) -> None:
    before = chat.messages
    try:
        _answer(chat, chat.take_back(), quiet)
    except BaseException:
        chat.messages = before
        raise


def _obey(chat: Chat, text: str, quiet: bool) -> bool:
    """Carry out a command; False if it was the one to leave."""
    name, _, argument = text.strip().partition(" ")
    argument = argument.strip()
    match name:
        case "/exit" | "/quit" | "/bye":
            return False
        case "/help" | "/?":
            click.echo(_HELP)
        case "/clear":
            chat.clear()
        case "/system":
            chat.set_system_prompt(argument)
        case "/stats":
            click.echo(chat.last_statistics or "no answer yet")
        case "/regen":
            _answer_again(chat, quiet)
        case "/set" if not argument:
            click.echo(chat.describe_params())
        case "/set":
            setting, _, value = argument.partition(" ")
            chat.set_param(setting, value.strip())
        case _:
            raise InvalidRequestError(f"no command {name}: /help lists them")
    return True


def _terminal_reader() -> ReadLine:
    """A line editor with a history that outlives the session where the home directory allows it."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    directory = Path(click.get_app_dir("coldstream"))
    history: History = InMemoryHistory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "history").touch(mode=0o600)
        if os.access(directory / "history", os.R_OK | os.W_OK):
            history = FileHistory(str(directory / "history"))
    except OSError:
        note("the history of this chat is not kept: no place to write it")
    session: PromptSession[str] = PromptSession(history=history)
    return session.prompt
