"""`coldstream pull`: download a model of the hub into the cache that other tools share."""

import click

from coldstream.cli.options import common_options
from coldstream.cli.terminal import ProgressLine
from coldstream.gguf import hub


@click.command("pull", short_help="Download a model.")
@click.argument("name")
@common_options
def command(name: str) -> None:
    """Download NAME, org/repo[:QUANT], or what is missing of it, and print the path of its first file."""
    with ProgressLine() as line:
        path = hub.pull(name, progress=line.update)
    click.echo(path)
