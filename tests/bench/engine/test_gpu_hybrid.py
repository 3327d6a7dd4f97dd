"""Where a token's time goes: from what was counted to the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine.gpu_hybrid import parts_of
from bench.report import gpu as report_gpu
from bench.report import tables as report_tables
from coldstream.experts.step_times import PARTS


def text(seconds: float, **parts: float) -> dict[str, Any]:
    return {"seconds": seconds, **{f"{part}_seconds": parts.get(part, 0.0) for part in PARTS}}


def test_parts_are_means_and_the_rest_is_what_the_layers_leave_over() -> None:
    parts = parts_of([text(2e-3, other=1e-3, bus=2e-4), text(4e-3, other=2e-3)])
    assert tuple(parts) == (*PARTS, "rest")
    assert parts == pytest.approx(
        {"other": 1.5e-3, "router": 0, "resident": 0, "bus": 1e-4, "wait": 0, "combine": 0, "rest": 1.4e-3}
    )
    assert parts_of([{"seconds": 2e-3}]) == {}


def test_the_table_has_the_cases_that_kept_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    assert report_gpu.gpu_parts() == ""
    case = {"experts_bytes": 3 * 2**30, "experts_share": 0.17, "depth": 0}
    rows = [
        {**case, "parts_s": parts_of([text(2e-3, other=1.2e-3, wait=3e-4)])},
        {**case, "experts_share": 0.0, "depth": 8192, "parts_s": parts_of([text(1e-3, router=1e-4)])},
        {**case, "parts_s": {}},
        case,
    ]
    (tmp_path / "gpu" / "hybrid.json").write_text(json.dumps({"rows": rows}))
    lines = report_gpu.gpu_parts().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][2:] == [*(f"{part} µs" for part in (*PARTS, "rest")), "token µs"]
    assert cells[2] == ["3.0 GiB (17%)", "short", "1200", "0", "0", "0", "300", "0", "500", "2000"]
    assert cells[3][1:] == ["8192", "0", "100", "0", "0", "0", "0", "900", "1000"]
    assert len(cells) == 4
