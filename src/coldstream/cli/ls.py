"""`coldstream ls`: the models in the hub's cache on this machine."""

import json

import click

from coldstream.cli.options import common_options
from coldstream.cli.tables import print_table
from coldstream.cli.terminal import format_bytes, note, visible
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
        rows = [
            (visible(model.name), format_bytes(model.num_bytes), f"{model.modified:%Y-%m-%d %H:%M}")
            for model in models
        ]
        print_table(("name", "size", "downloaded"), rows, left=("name", "downloaded"))
