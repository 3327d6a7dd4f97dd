"""Plants faults in a copy of the sources, one at a time, and says which the tests catch.

    python -m tools.planted_faults                       all of them
    python -m tools.planted_faults 'engine-*' NAME       some, by name or pattern
    python -m tools.planted_faults --missing             those without a result, or changed since it
    python -m tools.planted_faults --sample              a part, which the commit's hash chooses
    python -m tools.planted_faults --pieces src/coldstream/files.py write_file
    python -m tools.planted_faults --out docs/results/planted_faults.json

A fault is caught if all tests that its table names fail with it, and pass without. Compiled faults take the
packages cmake, ninja and nanobind and a C++ compiler. Each result is written as it is found, so a run may be
ended at any time and completed later. Exits with 1 if a fault is not caught or its tests fail without it.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from bench.results import ROOT, SOURCES, commit
from tools.planted_faults import Fault, Row, load_faults, load_rows
from tools.planted_faults.source_copy import SourceCopy
from tools.planted_faults.sources import Sources

RESULTS = ROOT / "docs" / "results" / "planted_faults.json"
MOST_NAMES = 8  # that a result repeats
SAMPLE_FAULTS, SAMPLE_COMPILED = 8, 6  # of a sample, which is to take less than a minute of a core
AT_ONCE = 16  # faults whose tests are tried without them in one run, which reads their files once


def chosen(faults: list[Fault], patterns: list[str]) -> list[Fault]:
    """Those that a pattern matches; all without patterns. Raises ValueError if a pattern matches none."""
    for pattern in patterns:
        if not any(fnmatch(fault.name, pattern) for fault in faults):
            raise ValueError(f"no fault is named {pattern}")
    return [
        fault for fault in faults if not patterns or any(fnmatch(fault.name, pattern) for pattern in patterns)
    ]


def missing(faults: list[Fault], rows: list[Row], sources: Sources) -> list[Fault]:
    """Those without a row of their digest: never run, or changed since."""
    known = {(row["name"], row.get("digest")) for row in rows}
    return [fault for fault in faults if (fault.name, sources.digest(fault)) not in known]


def samples(faults: list[Fault]) -> list[list[Fault]]:
    """All faults in parts that take about equally long, each with faults of many rooms.

    Compiled faults have parts of their own, as each needs a compiler.
    """
    parts: list[list[Fault]] = []
    for is_compiled, size in ((False, SAMPLE_FAULTS), (True, SAMPLE_COMPILED)):
        those = [fault for fault in faults if fault.is_compiled == is_compiled]
        count = -(-len(those) // size)
        parts += [those[number::count] for number in range(count)]
    return parts


def sample(faults: list[Fault], commit_name: str) -> list[Fault]:
    """The part of a commit, by its hash; of the day where there is no repository."""
    parts = samples(faults)
    name = commit_name.removesuffix("-changed")
    number = datetime.now(UTC).toordinal() if name == "unknown" else int(name, 16)
    return parts[number % len(parts)]


def plant(faults: list[Fault]) -> Iterator[Row]:
    """A row for each, Python first: what it was, the tests that passed with it, and whether it was caught.

    A fault whose tests fail without it has no "caught" but "failing", and one that cannot be planted or built
    has "error": there is no result then.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="planted-faults-"))
        copy = cleanup.enter_context(closing(SourceCopy(Path(folder))))
        passing: set[str] = set()
        for number, fault in enumerate(in_order := sorted(faults, key=lambda fault: fault.is_compiled)):
            if number % AT_ONCE == 0:
                passing |= passing_without(copy, in_order[number : number + AT_ONCE], passing)
            yield plant_one(copy, fault, passing)


def passing_without(copy: SourceCopy, faults: list[Fault], known: set[str]) -> set[str]:
    """Of the faults' tests but those `known`: all that pass in one run; none if one of them cannot run."""
    tests = {test for fault in faults for test in fault.tests} - known
    try:
        return tests - copy.failing(sorted(tests))
    except ValueError:
        return set()


def plant_one(copy: SourceCopy, fault: Fault, passing: set[str]) -> Row:
    """The row of one fault. passing: tests that pass without it; the others are tried."""
    try:
        if failing := copy.failing([test for test in fault.tests if test not in passing]):
            return {"name": fault.name, "failing": sorted(failing)}
        with copy.planted(fault):
            failing = copy.failing(fault.tests)
    except (ValueError, SyntaxError, RuntimeError) as error:
        return {"name": fault.name, "error": str(error)}
    passed = [test for test in fault.tests if test not in failing]
    return {
        "name": fault.name,
        "room": fault.room,
        "file": fault.file,
        "tests": list(fault.tests),
        "digest": copy.sources.digest(fault),
        "passed": passed,
        "caught": not passed,
    }


def merged(rows: list[Row], known: list[Row]) -> list[Row]:
    """`rows` among those `known` of other faults, in the tables' order; without faults that have gone."""
    by_name = {str(row["name"]): row for row in [*known, *rows]}
    return [by_name[fault.name] for fault in load_faults() if fault.name in by_name]


def write_rows(rows: list[Row], path: Path) -> None:
    """Merges `rows` into the file of results at `path`."""
    result = {"command": "python -m tools.planted_faults", "faults": merged(rows, load_rows(path))}
    path.write_text(json.dumps(result, indent=1) + "\n")


def print_pieces(file: str, function: str) -> None:
    """The kinds of pieces of a Python function with their numbers, and what stands there."""
    source = Sources(ROOT).python(file)
    numbers: Counter[str] = Counter()
    for piece in source.pieces(source.scope(function)):
        numbers[piece.kind] += 1
        text = " ".join(source.text[piece.start : piece.end].decode().split())
        print(f"{piece.kind:<32} {numbers[piece.kind]:>3}  {text[:100]}")


def describe(row: Row) -> str:
    if "failing" in row:
        return f"{row['name']}: NO result, fails without it: {row['failing']}"
    if "error" in row:
        return f"{row['name']}: NO result: {row['error']}"
    return f"{row['name']}: {'caught' if row['caught'] else 'NOT caught'}"


def _short(names: list[str]) -> list[str]:
    """Names for the results, each of which has them."""
    return names if len(names) <= MOST_NAMES else [f"{len(names)} names"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.planted_faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name or a pattern; default: all faults")
    parser.add_argument("--out", type=Path, help="merge the results into this JSON file")
    parser.add_argument("--sample", action="store_true", help="only the part that the commit's hash chooses")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="only faults without a result, or changed since, in the file of --out or the repository's",
    )
    parser.add_argument(
        "--pieces",
        nargs=2,
        metavar=("FILE", "FUNCTION"),
        help="only list what a fault of a function may change",
    )
    options = parser.parse_args()
    if options.pieces:
        print_pieces(*options.pieces)
        return 0
    commit_name = commit((*SOURCES, "tests", "tools"))  # before anybody changes something
    faults = chosen(load_faults(), options.names)
    if options.missing:
        faults = missing(faults, load_rows(options.out or RESULTS), Sources(ROOT))
    if options.sample:
        faults = sample(faults, commit_name)
    kinds = [f"--{kind}" for kind in ("missing", "sample") if getattr(options, kind)]
    run = {
        "commit": commit_name,
        "date": datetime.now(UTC).date().isoformat(),
        "run": shlex.join([*_short(options.names), *kinds]) or "all",
    }
    num_caught = 0
    for row in plant(faults):
        print(describe(row), flush=True)
        num_caught += bool(row.get("caught"))
        if options.out and "caught" in row:
            write_rows([row | run], options.out)
    print(f"{num_caught} of {len(faults)} caught")
    return int(num_caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
