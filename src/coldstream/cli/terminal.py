"""Terminal output beside an answer: progress, notes, and the format of numbers."""

import sys
import unicodedata
from typing import TYPE_CHECKING

import click

from coldstream.cli.tables import width_of, wrap
from coldstream.closing import Closing
from coldstream.errors import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressLine(Closing):
    """A line on standard error that shows how far something is and then vanishes; only on a terminal."""

    def __init__(self) -> None:
        is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._progress: Progress | None = _progress() if is_shown else None
        self._task: TaskID | None = None

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` of `what` is reached; nothing if it is over before it was shown."""
        if self._progress is None or (self._task is None and done >= total):
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, description=what, completed=done, total=total)

    def close(self) -> None:
        """Remove the line; a later update shows it again."""
        if self._progress is not None and self._task is not None:
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None


def _progress() -> "Progress":
    """What draws the line. Raises BrokenPipeError where the terminal is gone."""
    # Imported here because most starts of a program that is not on a terminal would wait for nothing.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    class TerminalConsole(Console):
        def on_broken_pipe(self) -> None:
            """Called where a BrokenPipeError is caught: it goes on, as `Console` would end the program."""
            raise

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), console=TerminalConsole(stderr=True), transient=True)


def visible(text: str) -> str:
    """`text` with control characters escaped, so that no text controls the terminal; line ends and tabs
    stay.
    """
    return "".join(
        escape_controls(c) if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


def note(text: str) -> None:
    """Lines for people, on standard error; on a terminal dim, and broken between words."""
    width = width_of(sys.stderr)
    lines = [part for line in text.split("\n") for part in wrap(line, width)]
    click.secho("\n".join(lines), err=True, dim=True)


def format_bytes(num_bytes: int) -> str:
    """A size in llama-bench's format: 17.32 MiB, 1.95 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def described_age(days: int) -> str:
    """How long ago that was."""
    return "today" if days == 0 else "a day ago" if days == 1 else f"{days} days ago"


def format_count(count: int) -> str:
    """A number of parameters in llama-bench's format: 10.48 M, 34.66 B."""
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.2f} M"
