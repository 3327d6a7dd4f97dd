"""Forecasts of a CPU beside runs: a figure has both, and the result alone gives the same forecast again."""

import json
from pathlib import Path

import pytest

from bench.engine import cpu_forecast
from bench.engine.forecast_again import Headers, again, conditions_of

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
