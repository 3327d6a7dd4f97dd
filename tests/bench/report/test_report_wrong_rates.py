"""The tables and the picture of wrong rates, from results as the benchmark writes them."""

from typing import Any
from xml.etree import ElementTree

import pytest

from bench.report import wrong_rates as report

RANKS = 8
SVG = "{http://www.w3.org/2000/svg}"


def window(at: float, tok_s: float, on_bus: float) -> dict[str, Any]:
    return {"at": at, "tok_s": tok_s, "by_bus": [round(on_bus * n) for n in range(1, RANKS + 1)]}


def case(name: str, rates: list[float], *, moves: bool, on_bus: tuple[float, float]) -> dict[str, Any]:
    shares = (on_bus[0], *(on_bus[1],) * (len(rates) - 1))
    windows = [window(at, *each) for at, each in enumerate(zip(rates, shares, strict=True), start=1)]
    return {"case": name, "moves": moves, "share": None, "tok_s": rates[-1], "windows": windows}


def loaded(*, moves: bool) -> dict[str, Any]:
    run = case("as planned", [90.0, 90.0, 30.0, 60.0, 80.0, 100.0], moves=moves, on_bus=(0.0, 0.5))
    return {**run, "moves_threads": moves, "load_s": [2.0, 4.0]}


def result() -> dict[str, Any]:
    names = ("as planned", "CPU x10", "CPU x0.1", "bus x10", "bus x0.1")
    row = {
        "vram_bytes": 3 * 2**30,
        "resident_experts": 10,
        "experts": 100,
        "fixed": [case(name, [20.0, 25.0], moves=False, on_bus=(1.0, 1.0)) for name in names],
        "moving": [case(name, [20.0, 99.0], moves=True, on_bus=(1.0, 0.25)) for name in names],
        "best": {"case": "bus 25.0%", "tok_s": 110.0},
    }
    load = {
        "processes": 8,
        "runs": [loaded(moves=True), loaded(moves=False)],
        "best": {"case": "bus 50.0%", "tok_s": 64.0},
    }
    return {
        "settled": 16,
        "window": 16,
        "machine": {"gpu": "a GPU", "cores": 16},
        "commit": "c0ffee",
        "command": "wrong_rates",
        "rows": [{**row, "load": load}, {**row, "vram_bytes": 2**31}],
    }


def cells(text: str, begin: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(begin))
    return line.strip("| ").split(" | ")


def test_moving_shares_stand_beside_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load", lambda _: result())
    text = report.wrong_rates()
    assert cells(text, "| 3.00 GiB")[:5] == ["3.00 GiB, 10% of experts", "as planned", "25", "99", "0.90"]
    assert cells(text, "| 3.00 GiB")[5] == "100%"
    assert cells(text, "| shares and threads move") == [
        "shares and threads move",
        "90",
        "30",
        "60",
        "0.94",
        "100",
    ]
    assert "bus 25.0% with 110 tok/s" in text


def test_a_load_that_ended_at_once_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result()
    for run in found["rows"][0]["load"]["runs"]:
        run["load_s"] = [2.0, 2.5]
    monkeypatch.setattr(report, "load", lambda _: found)
    assert cells(report.wrong_rates(), "| as planned")[2:5] == ["", "", ""]


def test_every_line_of_the_picture_lies_in_its_panel() -> None:
    root = ElementTree.fromstring(report.picture(result()))
    frames = [each for each in root.iter(f"{SVG}rect") if each.get("fill") == "none"]
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(frames) == 2 * 3
    assert len(lines) == 2 * (2 * 5 + 1) + 2 * 2 + 1
    for line in lines:
        points = [tuple(map(float, each.split(","))) for each in line.get("points", "").split()]
        assert any(
            all(
                0 <= x - float(frame.get("x", 0)) <= float(frame.get("width", 0))
                and 0 <= y - float(frame.get("y", 0)) <= float(frame.get("height", 0))
                for x, y in points
            )
            for frame in frames
        ), line.attrib
    assert float(root.get("width", 0)) > max(
        float(frame.get("x", 0)) + float(frame.get("width", 0)) for frame in frames
    )
