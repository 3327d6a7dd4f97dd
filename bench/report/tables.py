"""Shared by the generators of all pages' figures: results in, Markdown out."""

import json
from typing import Any

from bench.results import ROOT

RESULTS = ROOT / "docs" / "results"

Row = list[str]


def has(name: str) -> bool:
    """Whether there is such a result file."""
    return (RESULTS / f"{name}.json").exists()


def load(name: str) -> dict[str, Any]:
    """One result file."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def table(header: Row, rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
