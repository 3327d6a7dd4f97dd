"""`coldstream run`: one answer to a prompt or to piped text, or a chat."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from coldstream.cli.answer import show_answer
from coldstream.cli.chat import Chat, chat_in_terminal
from coldstream.cli.main import EXIT_INTERRUPTED, Session
from coldstream.cli.model_argument import model_or_bundled
from coldstream.cli.options import (
    common_options,
    engine_config,
    engine_options,
    parse_json_object,
    sampling_options,
    sampling_params,
)
from coldstream.cli.terminal import ProgressLine, note
from coldstream.engine import LLM, SamplingParams, open_model
from coldstream.errors import InvalidRequestError

MAX_PIPED_BYTES = 16 * 2**20


@click.command("run", short_help="Generate or chat in the terminal.")
@click.argument("model", required=False)
@click.option("--prompt", "-p", help="Answer this and leave.")
@click.option(
    "--system-prompt", "-sys", "system_prompt", help="What the model is told before the conversation."
)
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@click.option("--echo/--no-echo", default=None, help="Repeat a completed text before its completion.")
@click.option(
    "--chat-template-kwargs",
    type=parse_json_object,
    metavar="JSON",
    help="Variables for the chat template, as JSON.",
)
@click.option("--quiet", "-q", is_flag=True, help="No statistics.")
@sampling_options
@engine_options
@common_options
@click.pass_obj
def command(
    session: Session,
    /,
    model: str | None,
    prompt: str | None,
    system_prompt: str | None,
    raw: bool,
    echo: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Answer PROMPT, or the text piped in, or chat if there is neither.

    MODEL is a file or org/repo[:QUANT] on the hub; without it, the bundled demo model completes Python code.
    A model with a chat template answers; any other one, or --raw, continues the text.

    Sampling settings that are not given are the model file's, or temperature 0.8, top-k 40, top-p 0.95 and
    min-p 0.05.
    """
    if prompt is None and not (sys.stdin and sys.stdin.isatty()):
        prompt = read_piped()
    if prompt == "":
        raise InvalidRequestError("the prompt is empty")
    with _open(model_or_bundled(model), options) as llm:
        if session.verbose:
            note("\n".join(f"{name}: {value}" for name, value in asdict(llm.opened.config).items()))
        params = sampling_params(options, llm.opened.default_sampling)
        raw = raw or model is None or not llm.opened.has_chat_template
        chat = Chat(llm, params, system_prompt, chat_template_kwargs, raw=raw)
        if prompt is None:
            return chat_in_terminal(chat, quiet)
        should_echo = raw and (sys.stdout.isatty() if echo is None else echo)
        with ProgressLine() as line:
            stream = chat.ask(prompt, partial(line.update, "reading the prompt"))
            answer = show_answer(stream, line, quiet, before=prompt if should_echo else "")
    return EXIT_INTERRUPTED if answer.finish_reason == "cancelled" else 0


def _open(model: str, options: Mapping[str, Any]) -> LLM:
    config = engine_config(model, options)
    sampling_params(options, SamplingParams())  # a wrong setting shall not wait for the model to load
    with ProgressLine() as line:
        opened = open_model(config, progress=line.update)
    for warning in opened.warnings:
        note(f"warning: {warning}")
    return LLM.from_opened(opened)


def read_piped() -> str:
    """Standard input without its last line end. Raises InvalidRequestError if it is empty, huge, no UTF-8."""
    data = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1) if sys.stdin else b""
    if len(data) > MAX_PIPED_BYTES:
        raise InvalidRequestError(
            f"standard input is longer than {MAX_PIPED_BYTES} bytes; shorten the prompt"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text: byte {error.start}") from error
    text = text.removesuffix("\n")
    if not text:
        raise InvalidRequestError("standard input is empty: pipe a prompt in, or give one with -p")
    return text
