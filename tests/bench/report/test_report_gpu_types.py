"""The table of weight types on a GPU, and its aims, from a result as the benchmark writes it."""

from typing import Any

import pytest

from bench.report import aims
from bench.report import gpu_types as report


def result(**ratios: float) -> dict[str, Any]:
    """ratios: of one row by type; prompts take twice that."""
    rows = [
        {
            "what": what,
            "type": kind,
            "rows": count,
            "us": 1234.56,
            "ratio": ratio * more,
            "bytes_ratio": size,
        }
        for size, (kind, ratio) in enumerate(ratios.items(), start=1)
        for count, more in ((1, 1), (2048, 2))
        for what in ("dense", "experts")
    ]
    machine = {"gpu": "a GPU"}
    return {"commit": "c0ffee", "command": "python -m bench", "machine": machine, "results": rows}


def test_types_are_in_the_order_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "load", {"gpu/types": result(Q8_0=1.0, IQ1_S=0.5)}.__getitem__)
    text = report.gpu_types()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| Q", "| I"))]
    assert rows == [
        ["Q8_0", "1.00", *["1,234.6 (1.00)"] * 2, *["1,234.6 (2.00)"] * 2],
        ["IQ1_S", "2.00", *["1,234.6 (0.50)"] * 2, *["1,234.6 (1.00)"] * 2],
    ]
    assert "a GPU, commit c0ffee: `python -m bench`" in text


def test_types_of_a_later_commit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(Q8_0=1.0, IQ1_S=0.5)
    found["replaced"] = [
        {"commit": "facade", "rows": 2048, "types": ["Q8_0"]},
        {"commit": "decade", "rows": 1, "types": ["Q8_0", "IQ1_S"]},
    ]
    monkeypatch.setattr(report, "load", {"gpu/types": found}.__getitem__)
    text = report.gpu_types()
    assert "2,048 rows of Q8_0 again at commit facade. One row of Q8_0, IQ1_S again at commit decade." in text
    del found["replaced"]
    assert text.startswith(report.gpu_types().rpartition("\n\n")[0]), "the table is the same"


def test_what_was_not_measured_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(Q8_0=1.0)
    found["results"].pop()
    monkeypatch.setattr(report, "load", {"gpu/types": found}.__getitem__)
    assert report.gpu_types().count("| – |") == 1


def test_an_aim_is_of_the_slowest_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aims, "load", {"gpu/types": result(Q8_0=1.2, IQ1_S=0.5)}.__getitem__)
    lines = [line for line in aims.aims_gpu_types().splitlines() if "types" in line]
    assert len(lines) == 4
    assert all("(Q8_0; 1 reach it)" in line for line in lines)
    assert [line.split(" | ")[2] for line in lines] == ["1.20×", "1.20×", "2.40×", "2.40×"]
