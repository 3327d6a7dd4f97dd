"""`coldstream ls`: the models in the hub's cache on this machine."""

import json

import click
from rich import box
from rich.table import Table
from rich.text import Text

from coldstream.cli.options import common_options
from coldstream.cli.terminal import format_bytes, note, table_console, visible
from coldstream.gguf import hub


@click.command("ls", short_help="List downloaded models.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@common_options
def command(as_json: bool) -> None:
    """List the models that are downloaded and complete, by the names that the other commands take."""
    models = hub.list_cached()
    if as_json:
        entries = [
            {
                "name": model.name,
                "quant": model.quant,
                "size_bytes": model.num_bytes,
                "modified": model.modified.isoformat(),
                "paths": [str(path) for path in model.paths],
            }
            for model in models
        ]
        click.echo(json.dumps(entries))
    elif not models:
        note("no model downloaded yet: `coldstream pull org/repo:QUANT`")
    else:
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("name", "size", "downloaded"):
            table.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
        for model in models:
            size = format_bytes(model.num_bytes)
            table.add_row(Text(visible(model.name)), size, f"{model.modified:%Y-%m-%d %H:%M}")
        table_console().print(table)
