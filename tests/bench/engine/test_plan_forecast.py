"""Forecasts beside runs: both are of one plan, and what is printed says how far they are apart."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engine import plan_forecast
from bench.engine.gpu_hybrid import GIB, budget_with
from bench.engine.plan_forecast import Work, compared
from bench.full_size_mixes import MIXES
from bench.full_size_model import FullSizeWriter
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning import gather
from coldstream.planning.config import EngineConfig
from coldstream.planning.planned import Planned
from small_shape import SMALL

GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)
WORDS = "--device cpu --prompts 168 --warm-tokens 4 --timed-tokens 6 --texts 2 --commit c0ffee"
SIZE = ["--layers", str(SMALL.layers), "--vocab", str(SMALL.vocab)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Planned, bool]]:
    """What was planned, and whether the machine was to be measured for it, which takes seconds."""
    found: list[tuple[Planned, bool]] = []

    def plan_by_name(config: EngineConfig, *, measure: bool) -> Planned:
        found.append((gather.plan_by_name(config), measure))
        return found[-1][0]

    monkeypatch.setattr(plan_forecast, "FULL_SHAPE", SMALL)
    monkeypatch.setattr(plan_forecast, "plan_by_name", plan_by_name)
    return found


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    out = folder / "forecast.json"
    argv = ["plan_forecast", *WORDS.split(), *SIZE, "--folder", str(folder), "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", argv)
    status = plan_forecast.main()
    written: dict[str, Any] = json.loads(out.read_text())
    return status, written


@pytest.mark.sharded(of="measurements")
def test_each_mix_has_its_forecast_beside_its_run(
    tmp_path: Path, plans: list[tuple[Planned, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, result = run(tmp_path, monkeypatch, "--mix", "IQ4_XS", "Q2_K")
    assert list(result["mixes"]) == ["IQ4_XS", "Q2_K"]
    assert [measured for _, measured in plans] == [True, False]  # one measurement for all mixes
    assert result["commit"] == "c0ffee"
    assert not list(tmp_path.glob("**/*.gguf"))
    near = []
    for (planned, _), mix in zip(plans, result["mixes"].values(), strict=True):
        assert mix["file_bytes"] > planned.plan.resident_bytes
        (row,) = mix["rows"]
        assert row["experts_share"] == 1.0
        assert set(row["figures"]) == {"decode", "168"}
        for name, both in row["figures"].items():
            assert both["measured_tok_s"] == statistics.median(row["runs_tok_s"][name])
            assert both["ratio"] == pytest.approx(both["forecast_tok_s"] / both["measured_tok_s"])
            near.append(both["is_near"])
        # 64 tokens of prompt, 4 that are not timed and the middle of 6.
        decode = forecast(planned.plan, planned.known, 71).decode
        assert row["figures"]["decode"]["forecast_tok_s"] == pytest.approx(decode)
    assert status == int(not all(near))


@pytest.mark.sharded(of="measurements")
def test_a_file_that_is_kept_is_used_again(
    tmp_path: Path, plans: list[tuple[Planned, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--mix", "IQ4_XS", "--keep", str(tmp_path))
    _, first = run(tmp_path, monkeypatch, *words)
    (kept,) = tmp_path.glob("*.gguf")
    written = kept.stat().st_mtime_ns
    _, second = run(tmp_path, monkeypatch, *words)
    assert kept.stat().st_mtime_ns == written
    assert first["mixes"]["IQ4_XS"]["file_bytes"] == second["mixes"]["IQ4_XS"]["file_bytes"]


@pytest.mark.sharded(of="measurements")
def test_a_run_of_another_text_is_no_figure(
    tmp_path: Path, plans: list[tuple[Planned, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByTwos(FullSizeWriter):
        """A file whose text goes from each id to the next but one."""

        def table(self, name: str, levels: np.ndarray, *rest: Any) -> None:
            super().table(name, np.roll(levels, int(name == "output.weight"), axis=0), *rest)

    monkeypatch.setattr(plan_forecast, "FullSizeWriter", ByTwos)
    with pytest.raises(RuntimeError, match="left the walk"):
        run(tmp_path, monkeypatch, "--mix", "Q2_K")


@pytest.mark.sharded(of="measurements")
def test_budgets_of_experts_are_the_least_that_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.gguf"
    FullSizeWriter(path, replace(SMALL, experts=128, expert_ffn=512), seed=3, threads=2).write()
    monkeypatch.setattr(plan_forecast, "find_gpu", lambda: None)
    monkeypatch.setattr(plan_forecast, "measured_hardware", lambda gpu: MACHINE)
    words = ["--vram", "auto", "8G", "--experts", "0", "0.05", "--prompts", "128"]
    options = plan_forecast.arguments().parse_args(words)
    work = Work(options.prompts, 4, 6, 1)
    found = plan_forecast.budgets_of(path, options, work)
    assert found[:2] == ["auto", "8G"]
    assert found[2:] == [budget_with(path, MACHINE, work.ctx_size, 1, int(gib * GIB)) for gib in (0, 0.05)]
    assert "--vram auto 8G --experts 0 0.05" in plan_forecast.command(options)


def test_what_is_near() -> None:
    found = compared({"decode": 110.0, "512": 70.0, "2048": 5.0}, {"decode": 100.0, "512": 100.0, "999": 1.0})
    assert set(found) == {"decode", "512"}
    assert found["decode"] == {
        "forecast_tok_s": 110.0,
        "measured_tok_s": 100.0,
        "ratio": pytest.approx(1.1),
        "is_near": True,
    }
    assert not found["512"]["is_near"]


def test_all_mixes_of_known_types_are_compared_by_default() -> None:
    options = plan_forecast.arguments().parse_args([])
    assert options.mix == [mix for mix in MIXES.values() if not mix.unknown_types]
    assert options.layers == 40
