"""Faults planted by hand, one at a time, and the tests that must fail of each.

A fault is a small change of a function. The tables beside this file have them, one for each room of the
package. `python -m tools.planted_faults` plants them in a copy of the sources.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.planted_faults.changes import Change

ROOT = Path(__file__).parent.parent.parent
TABLES = Path(__file__).parent

Row = dict[str, object]


@dataclass(frozen=True)
class Fault:
    """One fault.

    file: a path from the root. function: the qualified name of the function or class that changes; empty: the
    whole file. tests: pytest's ids of those that must fail.
    """

    name: str
    file: str
    function: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The room of the package in which it lies, or `tools`; a module beside the rooms is its own."""
        first, *others = Path(self.file).parts
        return others[1].removesuffix(".py") if first == "src" else first

    @property
    def is_compiled(self) -> bool:
        """Whether the extension has to be built again for it."""
        return self.file.endswith((".cpp", ".h", ".inl"))


def load_faults() -> list[Fault]:
    """All faults of all tables, by table and in their order. Raises ValueError for a name that is twice."""
    faults = [
        fault_of(entry)
        for table in sorted(TABLES.glob("*.toml"))
        for entry in tomllib.loads(table.read_text())["fault"]
    ]
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"faults named twice: {', '.join(sorted(twice))}")
    return faults


def fault_of(entry: dict[str, Any]) -> Fault:
    """An entry of a table. Raises TypeError or KeyError for a key that is unknown or lacking."""
    fields = dict(entry)
    name, file, tests = fields.pop("name"), fields.pop("file"), tuple(fields.pop("tests"))
    function = fields.pop("function", "")
    changes = fields.pop("changes", None) or [fields]
    return Fault(name, file, function, tuple(Change(**change) for change in changes), tests)


def load_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is no such file."""
    rows: list[Row] = json.loads(path.read_text())["faults"] if path.exists() else []
    return rows
