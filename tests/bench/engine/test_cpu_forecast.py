"""Forecasts of a CPU beside runs: a figure has both, and the result alone gives the same forecast again."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.engine import cpu_forecast
from bench.engine.forecast_again import Headers, again, conditions_of
from bench.full_size_forecast import TYPED_SIZES
from coldstream.engine.benchmark import BenchmarkTest
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.cost import decode_seconds_on_cpu
from coldstream.placement.hardware import Hardware
from coldstream.placement.prompt_cost import prefill_seconds_on_cpu
from coldstream.placement.rates import Rates

MIXERS = MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 2e10)
RATES = Rates.of(replace(Hardware.measure(), read_bytes_per_s=4e10, mixers=MIXERS))

WORDS = "--models demo --prompts 24 --depths 0,16 --repetitions 1 --commit c0ffee"


@pytest.mark.sharded(of="measurements")
def test_a_run_is_forecast_from_its_result_as_it_was_on_its_machine(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    cpu_forecast.main([*WORDS.split(), "--folder", str(tmp_path), "--out", str(out)])
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert list(row["figures"]) == ["decode at 0", "decode at 16", "24"]
    assert all(len(samples) == 1 for samples in row["runs_tok_s"].values())
    assert row["figures"]["24"]["measured_tok_s"] == row["runs_tok_s"]["24"][0]
    (found,) = again(result, Headers(tmp_path))
    for name, both in row["figures"].items():
        assert found["figures"][name]["older_than"] is None
        assert found["figures"][name]["ratio"] == pytest.approx(both["ratio"])
    assert conditions_of(result)["bus"] == "–"
    row["rates"]["mixers"]["cached_bytes_per_s"] /= 1000
    (slower,) = again(result, Headers(tmp_path))
    deep, before = (each["figures"]["decode at 16"]["ratio"] for each in (slower, found))
    assert deep < before / 2, "keys and values are read at the rate of the result's machine"


def test_the_part_of_a_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(path: Path, name: str, *, is_for_plans: bool) -> None:
        assert is_for_plans
        written.append(name)
        path.touch()

    monkeypatch.setattr(cpu_forecast, "write_part", write)
    files = cpu_forecast.Files(tmp_path, is_for_plans=True)
    name = cpu_forecast.MODELS[-1]
    assert files.of(name) == files.of(name)
    assert written == [name]
    assert files.of(cpu_forecast.DEMO).name == "demo.gguf"


WORK = {"prompts": [128], "depths": [0, 1024], "repetitions": 3}


def test_a_forecast_has_the_whole_model_in_ram_and_the_texts_that_are_run() -> None:
    found = cpu_forecast.expected(TYPED_SIZES, RATES, WORK, 64)
    whole = (1.0,) * TYPED_SIZES.num_layers
    resident = np.ones((TYPED_SIZES.num_layers, TYPED_SIZES.num_experts), np.bool_)
    prompt_s = prefill_seconds_on_cpu(TYPED_SIZES, RATES, resident, None, 128, 64)
    assert found["128"] == pytest.approx(128 / prompt_s)
    for depth in (0, 1024):
        context = depth + cpu_forecast.DECODED // 2
        token_s = decode_seconds_on_cpu(TYPED_SIZES, RATES, whole, context)
        assert found[f"decode at {depth}"] == pytest.approx(1 / token_s, rel=0.01)
    assert found["decode at 1024"] < found["decode at 0"]


def test_repetitions_go_over_all_figures_in_turn_each_with_another_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[int, str]] = []
    spec = SimpleNamespace(runner=SimpleNamespace(spec=SimpleNamespace(vocab_size=10**6)))
    llm = SimpleNamespace(opened=spec)
    monkeypatch.setattr(cpu_forecast, "LLM", lambda *_, **__: nullcontext(llm))

    def run(opened: object, ids: list[int], test: BenchmarkTest, *others: object) -> SimpleNamespace:
        runs.append((ids[0], f"{test.num_prompt} {test.depth}"))
        assert len(ids) > test.num_prompt + test.num_generated + test.depth
        return SimpleNamespace(samples=[float(len(runs))])

    monkeypatch.setattr(cpu_forecast, "run_benchmark", run)
    found = cpu_forecast.measured(Path("model.gguf"), WORK, 1)
    assert found == {"decode at 0": [1, 4, 7], "decode at 1024": [2, 5, 8], "128": [3, 6, 9]}
    assert len({first for first, _ in runs}) == 3


def test_the_best_of_the_repetitions_counts_and_a_miss_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the processor's seconds of one thread, which is what the rates are measured by too."""
    clocks: list[object] = []
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # put back in the end
    hardware = SimpleNamespace(num_physical_cores=7)

    def measured_rates(*_: object, **__: object) -> SimpleNamespace:
        clocks.append(time.perf_counter)
        return hardware

    monkeypatch.setattr(cpu_forecast, "measured_hardware", measured_rates)
    ratios = {"decode at 0": 1.0, "128": 1.0}
    asked: list[int] = []

    def measured(path: Path, work: dict[str, Any], threads: int) -> dict[str, list[float]]:
        asked.append(threads)
        return {name: [0.5 * ratio, ratio, 0.7 * ratio] for name, ratio in ratios.items()}

    monkeypatch.setattr(cpu_forecast, "measured", measured)
    monkeypatch.setattr(cpu_forecast, "expected", lambda *_: {"decode at 0": 1.0, "128": 1.0})
    words = ["--models", "demo", "--commit", "c0ffee", "--out", str(tmp_path / "run.json")]
    assert cpu_forecast.main(words) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["rows"][0]["figures"]["128"]["measured_tok_s"] == 1.0
    ratios["128"] = 3.0
    assert cpu_forecast.main([*words, "--cpu-time"]) == 1
    assert asked == [7, 1]
    assert clocks[1:] == [time.process_time]
