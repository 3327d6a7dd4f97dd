"""The figures of coding agents that talked to the server."""

from typing import Any

from bench.report.tables import Row, load, table


def agents() -> str:
    """Both conversations of an agent under a template in one row."""
    r = load("agents")
    pairs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for found in r["conversations"]:
        pairs.setdefault((found["client"], found["version"], found["template"]), []).append(found)
    counts = ("turns", "requests", "refused", "too_long")
    rows: list[Row] = [
        [*names, *(f"{sum(found[key] for found in both):,}" for key in counts)]
        for names, both in pairs.items()
    ]
    header = ["agent", "version", "template", "turns", "requests", "refused", "beyond the context"]
    commits = sorted({found["commit"] for found in r["conversations"]})
    networks = sorted({found["network"] for found in r["conversations"]})
    where = f"Network: {' and '.join(networks)}; commit {', '.join(commits)}"
    return table(header, rows) + f"\n{where}: `{r['command']}`\n"
