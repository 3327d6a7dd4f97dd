"""The tables of a desktop's share of a machine, and of forecasts beside what was measured."""

from typing import Any

import pytest

from bench.report import desktop as report


def line(side: str, tok_s: float, **more: Any) -> dict[str, Any]:
    figures = {name: {"tok_s": tok_s * by} for by, name in enumerate(report.FIGURES, start=1)}
    where = {"side": side, "cores": 6, "programs": 3, "experts_gib": 3, "experts_share": 0.17}
    return {
        **where,
        "vram_bytes": 7 * 2**30,
        "bus_bytes_per_s": [12e9, 14e9],
        "figures": figures,
        **more,
    }


def cells(text: str) -> list[list[str]]:
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    return rows[2:]


@pytest.mark.parametrize("other", [{"cores": 8}, {"programs": 7}, {"experts_gib": 0}])
def test_a_line_stands_beside_that_of_the_same_setting(
    other: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast = dict.fromkeys(report.FIGURES, 180.0)
    result = {
        "commit": "c0ffee",
        "command": "desktop",
        "machine": {"gpu": "a GPU"},
        "bus_left_bytes_per_s": {"0": 5e10, "3": 1.3e10},
        "rows": [
            line("llama.cpp", 15.0, **other),
            line("coldstream", 100.0, forecast=forecast),
            line("llama.cpp", 25.0),
            line("coldstream", 300.0, forecast=forecast, cores=16),
        ],
    }
    files = {"gpu/desktop": result}
    monkeypatch.setattr(report, "load", files.__getitem__)
    monkeypatch.setattr(report, "has", files.__contains__)
    beside, alone = cells(report.desktop_bus())
    assert beside[:2] == ["6", "13.0"]
    assert beside[4:] == ["**100**, 25, 4.0×", "**200**, 50, 4.0×", "**300**, 75, 4.0×", "1.80, 0.90, 0.60"]
    assert alone[4] == "**300**, –"
    monkeypatch.setattr(report, "has", lambda name: False)
    assert report.desktop_bus() == ""


def test_figures_are_counted_that_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = enumerate((0.84, 0.86, 1.0, 1.14, 1.16))
    rows = [{"figures": {str(n): {"ratio": ratio, "older_than": None} for n, ratio in ratios}}]
    rows[0]["figures"]["older"] = {"ratio": 2.0, "older_than": "facade00"}
    found = {
        "result": "run.json",
        "measured": {"commit": "decade00-changed", "machine": {"cpu": "a CPU", "cores": 2}},
        "bus": "13",
        "has_steps": False,
        "rows": rows,
    }
    result = {"commit": "c0ffee", "forecasts": [found, found | {"has_steps": True, "rows": [rows[0]] * 2}]}
    monkeypatch.setattr(report, "load", lambda name: result)
    text = report.forecasts()
    assert [row[-4:-2] for row in cells(text)] == [["3 of 5", "0.84–1.16"], ["6 of 10", "0.84–1.16"]]
    assert [row[-2:] for row in cells(text)] == [["0 of 1", "2.00–2.00"], ["0 of 2", "2.00–2.00"]]
    assert [row[4] for row in cells(text)] == ["estimated", "measured"]
    assert cells(text)[0][1:4] == ["decade00", "a CPU, 2 cores", "13"]
    assert "9 of 15 figures, and 0 of 3 of older programs" in text
