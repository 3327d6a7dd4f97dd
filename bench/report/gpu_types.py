"""The block on products by type of weights on a GPU, beside Q4_K in the same run."""

from collections.abc import Mapping
from typing import Any

from bench.report.tables import load, table

CASES = {"dense": "dense", "experts": "experts"}
ROWS = {1: "one row", 2048: "2,048 rows"}


def gpu_types() -> str:
    """Microseconds, and the ratio to Q4_K's, for each type; in the order of bytes."""
    result = load("gpu/types")
    found = cells(result)
    header = ["type", "bytes over Q4_K's"]
    header += [f"{what}, {name}: µs (over Q4_K)" for name in ROWS.values() for what in CASES.values()]
    bytes_of = {kind: found[kind, 1, "dense"]["bytes_ratio"] for kind, _, _ in found}
    rows = [
        [
            kind,
            f"{bytes_of[kind]:.2f}",
            *(text(found.get((kind, rows, what))) for rows in ROWS for what in CASES),
        ]
        for kind in sorted(bytes_of, key=bytes_of.__getitem__)
    ]
    said = [f"{result['machine']['gpu']}, commit {result['commit']}: `{result['command']}`"]
    for again in result.get("replaced", []):
        measured = "One row" if again["rows"] == 1 else f"{again['rows']:,} rows"
        said.append(f"{measured} of {', '.join(again['types'])} again at commit {again['commit']}")
    return f"{table(header, rows)}\n{'. '.join(said)}.\n"


def cells(result: Mapping[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    """What was measured, by type, rows and case."""
    return {(row["type"], row["rows"], row["what"]): row for row in result["results"]}


def text(cell: Mapping[str, Any] | None) -> str:
    """A time and its ratio; a dash if it was not measured."""
    return "–" if cell is None else f"{cell['us']:,.1f} ({cell['ratio']:.2f})"
