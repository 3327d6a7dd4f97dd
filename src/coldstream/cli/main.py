"""The `coldstream` command: finds the verb, and turns every error into one line and a documented exit code.

Each verb is a module of this room with a click command named `command`, imported only when asked for, so that
`coldstream --help` costs no more than Python and click.

Exit codes: 0 done · 2 wrong usage or setting · 130 interrupted · 141 the reader of the output went away · the
others stand in `coldstream.errors`.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from coldstream import __version__
from coldstream.errors import ColdstreamError, escape_controls

VERBS = {
    "run": "Generate or chat in the terminal.",
    "bench": "Measure prefill and decode speed.",
    "plan": "Show what goes where, and the speed to expect.",
    "profile": "Record which experts a text uses.",
    "show": "Describe a model file.",
    "pull": "Download a model.",
    "ls": "List downloaded models.",
}
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass
class Session:
    """What the whole invocation shares."""

    verbose: bool = False


class OutputClosedError(Exception):
    """Nobody reads standard output any more."""


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"coldstream.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would leave with its own exit code
            raise OutputClosedError from error


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coldstream")
def cli() -> None:
    """Run Mixture-of-Experts language models larger than the GPU, fast and exactly, from GGUF files.

    \b
    coldstream run                            chat with the bundled demo model
    coldstream run org/repo:Q4_K_M            download a model and chat
    coldstream run model.gguf -p "Hello"      one answer
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: `sys.argv`); returns the exit code and never raises."""
    session = Session()
    if sys.stdout is None:
        return _fail("standard output is closed", 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal knows every character
    try:
        code = cli.main(arguments, prog_name="coldstream", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except (OutputClosedError, BrokenPipeError):
        _discard_output()
        return EXIT_BROKEN_PIPE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "coldstream"
        return _fail(f"{error.format_message().rstrip('.')} (see {verb} --help)", error.exit_code)
    except Exception as error:
        if session.verbose:
            import traceback

            traceback.print_exc()
        return _fail(*_describe(error))
    return code if isinstance(code, int) else 0


def _describe(error: Exception) -> tuple[str, int]:
    """(message, exit code) of an exception that ends the program."""
    if isinstance(error, ColdstreamError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory: try a smaller --ctx-size", 71
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""), 1
    return f"unexpected {type(error).__name__}: {error} (--verbose shows where; please report it)", 1


def _fail(message: str, code: int) -> int:
    if sys.stderr is not None:
        click.echo(f"error: {escape_controls(message)}", err=True)
    return code


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter doesn't complain on leaving."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
