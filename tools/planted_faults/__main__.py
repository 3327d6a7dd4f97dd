"""Plants faults in a copy of the sources, one at a time, and says which the tests catch.

    python -m tools.planted_faults                       all of them
    python -m tools.planted_faults 'engine-*' NAME       some, by name or pattern
    python -m tools.planted_faults --out docs/results/planted_faults.json

A fault is caught if all tests that its table names fail with it, and pass without. Compiled faults take the
packages cmake, ninja and nanobind and a C++ compiler. Exits with 1 if one is not caught.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from fnmatch import fnmatch
from pathlib import Path

from bench.results import SOURCES, commit, write_result
from tools.planted_faults import Fault, load_faults
from tools.planted_faults.source_copy import SourceCopy

Row = dict[str, object]


def chosen(faults: list[Fault], patterns: list[str]) -> list[Fault]:
    """Those that a pattern matches; all without patterns. Raises ValueError if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch(fault.name, pattern) for fault in faults):
            raise ValueError(f"no fault is named {pattern}")
    return [
        fault for fault in faults if not patterns or any(fnmatch(fault.name, pattern) for pattern in patterns)
    ]


def plant(faults: list[Fault]) -> Iterator[Row]:
    """A row for each: its name, file and tests, those of them that passed with it, and whether it was caught.

    Raises ValueError if a test fails without any fault.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="planted-faults-"))
        copy = cleanup.enter_context(closing(SourceCopy(Path(folder))))
        if any(fault.is_compiled for fault in faults):
            copy.build()
        if failing := copy.failing(dict.fromkeys(test for fault in faults for test in fault.tests)):
            raise ValueError(f"fail without a fault: {', '.join(sorted(failing))}")
        for fault in faults:
            with copy.planted(fault):
                failing = copy.failing(fault.tests)
            passed = [test for test in fault.tests if test not in failing]
            yield {
                "name": fault.name,
                "room": fault.room,
                "file": fault.file,
                "tests": list(fault.tests),
                "passed": passed,
                "caught": not passed,
            }


def updated(rows: list[Row], path: Path) -> list[Row]:
    """`rows` among those that the result at `path` has of other faults that are still in the tables."""
    known = json.loads(path.read_text())["faults"] if path.exists() else []
    by_name = {str(row["name"]): row for row in [*known, *rows]}
    return [by_name[fault.name] for fault in load_faults() if fault.name in by_name]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.planted_faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name or a pattern; default: all faults")
    parser.add_argument(
        "--out", type=Path, help="bring the rows of these faults in this JSON file up to date"
    )
    options = parser.parse_args()
    commit_name = commit((*SOURCES, "tests", "tools"))  # before anybody changes something
    rows: list[Row] = []
    with suppress(KeyboardInterrupt):  # what is done is kept
        for row in plant(chosen(load_faults(), options.names)):
            rows.append({**row, "commit": commit_name})
            print(f"{row['name']}: {'caught' if row['caught'] else 'NOT caught'}", flush=True)
    caught = sum(bool(row["caught"]) for row in rows)
    print(f"{caught} of {len(rows)} caught")
    if options.out:
        result = {"command": "python -m tools.planted_faults", "faults": updated(rows, options.out)}
        write_result(result, options.out, commit_name)
    return int(caught < len(rows))


if __name__ == "__main__":
    sys.exit(main())
