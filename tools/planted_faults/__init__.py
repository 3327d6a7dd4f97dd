"""Faults planted by hand, one at a time, and the tests that must fail of each.

A fault is a text of a source file and what stands there instead; the tables beside this file have them, one
for each room of the package. `python -m tools.planted_faults` plants them in a copy of the sources.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TABLES = Path(__file__).parent

Row = dict[str, object]


@dataclass(frozen=True)
class Fault:
    """One fault. `text` occurs once in `file`, a path from the root; each of `tests` is a pytest id."""

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The room of the package in which it lies; a module beside the rooms is its own."""
        return Path(self.file).parts[2].removesuffix(".py")

    @property
    def digest(self) -> str:
        """Changes with what is planted, where, and which tests must fail: a result holds for one digest."""
        words = "\0".join([self.file, self.text, self.planted, *self.tests])
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    @property
    def is_compiled(self) -> bool:
        """Whether the extension has to be built again for it."""
        return self.file.endswith((".cpp", ".h", ".inl"))


def load_faults() -> list[Fault]:
    """All faults of all tables, by room and in their order. Raises ValueError for a name that is twice."""
    faults = []
    for table in sorted(TABLES.glob("*.toml")):
        for entry in tomllib.loads(table.read_text())["fault"]:
            faults.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"faults named twice: {', '.join(sorted(twice))}")
    return faults


def load_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is no such file."""
    rows: list[Row] = json.loads(path.read_text())["faults"] if path.exists() else []
    return rows
