"""The figures of bodies that cost a careless server far more than their length."""

from typing import Any

from bench.report.tables import Row, load, table


def bad_bodies() -> str:
    """What each kind cost, and what others noticed."""
    r = load("bad_bodies")
    rows: list[Row] = [_row(name, each) for name, each in r["kinds"].items()]
    together = r["at_once"]
    statuses = ", ".join(f"{status}: {count}" for status, count in together["statuses"].items())
    rows.append(_row(f"{together['count']} bodies of {together['bytes'] / 1e6:.0f} MB at once", together))
    calm = r["calm"]
    words = (
        f"\nWithout a bad body /health took {1000 * calm['health_worst_s']:.0f} ms at most, and the longest "
        f"gap of the stream was {1000 * calm['stream_gap_s']:.0f} ms. Statuses of those at once: {statuses}. "
        f"{r['cpus']} cores, {r['cpu']}, commit {r['commit']}: `{r['command']}`\n"
    )
    head = [
        "body",
        "MB",
        "answered, s",
        "/health, ms",
        "longest gap of a stream, ms",
        "more memory, MB",
        "limit, MB",
    ]
    return table(head, rows) + words


def _row(name: str, found: dict[str, Any]) -> Row:
    return [
        name,
        f"{found['bytes'] / 1e6:.1f}",
        f"{found['seconds']:.2f}",
        f"{1000 * found['health_worst_s']:.0f}",
        f"{1000 * found['stream_gap_s']:.0f}",
        f"{found['memory_bytes'] / 1e6:.0f}",
        f"{found['limit_bytes'] / 1e6:.0f}",
    ]
