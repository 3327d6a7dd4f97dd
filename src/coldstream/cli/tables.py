"""Tables and lists of facts as lines of text that lose nothing.

A table that is wider than the terminal is made narrower in three steps. Its first column is wrapped; then
columns that are equal in all rows go above the table; then each row becomes a list. Where there is no
terminal nothing is wrapped. Knows widths in cells, not where lines go.
"""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TextIO

import click
from rich.cells import cell_len, chop_cells

_GAP = "  "
_UNKNOWN_WIDTH = 80  # of a terminal that does not report its width
_LEAST_VALUE_WIDTH = 30  # cells for the values of a list of facts; with fewer, values go below their names
_INDENT = "    "
_LEAST_WIDTH = 10  # cells of anything that is wrapped

Row = Sequence[str]


def width_of(stream: TextIO | None) -> int | None:
    """Columns of `stream`'s terminal; None if it is no terminal, or was closed when the program began."""
    if stream is None or not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH


def print_table(columns: Row, rows: Sequence[Row], *, left: Collection[str], markdown: bool = False) -> None:
    """`table_lines` on standard output, and an empty line before them."""
    click.echo("\n".join(["", *table_lines(columns, rows, left, width_of(sys.stdout), markdown)]))


def print_pairs(facts: Mapping[str, str], title: str | None = None) -> None:
    """`pair_lines` on standard output, below an empty line and `title` if there is one."""
    heading = ["", title] if title else []
    click.echo("\n".join([*heading, *pair_lines(facts, width_of(sys.stdout))]))


def table_lines(
    columns: Row, rows: Sequence[Row], left: Collection[str], width: int | None, markdown: bool = False
) -> list[str]:
    """The table in lines of at most `width` cells. Columns in `left` are flush left, others right."""
    grid = _grid_lines(columns, rows, left, width, markdown)
    if grid is not None:
        return grid
    assert width is not None, "without a width everything fits"
    same = [index for index in range(len(columns)) if len({row[index] for row in rows}) == 1]
    if not same:
        return _one_below_the_other(columns, rows, width)
    lines = pair_lines({columns[index]: rows[0][index] for index in same}, width)
    others = [index for index in range(len(columns)) if index not in same]
    if others:
        names, rest = _only(others, columns), [_only(others, row) for row in rows]
        lines += ["", *table_lines(names, rest, left, width, markdown)]
    return lines


def pair_lines(facts: Mapping[str, str], width: int | None) -> list[str]:
    """A line for each name and its value; values that need more are wrapped, beside or below their names."""
    name_width = max(map(cell_len, facts))
    room = None if width is None else width - name_width - len(_GAP)
    lines = []
    if room is None or room >= min(_LEAST_VALUE_WIDTH, max(map(cell_len, facts.values()))):
        for name, value in facts.items():
            first, *more = wrap(value, room)
            lines.append(f"{_pad(name, name_width)}{_GAP}{first}".rstrip())
            lines += [" " * name_width + _GAP + line for line in more]
        return lines
    assert width is not None
    for name, value in facts.items():
        lines += wrap(name, width) + [_INDENT + line for line in wrap(value, width - len(_INDENT)) if line]
    return lines


def wrap(text: str, width: int | None, separator: str = " ") -> list[str]:
    """`text` in lines of at most `width` cells, broken at `separator`; a longer word is split."""
    if width is None or cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(separator):
        joined = f"{lines[-1]}{separator}{word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines += chop_cells(word, max(width, _LEAST_WIDTH))
    return [line.strip() for line in lines if line.strip()] or [""]


def _grid_lines(
    columns: Row, rows: Sequence[Row], left: Collection[str], width: int | None, markdown: bool
) -> list[str] | None:
    """A line for each row, or more where the first column has to be wrapped; None if that is too wide."""
    widths = [max(cell_len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    separators = 3 * len(widths) + 1 if markdown else len(_GAP) * (len(widths) - 1)
    excess = sum(widths) + separators - width if width is not None else 0
    if excess > 0:
        words = [word for row in (columns, *rows) for word in row[0].split()]
        least = max(_LEAST_WIDTH, *map(cell_len, words))
        if markdown or columns[0] not in left or widths[0] - excess < least:
            return None
        widths[0] -= excess
    if markdown:
        rules = ["-" * (size + 2) for size in widths]
        cells = [_padded(columns, row, left, widths) for row in (columns, *rows)]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return [lines[0], "|" + "|".join(rules) + "|", *lines[1:]]
    lines = []
    for row in (columns, *rows):
        first, *more = wrap(row[0], widths[0])
        lines.append(_GAP.join(_padded(columns, (first, *row[1:]), left, widths)).rstrip())
        lines += [_GAP + line for line in more]
        if row is columns:
            lines.append(_GAP.join("─" * size for size in widths))
    return lines


def _one_below_the_other(columns: Row, rows: Sequence[Row], width: int) -> list[str]:
    lines: list[str] = []
    for row in rows:
        lines += ["", *pair_lines(dict(zip(columns, row, strict=True)), width)]
    return lines[1:]


def _padded(columns: Row, row: Row, left: Collection[str], widths: Sequence[int]) -> list[str]:
    return [
        _pad(cell, width, not_left=name not in left)
        for name, cell, width in zip(columns, row, widths, strict=True)
    ]


def _pad(text: str, width: int, not_left: bool = False) -> str:
    spaces = " " * (width - cell_len(text))
    return spaces + text if not_left else text + spaces


def _only(indices: Sequence[int], row: Row) -> Row:
    return tuple(row[index] for index in indices)
