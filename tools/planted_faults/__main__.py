"""Plants faults in a copy of the sources, one at a time, and says which the tests catch.

    python -m tools.planted_faults                       all of them
    python -m tools.planted_faults 'engine-*' NAME       some, by name or pattern
    python -m tools.planted_faults --missing             those without a result, or changed since it
    python -m tools.planted_faults --out docs/results/planted_faults.json

A fault is caught if all tests that its table names fail with it, and pass without. Compiled faults take the
packages cmake, ninja and nanobind and a C++ compiler. Each result is written as it is found, so a run may be
ended at any time and completed later. Exits with 1 if a fault is not caught or its tests fail without it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from fnmatch import fnmatch
from pathlib import Path

from bench.results import ROOT, SOURCES, commit
from tools.planted_faults import Fault, Row, load_faults, load_rows
from tools.planted_faults.source_copy import SourceCopy

RESULTS = ROOT / "docs" / "results" / "planted_faults.json"


def chosen(faults: list[Fault], patterns: list[str]) -> list[Fault]:
    """Those that a pattern matches; all without patterns. Raises ValueError if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch(fault.name, pattern) for fault in faults):
            raise ValueError(f"no fault is named {pattern}")
    return [
        fault for fault in faults if not patterns or any(fnmatch(fault.name, pattern) for pattern in patterns)
    ]


def missing(faults: list[Fault], rows: list[Row]) -> list[Fault]:
    """Those without a row of their digest: never run, or changed since."""
    known = {(row["name"], row.get("digest")) for row in rows}
    return [fault for fault in faults if (fault.name, fault.digest) not in known]


def plant(faults: list[Fault], commit_name: str) -> Iterator[Row]:
    """A row for each, Python first: what it was, the tests that passed with it, and whether it was caught.

    A fault whose tests fail without it has no "caught" but "failing": there is no result then.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="planted-faults-"))
        copy = cleanup.enter_context(closing(SourceCopy(Path(folder))))
        passing: set[str] = set()
        is_built = False
        for fault in sorted(faults, key=lambda fault: fault.is_compiled):  # a build takes minutes
            if fault.is_compiled and not is_built:
                copy.build()
                is_built = True
                passing.clear()
            if failing := copy.failing([test for test in fault.tests if test not in passing]):
                yield {"name": fault.name, "failing": sorted(failing)}
                continue
            passing |= set(fault.tests)
            with copy.planted(fault):
                failing = copy.failing(fault.tests)
            passed = [test for test in fault.tests if test not in failing]
            yield {
                "name": fault.name,
                "room": fault.room,
                "file": fault.file,
                "tests": list(fault.tests),
                "digest": fault.digest,
                "passed": passed,
                "caught": not passed,
                "commit": commit_name,
            }


def merged(rows: list[Row], known: list[Row]) -> list[Row]:
    """`rows` among those `known` of other faults, in the tables' order; without faults that have gone."""
    by_name = {str(row["name"]): row for row in [*known, *rows]}
    return [by_name[fault.name] for fault in load_faults() if fault.name in by_name]


def write_rows(rows: list[Row], path: Path) -> None:
    """Merges `rows` into the file of results at `path`."""
    result = {"command": "python -m tools.planted_faults", "faults": merged(rows, load_rows(path))}
    path.write_text(json.dumps(result, indent=1) + "\n")


def describe(row: Row) -> str:
    if "failing" in row:
        return f"{row['name']}: NO result, fails without it: {row['failing']}"
    return f"{row['name']}: {'caught' if row['caught'] else 'NOT caught'}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.planted_faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name or a pattern; default: all faults")
    parser.add_argument("--out", type=Path, help="merge the results into this JSON file")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only faults without a result, or changed since, in the file of --out or the repository's",
    )
    options = parser.parse_args()
    commit_name = commit((*SOURCES, "tests", "tools"))  # before anybody changes something
    faults = chosen(load_faults(), options.names)
    if options.missing:
        faults = missing(faults, load_rows(options.out or RESULTS))
    num_caught = 0
    for row in plant(faults, commit_name):
        print(describe(row), flush=True)
        num_caught += bool(row.get("caught"))
        if options.out and "failing" not in row:
            write_rows([row], options.out)
    print(f"{num_caught} of {len(faults)} caught")
    return int(num_caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
