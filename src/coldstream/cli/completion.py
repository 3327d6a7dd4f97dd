"""`coldstream completion`: a script by which a shell completes verbs, options, their values and models."""

from typing import Final

import click
from click.shell_completion import get_completion_class

from coldstream.cli.options import common_options

# What click's script calls the program with; click reads it before any verb runs.
_VARIABLE: Final = "_COLDSTREAM_COMPLETE"
_SHELLS: Final = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print a script for a shell's completion.")
@click.argument("shell", type=click.Choice(_SHELLS))
@common_options
def command(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options, values and models.

    \b
    eval "$(coldstream completion bash)"       a line for ~/.bashrc
    eval "$(coldstream completion zsh)"        a line for ~/.zshrc
    coldstream completion fish | source        for ~/.config/fish/config.fish
    """
    from coldstream.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(cli, {}, "coldstream", _VARIABLE).source())
    return 0
