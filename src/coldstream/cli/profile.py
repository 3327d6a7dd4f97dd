"""`coldstream profile`: record which experts a model's routers choose for a text."""

from pathlib import Path
from typing import Any

import click

from coldstream.cli.heat_map import heat_map_svg
from coldstream.cli.model_argument import complete_model, model_or_bundled
from coldstream.cli.options import (
    check_writable,
    common_options,
    engine_config,
    parse_number_or_auto,
    parse_size,
)
from coldstream.cli.terminal import ProgressLine, format_bytes
from coldstream.cli.text_input import read_text
from coldstream.files import write_file


@click.command("profile", short_help="Record which experts a text uses.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="The text to read, in UTF-8.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the trace goes [default: the model's name with .routing, here].",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw how often each expert of each layer is used, as SVG.",
)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A plan; --plot marks what is resident by it.",
)
@click.option("--ctx-size", "-c", type=parse_size, metavar="SIZE", help="Split the text into parts of SIZE.")
@click.option(
    "--threads",
    "-t",
    type=parse_number_or_auto,
    metavar="N|auto",
    help="CPU threads [default: auto, one a core].",
)
@click.option("--offline", is_flag=True, default=None, help="Never ask the hub; use what is on this machine.")
@common_options
def command(
    model: str | None, text: Path, out: Path | None, plot: Path | None, plan: Path | None, **options: Any
) -> None:
    """Run a text through MODEL and write a trace: the experts of each layer, token by token.

    Without MODEL: the bundled demo model. The CPU computes; a GPU chooses the same experts.
    """
    # Imported here because computing is not needed to show how the verb is used.
    from coldstream.engine.routing_profile import profile_text
    from coldstream.planning.gather import load_plan_by_name

    if plan is not None and plot is None:
        raise click.UsageError("--plan is for --plot: give a file for the picture too")
    config = engine_config(model_or_bundled(model), {**options, "device": "cpu"})
    out = out or Path(f"{Path(config.model).name.removesuffix('.gguf')}.routing")
    for name, path in (("--out", out), ("--plot", plot)):
        check_writable(path, name)  # better said now than after the work
    words = read_text(text, "--text")
    with ProgressLine() as line:
        resident = load_plan_by_name(config, plan, line.update).placement.resident if plan else None
        trace = profile_text(config, words, line.update)
    trace.save(out)
    if plot is not None:
        title = f"{Path(config.model).name}: experts used by {text.name}, {trace.num_steps} tokens"
        write_file(plot, heat_map_svg(trace.counts() / trace.num_steps, resident, title).encode())
    used = (trace.counts() > 0).mean()
    click.echo(
        f"{out}: {trace.num_steps} tokens, {trace.model.num_layers} layers, {used:.0%} of the experts used, "
        f"{format_bytes(out.stat().st_size)}"
    )
