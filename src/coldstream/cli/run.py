"""`coldstream run`: one answer to a prompt or to piped text, or a chat."""

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from coldstream.cli.answer import cancelled_by_interrupt, show_answer
from coldstream.cli.chat import ChatSession, chat_in_terminal
from coldstream.cli.interrupts import EXIT_INTERRUPTED
from coldstream.cli.kept_chat import KeptChat
from coldstream.cli.main import Session
from coldstream.cli.model_argument import complete_model, is_bundled, model_or_bundled, with_bundled_drafter
from coldstream.cli.options import (
    chat_template_options,
    common_options,
    engine_config,
    engine_options,
    sampling_options,
    sampling_params,
)
from coldstream.cli.start_times import StartTimes
from coldstream.cli.terminal import ProgressLine, note
from coldstream.cli.text_input import prompt_of
from coldstream.engine import LLM, SamplingParams, open_model
from coldstream.engine.opened_model import FirstPrompt, OpenedModel
from coldstream.experts.gpu_statistics import describe_shares
from coldstream.garbage import starting

MAX_QUOTED_CHARS = 60


class _OneModel(click.Command):
    """Names the option for a prompt if one is given as an argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise _not_an_argument(extra, ctx)
        return extra


def _not_an_argument(words: Sequence[str], ctx: click.Context) -> click.UsageError:
    text = " ".join(words)
    short = text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}…"
    return click.UsageError(f"a prompt is given with -p: did you mean -p {shlex.quote(short)}?", ctx)


@click.command("run", cls=_OneModel, short_help="Generate or chat in the terminal.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--prompt", "-p", metavar="TEXT", help="Answer TEXT and exit.")
@click.option(
    "--file",
    "-f",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Answer the text in FILE and exit; -: standard input.",
)
@click.option(
    "--system-prompt",
    "-sys",
    "system_prompt",
    metavar="TEXT",
    help="A system message before the conversation.",
)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--echo/--no-echo",
    default=None,
    help="Print the prompt before what continues it [default: on a terminal].",
)
@chat_template_options
@click.option(
    "--history/--no-history",
    default=True,
    help="Keep the lines typed in a chat, and its conversation for /resume [default: history].",
)
@click.option("--quiet", "-q", is_flag=True, help="Print no statistics.")
@sampling_options
@engine_options
@common_options
@click.pass_obj
def command(
    session: Session,
    /,
    model: str | None,
    prompt: str | None,
    file: Path | None,
    system_prompt: str | None,
    raw: bool,
    echo: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    history: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Answer a prompt, or chat if there is none and this is a terminal.

    The prompt is -p, or what is piped in, or both: the piped text (or that of -f), and -p on a line below.

    MODEL is a file or org/repo[:QUANT] on the hub; without it, the bundled demo model completes Python code.
    A model with a chat template answers; any other one, or --raw, continues the text.

    Sampling settings that are not given are the model file's, or temperature 0.8, top-k 40, top-p 0.95 and
    min-p 0.05.
    """
    if model is not None and len(model.split()) > 1 and not Path(model).exists():
        raise _not_an_argument([model], click.get_current_context())
    prompt = prompt_of(prompt, file)
    first = None if prompt is None else FirstPrompt(prompt, is_raw=raw)
    with _open(model_or_bundled(model), options, first, verbose=session.verbose) as llm:
        params = sampling_params(options, llm.opened.default_sampling)
        opened, warnings = llm.opened, llm.opened.warnings
        completes = is_bundled(opened.runner.file) and opened.config.chat_template is None
        raw = raw or not opened.has_chat_template or completes
        kept = _kept_chat(llm) if history and prompt is None else None
        chat = ChatSession(llm, params, system_prompt, chat_template_kwargs, raw=raw, kept=kept)
        if prompt is None:
            opened.runner.go_on_loading()  # while the first question is typed
            _note_context(llm)
            try:
                return chat_in_terminal(chat, quiet)
            finally:
                _note_late(opened, warnings)
        should_echo = raw and (sys.stdout.isatty() if echo is None else echo)
        with ProgressLine() as line:
            stream = chat.ask(prompt, partial(line.update, "reading the prompt"))
            before = prompt if should_echo else ""
            with cancelled_by_interrupt(stream) as interruption:
                answer = show_answer(stream, line, quiet, chat.ctx_size, before, chat.reader)
        _note_late(opened, warnings)
        if session.verbose:
            _note_shares(opened)
    missed = interruption.missed(answer)
    if answer.finish_reason == "cancelled" or (missed and opened.late_rates is not None):
        return EXIT_INTERRUPTED
    if missed:
        note("the answer had ended when Ctrl-C came")
    elif opened.late_rates is not None:
        with ProgressLine() as line:
            opened.late_rates.measure(line.update)
    return 0


def _kept_chat(llm: LLM) -> KeptChat | None:
    """Where a chat with this model is kept; None, with a note, if there is no such place."""
    kept = KeptChat(Path(click.get_app_dir("coldstream")), llm.opened.runner.file.fingerprint)
    if kept.prepare():
        return kept
    note("the history of this chat is not kept: no place to write it")
    return None


def _note_context(llm: LLM) -> None:
    """Say how long a conversation can be where that is less than the model's own context."""
    ctx_size, most = llm.opened.ctx_size, llm.opened.runner.spec.context_length
    if ctx_size < most:
        note(f"context: {ctx_size} of the model's {most} tokens; --ctx-size N changes it")


def _note_late(opened: OpenedModel, known: Collection[str]) -> None:
    """Say what came to light behind the first token, such as memory that could not be locked."""
    for warning in opened.warnings:
        if warning not in known:
            note(f"warning: {warning}")


def _note_shares(opened: OpenedModel) -> None:
    """Say how missing experts were divided in the end, if that followed what steps took."""
    experts = opened.runner.gpu_experts
    if experts is not None and experts.shares is not None and experts.shares.updates:
        note(describe_shares(experts.shares))


def _open(model: str, options: Mapping[str, Any], prompt: FirstPrompt | None, *, verbose: bool) -> LLM:
    config = with_bundled_drafter(engine_config(model, options))
    sampling_params(options, SamplingParams())  # a wrong setting shall not wait for the model to load
    with ProgressLine() as line, starting():
        times = StartTimes(line.update)
        show = times.update if verbose else line.update
        opened = open_model(config, show, is_early=True, prompt=prompt)
    if verbose:
        note("\n".join(f"{name}: {value}" for name, value in asdict(opened.config).items()))
        note(times.report())
    for warning in opened.warnings:
        note(f"warning: {warning}")
    return LLM.from_opened(opened)
