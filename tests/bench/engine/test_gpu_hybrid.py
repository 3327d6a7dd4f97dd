"""Where a token's time goes: from what was counted to the table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engine.gpu_hybrid import budget_with, parts_of
from bench.full_size_model import FullSizeWriter
from bench.report import gpu as report_gpu
from bench.report import tables as report_tables
from coldstream.errors import OutOfMemoryError
from coldstream.experts.gpu_statistics import PARTS
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model
from small_shape import SMALL

MIB = 2**20


GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)


@pytest.mark.sharded(of="measurements")
def test_a_budget_is_the_least_that_holds_so_many_bytes_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    FullSizeWriter(path, replace(SMALL, experts=128, expert_ffn=512), seed=3, threads=2).write()
    with GGUFFile.open(path) as file:
        sources = Sources(file, read_spec(file.metadata, file.tensors), MACHINE)

        def resident(budget: int) -> int:
            config = EngineConfig(str(path), device="cuda", vram=budget, ctx_size=128, parallel=2)
            return plan_model(config, sources).plan.resident_bytes

        budgets = [budget_with(path, MACHINE, 128, 2, wanted) for wanted in (0, 50 * MIB, 2**50)]
        assert budgets == sorted(budgets)
        assert resident(budgets[0]) < 20 * MIB
        assert 50 * MIB <= resident(budgets[1]) < 70 * MIB
        assert resident(budgets[2]) == resident(2**33) > 100 * MIB
        with pytest.raises(OutOfMemoryError):
            resident(budgets[0] - 2**24)


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
