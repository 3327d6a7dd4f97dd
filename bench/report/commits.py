"""The block on commits: this one beside an earlier one, line by line."""

import json
from collections.abc import Mapping
from typing import Any

from bench.report.tables import RESULTS, load, table


def versus_commits() -> str:
    """A table for each commit that lines were measured against, and where they ran."""
    files = sorted(RESULTS.glob("versus_*.json"))
    if not files:
        return "No run is recorded yet.\n"
    return "\n".join(_lines_of(json.loads(file.read_text())) for file in files)


def _lines_of(result: dict[str, Any]) -> str:
    rows = []
    for name, line in result["lines"].items():
        low, high = line["interval"]
        rates = [_median(line[f"{name}_tok_s"]) for name in ("old", "new")]
        ratio = f"{line['ratio']:.3f} ({low:.3f}–{high:.3f})"
        rows.append([name, *(f"{rate:,.0f}" for rate in rates), ratio, str(len(line["new_tok_s"]))])
    header = [
        "line",
        f"{result['against']}, tok/s",
        "this commit, tok/s",
        "ratio (interval of 95 %)",
        "pairs",
    ]
    runs = dict.fromkeys(
        f"- {_device_of(name, line['machine'])}, commit {line['commit']}, {line['date']}: `{line['command']}`"
        for name, line in result["lines"].items()
    )
    return table(header, rows) + "\n" + "\n".join(runs) + "\n"


def _device_of(line: str, machine: Mapping[str, Any]) -> str:
    """What a line ran on: its name begins with it."""
    return str(machine["gpu"] if line.startswith("gpu-") else machine["cpu_name"])


def commit_bits() -> str:
    """A table for each commit whose bits were compared, and where they ran."""
    files = sorted(RESULTS.glob("bits_*.json"))
    if not files:
        return "No run is recorded yet.\n"
    return "\n".join(_bits_of(json.loads(file.read_text())) for file in files)


def _bits_of(result: dict[str, Any]) -> str:
    rows = [
        [name, str(each["digests"]), ", ".join(each["different"]) or "none"]
        for name, each in result["settings"].items()
    ]
    runs = dict.fromkeys(
        f"- {each['machine']['gpu'] or each['machine']['cpu_name']}, commit {each['commit']}, "
        f"{each['date']}: `{each['command']}`"
        for each in result["settings"].values()
    )
    header = [f"beside {result['against']}", "digests", "different"]
    return table(header, rows) + "\n" + "\n".join(runs) + "\n"


def house() -> str:
    """What rooms had at another commit, and have."""
    result = load("house")
    names = ("files", "python_lines", "native_lines", "classes", "protocols", "functions")

    def pair(name: str, room: str) -> str:
        before, after = (result[when].get(room, {}).get(name, 0) for when in ("before", "after"))
        return f"{before:,} → {after:,}"

    rooms = sorted(result["before"].keys() | result["after"].keys())
    rows = [[room, *(pair(name, room) for name in names)] for room in rooms]
    totals = [
        [sum(room[name] for room in result[when].values()) for when in ("before", "after")] for name in names
    ]
    rows.append(["all", *(f"{before:,} → {after:,}" for before, after in totals)])
    header = ["room", "files", "Python lines", "native lines", "classes", "protocols", "public functions"]
    return table(header, rows) + f"\n{result['against']} → {result['commit']}: `{result['command']}`\n"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
