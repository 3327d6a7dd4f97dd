"""What the issue form "Numbers from your rig" asks for, as a page of Markdown to paste there.

`bench --report` and `verify --report` write it. It has no key, no user's name and no path of a home
directory: the model is named by its file's metadata, and a file that an option names by its last part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from coldstream import __version__
from coldstream.cli.doctor import finding_lines, summary
from coldstream.cli.tables import pair_lines, table_lines
from coldstream.cli.terminal import format_bytes, visible
from coldstream.files import write_file
from coldstream.planning.diagnosis import find, gather_facts
from coldstream.planning.diagnosis.privacy import without_names


@dataclass(frozen=True)
class Figure:
    """A measured value beside the plan's forecast, as text; no text where there is no forecast."""

    what: str
    measured: str
    forecast: str


@dataclass(frozen=True)
class RigReport:
    """All that a report is made of, beside the machine's facts."""

    verb: str
    settings: tuple[str, ...]  # that were given, as `name value`
    model: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    document: str  # what `--json` prints


def given_settings(context: click.Context) -> tuple[str, ...]:
    """Options that were typed, without the model, where to write, and the folders of files."""
    given = []
    for name, value in context.params.items():
        is_typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_typed and name not in ("model", "report", "report_path", "as_json"):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            given.append(f"{name} {text.rpartition('/')[2]}")
    return tuple(given)


def describe_model(name: str, num_bytes: int) -> str:
    """A model in one line."""
    return f"{visible(name)}, {format_bytes(num_bytes)}"


def write_report(report: RigReport, path: Path) -> None:
    """Write the page, with what `coldstream doctor` finds. Raises StorageError, and leaves what was there."""
    write_file(path, render(report, *_doctor()).encode())


def render(report: RigReport, machine: Mapping[str, str], findings: Sequence[str]) -> str:
    """The page. machine, findings: the two parts of `coldstream doctor`."""
    shown = without_names(report)
    rows = [(figure.what, figure.measured, figure.forecast) for figure in shown.figures]
    sections = {
        "Machine": _block("text", [*pair_lines(dict(machine), None), "", *findings]),
        "Model": shown.model,
        "Settings": f"`{shown.verb}`: {', '.join(shown.settings) or 'defaults'}",
        "Figures": "\n".join(
            table_lines(("what", "measured", "forecast"), rows, ("what",), None, markdown=True)
        ),
        "Notes": "\n".join(f"- {note}" for note in shown.notes) or "none",
        "JSON": _block("json", [shown.document]),
    }
    parts = [f"### {title}\n\n{body}\n" for title, body in sections.items()]
    return f"coldstream {__version__}, `coldstream {shown.verb}`\n\n" + "\n".join(parts)


def _doctor() -> tuple[dict[str, str], list[str]]:
    facts = gather_facts(__version__)
    machine = {name: visible(value) for name, value in summary(facts).items()}
    return machine, finding_lines(find(facts), None)


def _block(kind: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{kind}", *lines, "```"])
