"""`coldstream pull`: a model of the hub into the cache that other tools share: download, check, repair."""

import sys

import click

from coldstream.cli.options import common_options
from coldstream.cli.terminal import ProgressLine, format_bytes, note
from coldstream.gguf import hub


@click.command("pull", short_help="Download a model.")
@click.argument("name")
@common_options
def command(name: str) -> None:
    """Download what is missing of NAME, org/repo[:QUANT], check what is there, and print its first file.

    An interrupted download goes on where it was. A file whose size or SHA-256 is not the hub's is downloaded
    again.
    """
    with ProgressLine() as line:
        update = line.update if sys.stderr and sys.stderr.isatty() else ProgressLog().update
        path = hub.pull(name, progress=update, notice=note)
    click.echo(path)


class ProgressLog:
    """Progress in a file or a pipe: a line for every tenth."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}

    def update(self, what: str, done: int, total: int) -> None:
        """Note it if another tenth of `total` bytes of `what` is reached."""
        tenths = 10 * done // max(1, total)
        if self._shown.get(what) != tenths:
            self._shown[what] = tenths
            note(f"{what}: {10 * tenths} % of {format_bytes(total)}")
