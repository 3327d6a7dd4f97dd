"""A desktop's share of a machine beside llama.cpp, and how far forecasts are from what was measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.report.tables import Row, has, load, table

CLOSE = 0.15  # a forecast should be within this share of what is measured
FIGURES = {"decode": "decode", "512": "prompt of 512", "2048": "prompt of 2,048"}
GIB = 2**30


def desktop_bus() -> str:
    """Some cores, a slower bus and less RAM, for both, by the experts on the GPU."""
    if not has("gpu/desktop"):
        return ""
    result = load("gpu/desktop")
    ours = [row for row in result["rows"] if row["side"] == "coldstream"]
    lines: list[Row] = []
    for row in sorted(ours, key=lambda each: (each["cores"], each["programs"], each["experts_gib"])):
        peer = _of_peer(result["rows"], row)
        memory = f"{row['vram_bytes'] / GIB:.1f}" + (f", {peer['vram_bytes'] / GIB:.1f}" if peer else "")
        share = f"{row['experts_share']:.0%}" + (f", {peer['experts_share']:.0%}" if peer else "")
        figures = [_beside(row["figures"][name], peer and peer["figures"][name]) for name in FIGURES]
        ratios = (row["forecast"][name] / row["figures"][name]["tok_s"] for name in FIGURES)
        forecast = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        bus = sum(row["bus_bytes_per_s"]) / len(row["bus_bytes_per_s"]) / 1e9
        lines.append([str(row["cores"]), f"{bus:.1f}", share, memory, *figures, forecast])
    header = ["cores", "bus, GB/s", "experts on the GPU: ours, llama.cpp", "GiB of its memory"]
    header += [f"{what}: ours, llama.cpp, ratio" for what in FIGURES.values()]
    left = ", ".join(
        f"{rate / 1e9:.1f} GB/s beside {number}" for number, rate in result["bus_left_bytes_per_s"].items()
    )
    commits = ", ".join(dict.fromkeys(row.get("commit", result["commit"]) for row in ours))
    note = f"{result['machine']['gpu']}, commit {commits}: `{result['command']}`"
    text = table([*header, "forecast over measured"], lines)
    return f"{text}\n{note}. Copies got {left} other programs before all lines.\n"


def _of_peer(rows: Iterable[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """llama.cpp's line of the same setting."""
    same = ("cores", "programs", "experts_gib")
    return next(
        (
            each
            for each in rows
            if each["side"] == "llama.cpp" and all(each[name] == row[name] for name in same)
        ),
        None,
    )


def _beside(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> str:
    """In tokens a second."""

    def text(tok_s: float) -> str:
        return f"{tok_s:,.0f}" if tok_s >= 20 else f"{tok_s:.1f}"

    speed = f"**{text(ours['tok_s'])}**"
    return (
        f"{speed}, {text(theirs['tok_s'])}, {ours['tok_s'] / theirs['tok_s']:.1f}×"
        if theirs
        else f"{speed}, –"
    )


def forecasts() -> str:
    """Of each stored run, how many present forecasts are close, and those of programs that did otherwise."""
    result = load("forecasts")
    rows: list[Row] = []
    present, older = _Count(), _Count()
    for each in result["forecasts"]:
        both = [both for row in each["rows"] for both in row["figures"].values()]
        of_present = _Count.of([one["ratio"] for one in both if not one["older_than"]])
        of_older = _Count.of([one["ratio"] for one in both if one["older_than"]])
        present, older = present + of_present, older + of_older
        measured = each["measured"]
        machine = measured["machine"]
        rows.append(
            [
                f"`{each['result']}`",
                measured["commit"].partition("-")[0][:8],
                f"{machine.get('gpu', machine['cpu'])}, {machine['cores']} cores",
                each["bus"],
                "measured" if each["has_steps"] else "estimated",
                *of_present.cells(),
                *of_older.cells(),
            ]
        )
    header = ["result", "measured at", "machine", "bus, GB/s", "kernels' shares", "within 15 %", "least–most"]
    header += ["older, within 15 %", "least–most"]
    note = (
        f"{present.close} of {len(present.ratios)} figures, and {older.close} of {len(older.ratios)} of "
        f"older programs. Commit {result['commit']}: `python -m bench.engine.forecast_again`"
    )
    return table(header, rows) + f"\n{note}\n"


@dataclass(frozen=True)
class _Count:
    """Forecasts over what was measured."""

    ratios: tuple[float, ...] = ()

    @classmethod
    def of(cls, ratios: list[float]) -> "_Count":
        return cls(tuple(ratios))

    def __add__(self, other: "_Count") -> "_Count":
        return _Count(self.ratios + other.ratios)

    @property
    def close(self) -> int:
        return sum(abs(ratio - 1) <= CLOSE for ratio in self.ratios)

    def cells(self) -> tuple[str, str]:
        if not self.ratios:
            return "–", "–"
        return f"{self.close} of {len(self.ratios)}", f"{min(self.ratios):.2f}–{max(self.ratios):.2f}"
