"""Draws docs/run.svg, the picture of a run on the first page, from a recorded session.

    python -m tools.run_picture             draws the recording
    python -m tools.run_picture --record    runs the commands anew first, with the bundled model

The picture has a background of its own, so that it can be read on light pages and on dark ones.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

RECORDING = Path(__file__).with_name("run_recording.json")
PICTURE = Path(__file__).parent.parent / "docs" / "run.svg"
PROMPT = ("-p", "def read_lines(path):", "-n", "64", "--temp", "0.5", "--seed", "1", "--echo")
COMMANDS = (
    ("coldstream", "run", *PROMPT),
    ("coldstream", "run", "--ram", "24M", "-c", "256", *PROMPT),
)

COLUMNS = 96
CELL, LINE, FONT_SIZE, MARGIN = 8.4, 20, 14, 24  # pixels
BACKGROUND = "#16181d"
COLORS = {"command": "#7ee787", "answer": "#e6edf3", "note": "#9da7b3"}


@dataclass(frozen=True)
class Call:
    """A command and what it printed."""

    command: tuple[str, ...]
    stdout: str
    stderr: str


def record(commands: Sequence[tuple[str, ...]]) -> list[Call]:
    """Run the commands one after the other. Raises CalledProcessError."""
    calls = []
    for command in commands:
        program = [sys.executable, "-m", *command]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        calls.append(Call(command, done.stdout, done.stderr))
    return calls


def load(path: Path = RECORDING) -> list[Call]:
    """The recorded calls."""
    return [
        Call(tuple(call["command"]), call["stdout"], call["stderr"]) for call in json.loads(path.read_text())
    ]


def lines_of(calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """(kind, text) of each line of the session; longer ones than COLUMNS are broken."""
    for number, call in enumerate(calls):
        if number:
            yield "answer", ""
        yield from _broken("command", f"$ {shlex.join(call.command)}")
        for kind, text in (("answer", call.stdout), ("note", call.stderr)):
            for line in text.rstrip("\n").split("\n"):
                yield from _broken(kind, line)


def _broken(kind: str, line: str) -> Iterator[tuple[str, str]]:
    """At the last blank that fits, else within a word."""
    while len(line) > COLUMNS:
        indent = len(line) - len(line.lstrip())
        end = line.rfind(" ", indent, COLUMNS + 1)
        end = end if end > indent else COLUMNS
        yield kind, line[:end]
        line = "  " + line[end:].lstrip()
    yield kind, line


def svg(calls: Sequence[Call]) -> str:
    """The picture."""
    lines = list(lines_of(calls))
    width, height = round(COLUMNS * CELL + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    rows = [_row(number, kind, text) for number, (kind, text) in enumerate(lines) if text.strip()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            "<title>Two runs of coldstream that print the same tokens</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
            f'<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT_SIZE}">',
            *rows,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _row(number: int, kind: str, line: str) -> str:
    """A line of the picture. Blanks that it begins with are a distance, as not every viewer keeps them."""
    text = line.strip()
    x = MARGIN + (len(line) - len(line.lstrip())) * CELL
    y = MARGIN + LINE * (number + 0.75)
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{COLORS[kind]}" textLength="{len(text) * CELL:g}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.record:
        calls = [asdict(call) for call in record(COMMANDS)]
        RECORDING.write_text(json.dumps(calls, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PICTURE.write_text(svg(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
