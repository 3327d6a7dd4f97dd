"""The `coldstream` command: finds the verb, and turns every error into one line and a documented exit code.

Each verb is a module of this room with a click command named `command`, imported only when asked for, so that
`coldstream --help` costs no more than Python and click.

Exit codes: 0 done · 2 wrong usage or setting · 130 interrupted · 141 the reader of the output went away · 143
terminated · the others stand in `coldstream.errors`.
"""

import difflib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

import coldstream
from coldstream.cli.interrupts import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Interrupts,
    TerminatedError,
)
from coldstream.errors import ColdstreamError, escape_controls, out_of_resources
from coldstream.garbage import starting

VERBS = {
    "run": "Generate or chat in the terminal.",
    "serve": "Serve a model over HTTP.",
    "bench": "Measure prefill and decode speed.",
    "plan": "Show what goes where, and the speed to expect.",
    "profile": "Record which experts a text uses.",
    "show": "Describe a model file.",
    "pull": "Download a model.",
    "ls": "List downloaded models.",
    "convert-drafter": "Convert a DFlash drafter to GGUF.",
    "doctor": "Check this machine and the installation.",
    "verify": "Check that all ways to run a model give the same tokens.",
    "completion": "Print a script for a shell's completion.",
    "help": "Print a page of the documentation.",
}
_OTHER_NAMES = {
    "chat": "run",
    "generate": "run",
    "server": "serve",
    "list": "ls",
    "download": "pull",
    "info": "show",
    "inspect": "show",
    "benchmark": "bench",
    "convert": "convert-drafter",
    "docs": "help",
    "man": "help",
    "check": "doctor",
    "diagnose": "doctor",
    "version": "--version",
    "perplexity": "verify",
    "selftest": "verify",
    "test": "verify",
}
_FIRST_STEPS = """\
coldstream {version} runs Mixture-of-Experts language models from GGUF files,
also larger than the GPU.

  coldstream run                      try the bundled demo model, which completes Python code
  coldstream run model.gguf           chat with a model
  coldstream run org/repo:Q4_K_M      download a model and chat
  coldstream serve model.gguf         answers over OpenAI's and Anthropic's interfaces
  coldstream plan model.gguf          what goes into which memory, and the speed to expect
  coldstream doctor                   what this machine lacks, and what would make it faster
  coldstream verify model.gguf        the same tokens in every way to run it, and how fast
  coldstream help                     pages of the documentation
  coldstream --help                   all commands"""
EXIT_BROKEN_PIPE = 141
_COMPUTING = ("run", "bench", "verify")  # in this process
_NO_GPU = {"cpu", "--device=cpu", "--help", "-h"}  # arguments with which no GPU is needed


@dataclass
class Session:
    """State of the whole invocation."""

    verbose: bool = False
    interrupts: Interrupts | None = None


def current_interrupts() -> Interrupts | None:
    """How signals are handled in the running command; None outside of one."""
    context = click.get_current_context(silent=True)
    session = context.find_object(Session) if context else None
    return session.interrupts if session else None


class OutputClosedError(Exception):
    """The reader of standard output has closed it."""


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        with starting():
            command = importlib.import_module(f"coldstream.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in _COMPUTING and not ctx.resilient_parsing and _NO_GPU.isdisjoint(args):
            with starting():
                _begin_on_a_gpu()
        if name in VERBS or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, VERBS, n=1)
        if "/" in name or name.endswith(".gguf"):
            advice = f"did you mean coldstream run {name}?"
        elif verb := _OTHER_NAMES.get(name, close[0] if close else None):
            advice = f"did you mean {verb}?"
        else:
            advice = f"there are {', '.join(VERBS)}"
        raise click.UsageError(f"no command {name}: {advice}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _broken_pipes():  # which --help and --version may meet
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipes():
            return super().invoke(ctx)


def _begin_on_a_gpu() -> None:
    """Begins what a GPU needs, if there is one, beside the imports of a verb that computes."""
    from coldstream.kernels.cuda import ahead

    ahead.begin()


@contextmanager
def _broken_pipes() -> Iterator[None]:
    """Raises BrokenPipeError as OutputClosedError, since click would exit with its own code."""
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosedError from error


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Only where it is asked for, as the version is read from the installed package."""
    if value and not ctx.resilient_parsing:
        click.echo(f"coldstream, version {coldstream.__version__}")
        ctx.exit()


@click.group(
    cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run Mixture-of-Experts language models larger than the GPU, fast and exactly, from GGUF files.

    \b
    coldstream run                            chat with the bundled demo model
    coldstream run org/repo:Q4_K_M            download a model and chat
    coldstream run model.gguf -p "Hello"      one answer
    coldstream help                           pages of the documentation
    """
    if ctx.invoked_subcommand is None:
        click.echo(_FIRST_STEPS.format(version=coldstream.__version__))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`), in the main thread; returns the exit code, never raises."""
    try:
        with Interrupts() as interrupts:
            return _run(arguments, Session(interrupts=interrupts))
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except TerminatedError:
        return EXIT_TERMINATED
    except RuntimeError as error:  # no thread left for watching signals
        return _fail(*_describe(error))


def _run(arguments: Sequence[str] | None, session: Session) -> int:
    if sys.stdout is None:
        return _fail("standard output is closed", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal can show every character
    try:
        code = cli.main(arguments, prog_name="coldstream", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except (OutputClosedError, BrokenPipeError):
        _discard_output()
        return EXIT_BROKEN_PIPE
    except click.Abort:
        raise
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "coldstream"
        problem = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption):
            problem = _no_such_option(error)
        return _fail(f"{problem} (see {verb} --help)", error.exit_code)
    except Exception as error:
        failed = _fail(*_describe(error), verbose=session.verbose)
        _discard_output()
        return failed
    return code if isinstance(code, int) else 0


def _no_such_option(error: click.NoSuchOption) -> str:
    """What is said of an option that a verb lacks: verbs that have it, or similar ones that help shows."""
    name = error.option_name
    problem = f"No such option {name}"
    if error.ctx is None or not name.startswith("--"):
        return problem
    if verbs := [verb for verb in VERBS if name in _shown_options(cli.get_command(error.ctx, verb))]:
        return f"{problem}: it is one of {', '.join(verbs)}"
    close = difflib.get_close_matches(name, _shown_options(error.ctx.command))
    return f"{problem}: did you mean {' or '.join(close)}?" if close else problem


def _shown_options(command: click.Command | None) -> list[str]:
    """The long options of a command that its help shows."""
    options = [option for option in command.params if isinstance(option, click.Option)] if command else []
    names = [name for option in options if not option.hidden for name in option.opts + option.secondary_opts]
    return [name for name in names if name.startswith("--")]


def _describe(error: Exception) -> tuple[str, int]:
    """(message, exit code) of an exception that ends the program."""
    error = out_of_resources(error) or error
    if isinstance(error, ColdstreamError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("coldstream"):
        return f"the package {error.name} is missing: pip install coldstream", 1
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1
    return f"unexpected {type(error).__name__}: {error} (--verbose shows where; please report it)", 1


def _fail(message: str, code: int, verbose: bool = False) -> int:
    """Print the message, if possible; in an `except` clause `verbose` adds the traceback."""
    try:
        if verbose:
            import traceback

            traceback.print_exc()
        if sys.stderr is not None:
            click.echo(f"error: {escape_controls(message)}", err=True)
    except BrokenPipeError:
        _discard_output()
    return code


def _discard_output() -> None:
    """Discard output that a closed pipe or a full disk does not take.

    Otherwise the interpreter reports an error at exit, with its own exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
