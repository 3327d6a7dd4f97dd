"""`coldstream help`: pages of the documentation, which come with the package and need no network.

A page is a file of Markdown. A terminal shows it laid out, by a pager. Anything else gets the file's
own text.
"""

import difflib
import sys
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

from coldstream.cli.options import common_options
from coldstream.cli.tables import print_table, width_of
from coldstream.errors import ColdstreamError

_OF_THE_SITE: Final = frozenset({"index", "api", "result_files"})  # which only its builder can lay out
_WIDEST: Final = 110  # cells of a line that is laid out


def pages() -> dict[str, Path]:
    """The file of each topic, in alphabetical order.

    They lie in an installed package, or in the checkout that an editable installation is of. Raises
    ColdstreamError if neither has any.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "docs", package.parents[1] / "docs"):
        found = {path.stem: path for path in sorted(folder.glob("*.md")) if path.stem not in _OF_THE_SITE}
        if found:
            return found
    raise ColdstreamError(f"{package / 'docs'} has no pages: install coldstream again")


def website() -> str | None:
    """Its address, by the metadata of the installed package; None if that names none."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("coldstream").get_all("Project-URL") or ()
    except PackageNotFoundError:
        return None
    return dict(url.split(", ", 1) for url in urls).get("Documentation")


def title(page: Path) -> str:
    """Its first heading."""
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in pages() if name.startswith(incomplete)]


@click.command("help", short_help="Print a page of the documentation.")
@click.argument("topic", required=False, shell_complete=_complete)
@common_options
@click.pass_context
def command(ctx: click.Context, topic: str | None) -> None:
    """Print the page about TOPIC, or a command's options. Without TOPIC, list the pages.

    \b
    coldstream help                    the list
    coldstream help server             the page about the HTTP interface
    coldstream help run                the options of run
    coldstream help cli > cli.md       a page as Markdown
    """
    found = pages()
    if topic is None:
        rows = [(name, title(page)) for name, page in found.items()]
        print_table(("topic", "page"), rows, left=("topic", "page"))
        if site := website():
            click.echo(f"\nthe same pages as a website: {site}")
    elif topic in found:
        _print_page(found[topic].read_text(encoding="utf-8"))
    else:
        click.echo(_options_of(ctx, topic, list(found)))


def _options_of(ctx: click.Context, verb: str, topics: list[str]) -> str:
    """The help text of a command. Raises UsageError for what is neither a command nor a topic."""
    assert ctx.parent is not None
    assert isinstance(ctx.parent.command, click.Group)
    group = ctx.parent.command
    command = group.get_command(ctx.parent, verb)
    if command is None:
        close = difflib.get_close_matches(verb, [*topics, *group.list_commands(ctx.parent)], n=1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(topics)}"
        raise click.UsageError(f"no page {verb}: {advice}", ctx)
    with command.make_context(verb, [], parent=ctx.parent, resilient_parsing=True) as context:
        return command.get_help(context)


def _print_page(text: str) -> None:
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(width_of(sys.stdout) or _WIDEST, _WIDEST), force_terminal=True)
    with console.capture() as capture:
        console.print(Markdown(text))
    click.echo_via_pager(capture.get())
