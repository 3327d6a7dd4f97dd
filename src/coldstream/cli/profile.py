"""`coldstream profile`: records which experts a model's routers choose for a text, and draws a picture of it.

The picture shows layers × experts in SVG. It is written by hand: cells of one shade are one path, which keeps
the file small.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

import click
import numpy as np

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

Array = np.ndarray[Any, Any]

_CELL: Final = 8  # pixels
_MAX_WIDTH: Final = 1600
_MIN_WIDTH: Final = 560  # of the legend
_LEFT, _TOP, _BELOW, _RIGHT = 48, 44, 64, 16
_NUM_SHADES: Final = 24
_FIRST_COLOUR, _LAST_COLOUR = (245, 246, 248), (180, 20, 40)
_RESIDENT_COLOUR: Final = "#1b3a6b"
_LABEL_EVERY: Final = 8


def heat_map_svg(uses: Array, resident: Sequence[Sequence[int]] | None, title: str) -> str:
    """The picture. uses: expected uses a step, float [layers, experts], not all 0; resident: ids by layer.

    A shade is a range of uses, from 0 to the most that an expert has. Resident experts have a dot.
    """
    num_layers, num_experts = uses.shape
    cell = max(2, min(_CELL, _MAX_WIDTH // num_experts))
    width = max(_MIN_WIDTH, _LEFT + cell * num_experts + _RIGHT)
    height = _TOP + cell * num_layers + _BELOW
    shades = np.ceil(uses / uses.max() * (_NUM_SHADES - 1)).astype(int)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="11" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<g transform="translate({_LEFT} {_TOP}) scale({cell:g})" shape-rendering="crispEdges">',
        *_cells(shades),
        "</g>",
        f'<g transform="translate({_LEFT} {_TOP})">',
        *_labels(num_layers, num_experts, cell),
        "</g>",
        *_legend(float(uses.max()), _TOP + cell * num_layers + 40, resident is not None),
    ]
    if resident is not None:
        dots = "".join(
            f"M{expert + 0.5:g} {layer + 0.5:g}h0" for layer, ids in enumerate(resident) for expert in ids
        )
        parts.append(
            f'<path class="resident" transform="translate({_LEFT} {_TOP}) scale({cell:g})" d="{dots}" '
            f'stroke="{_RESIDENT_COLOUR}" stroke-width="0.4" stroke-linecap="round" fill="none"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _cells(shades: Array) -> list[str]:
    """One path for each shade: a bar for every run of cells."""
    paths = []
    for shade in range(_NUM_SHADES):
        bars = "".join(
            f"M{start} {layer}h{length}v1h-{length}z"
            for layer, row in enumerate(shades == shade)
            for start, length in _runs(row)
        )
        if bars:
            paths.append(f'<path fill="{_colour(shade)}" d="{bars}"/>')
    return paths


def _runs(row: Array) -> list[tuple[int, int]]:
    """(start, length) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return [(int(start), int(end - start)) for start, end in edges.reshape(-1, 2)]


def _colour(shade: int) -> str:
    share = shade / (_NUM_SHADES - 1)
    mixed = [
        round(first + share * (last - first)) for first, last in zip(_FIRST_COLOUR, _LAST_COLOUR, strict=True)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _labels(num_layers: int, num_experts: int, cell: float) -> list[str]:
    rows = [
        f'<text x="-6" y="{(layer + 0.5) * cell + 4:g}" text-anchor="end">{layer}</text>'
        for layer in range(0, num_layers, _LABEL_EVERY // 2)
    ]
    step = max(_LABEL_EVERY, num_experts // 8)
    columns = [
        f'<text x="{(expert + 0.5) * cell:g}" y="{num_layers * cell + 14:g}" text-anchor="middle">'
        f"{expert}</text>"
        for expert in range(0, num_experts, step)
    ]
    names = ['<text x="-40" y="-8">layer</text>', '<text x="0" y="-8">expert</text>']
    return names + rows + columns


def _legend(most: float, top: float, has_residents: bool) -> list[str]:
    size = 8
    squares = [
        f'<rect x="{_LEFT + 12 + size * shade}" y="{top - size:g}" width="{size}" height="{size}" '
        f'fill="{_colour(shade)}"/>'
        for shade in range(_NUM_SHADES)
    ]
    end = _LEFT + 20 + size * _NUM_SHADES
    words = [
        f'<text x="{_LEFT}" y="{top:g}">0</text>',
        f'<text x="{end}" y="{top:g}">{most:.3g} uses a token</text>',
    ]
    if has_residents:
        words.append(f'<circle cx="{end + 110}" cy="{top - 4:g}" r="2.5" fill="{_RESIDENT_COLOUR}"/>')
        words.append(f'<text x="{end + 118}" y="{top:g}">resident</text>')
    return squares + words


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
    """Run a text through MODEL and write a trace: the experts of each layer with experts, token by token.

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
