"""Forecasts of runs that were measured before: as those of the run's own machine, and of its result alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.engine import forecast_again, plan_forecast
from bench.engine.forecast_again import Headers, again, conditions_of, contains, name_of, older_than, rates_of
from bench.report.tables import load
from coldstream.placement.rates import Rates
from small_shape import SMALL

WORDS = "--device cpu --prompts 168 --warm-tokens 4 --timed-tokens 6 --texts 1 --mix IQ4_XS --commit c0ffee"
SIZE = ("--layers", str(SMALL.layers), "--vocab", str(SMALL.vocab))


def ran(monkeypatch: pytest.MonkeyPatch, module: Any, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *words])
    status: int = module.main()
    return status


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Headers:
    """Files of a small shape; the machine's results are of the full-size one."""
    monkeypatch.setattr(forecast_again, "FULL_SHAPE", SMALL)
    return Headers(tmp_path)


@pytest.mark.sharded(of="measurements")
def test_a_run_is_forecast_from_its_result_as_it_was_on_its_machine(
    tmp_path: Path, headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_forecast, "FULL_SHAPE", SMALL)
    run, found = tmp_path / "run.json", tmp_path / "again.json"
    ran(monkeypatch, plan_forecast, *WORDS.split(), *SIZE, "--folder", str(tmp_path), "--out", str(run))
    ran(monkeypatch, forecast_again, str(run), "--out", str(found), "--commit", "decade")
    before, after = json.loads(run.read_text()), json.loads(found.read_text())
    assert after["commit"] == "decade"
    (of_result,) = after["forecasts"]
    assert of_result["result"] == "run.json"
    assert of_result["measured"]["commit"] == "c0ffee"
    (row,) = of_result["rows"]
    figures = before["mixes"]["IQ4_XS"]["rows"][0]["figures"]
    assert list(row["figures"]) == list(figures)
    for name, both in figures.items():
        found_again = dict(row["figures"][name])
        assert found_again.pop("older_than") is None
        assert found_again == pytest.approx(both)
    # The machine is the result's: with slower memory it is forecast as slower.
    slow = json.loads(run.read_text())
    rates = slow["mixes"]["IQ4_XS"]["rows"][0]["rates"]
    for name in ("read_bytes_per_s", "row_bytes_per_s"):
        rates[name] /= 100
    (slower,) = again(slow, headers)
    assert slower["figures"]["decode"]["forecast_tok_s"] < row["figures"]["decode"]["forecast_tok_s"] / 2


@pytest.mark.sharded(of="measurements")
def test_decoding_and_prompts_of_a_recorded_machine(headers: Headers) -> None:
    decoding, prompts = load("gpu/hybrid_ahead"), load("gpu/streaming_shared")
    rows = again(decoding, headers)
    assert [row["measured_share"] for row in rows] == [row["experts_share"] for row in decoding["rows"]]
    speeds = [row["figures"]["decode"]["forecast_tok_s"] for row in rows]
    assert speeds == sorted(speeds)  # more experts each
    by_budget = again(prompts, headers)
    assert [len(row["figures"]) for row in by_budget] == [6, 6, 6]
    assert [row["experts_share"] for row in by_budget][:2] == [1.0, 0.0]
    for row in by_budget:
        measured = {each["tok_s"] for each in prompts["rows"]}
        assert {both["measured_tok_s"] for both in row["figures"].values()} <= measured


@pytest.mark.sharded(of="measurements")
def test_a_hit_rate_that_was_measured_has_a_figure_of_its_own(headers: Headers) -> None:
    for row, of in zip(
        again(load("gpu/hybrid_ahead"), headers), load("gpu/hybrid_ahead")["rows"], strict=True
    ):
        assert ("decode with its hits" in row["figures"]) == (0.0 < of["hit_rate"] < 1.0)


def test_a_figure_is_of_an_older_program_where_what_it_measures_has_changed_since(
    headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {"commit": "c0ffee", "machine": {"gpu": "a GPU"}}  # so that the day decides
    before, day, after = ({**unknown, "date": f"2026-11-{day}"} for day in (25, 29, 30))
    assert older_than("decode", day) == older_than("decode with its hits", day) == "c4d1ba0c"
    assert older_than("168", day) == older_than("512", before) == "85e22d07"
    assert older_than("2048", day) == "88a9f11d"
    assert [older_than(name, after) for name in ("decode", "168", "2048", "8192")] == [None] * 4
    assert older_than("100", before) == "b1eaf293"
    assert older_than("100", day) is older_than("8192", before) is None
    names = ("decode", "512", "2048", "8192")
    rows = [{"measured_share": share, "figures": {name: {} for name in names}} for share in (1.0, 0.5)]
    monkeypatch.setattr(forecast_again, "_of_any", lambda result, headers: rows)
    resident, missing = again(before, headers)
    assert {both["older_than"] for both in resident["figures"].values()} == {None}
    assert {name for name, both in missing["figures"].items() if both["older_than"]} == {*names} - {"8192"}
    again(before | {"machine": {}}, headers)
    assert {both["older_than"] for both in missing["figures"].values()} == {None}, "the changes are a GPU's"


def test_what_a_commit_contains_counts_before_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"commit": "c0ffee-changed", "date": "2026-11-30"}
    asked: list[str] = []

    def contained(commit: str, earlier: str) -> bool:
        asked.append(commit)
        return earlier == "def0c648"

    monkeypatch.setattr(forecast_again, "contains", contained)
    assert older_than("2048", result) == "88a9f11d"
    assert older_than("decode", result) == "c4d1ba0c"
    assert older_than("8192", result) is None
    assert set(asked) == {"c0ffee"}


def test_git_says_what_a_commit_contains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(2):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", str(number)], check=True)
    names = subprocess.run([*git, "log", "--format=%H"], check=True, capture_output=True, text=True)
    last, first = names.stdout.split()
    monkeypatch.setattr(forecast_again, "ROOT", tmp_path)
    assert contains(last, first) is True
    assert contains(first, last) is False
    assert contains("c0ffee", first) is None


def test_measured_steps_of_a_line_count_before_shares_that_were_made_of_them() -> None:
    line = next(row for row in load("gpu/desktop")["rows"] if row.get("steps"))
    found = rates_of(line).shares
    assert found.estimated == ()
    assert found.launch_s == line["steps"]["launch_s"]
    assert found.staged == line["steps"]["staged_beside"] / line["rates"]["link_bytes_per_s"]


def test_rates_that_this_version_does_not_know_are_left_out() -> None:
    (row, *_) = load("gpu/mixes")["mixes"]["Q4_K_M"]["rows"]
    found = rates_of({"rates": row["rates"] | {"phlogiston_per_s": 1.0}})
    assert isinstance(found, Rates)
    assert len(found.product_values_per_s) == len(row["rates"]["product_values_per_s"])
    assert hash(found)  # forecasts keep what they found for a machine


@pytest.mark.sharded(of="measurements")
def test_lines_of_a_desktop_are_forecast_by_their_own_rates(headers: Headers) -> None:
    mixes = load("gpu/mixes")
    row = next(row for row in mixes["mixes"]["Q4_K_M"]["rows"] if row["budget"] == "4G")
    figures = {"decode": {"tok_s": 100.0}, "512": {"tok_s": 2000.0}}
    line = {
        "cores": 6,
        "experts_gib": 3,
        "vram_bytes": 4 << 30,
        "experts_share": 0.1,
        "bus_bytes_per_s": [1.2e10, 1.3e10],
        "figures": figures,
        "forecast": {},
    }
    work = {"prompts": [512], "warm_tokens": 64, "timed_tokens": 32, "texts": 1}
    result = {"machine": mixes["machine"], "work": work, "date": "2026-11-29", "commit": "c0ffee"}
    slower = row["rates"] | {"vram_bytes_per_s": row["rates"]["vram_bytes_per_s"] / 100}
    lines = [line | {"rates": rates} for rates in (row["rates"], slower)]
    fast, slow = again(result | {"rows": [*lines, {"side": "llama.cpp"}]}, headers)
    assert fast["figures"]["decode"]["measured_tok_s"] == 100.0
    assert list(fast["figures"]) == list(figures)
    assert [both["older_than"] for both in fast["figures"].values()] == ["c4d1ba0c", "85e22d07"]
    assert slow["figures"]["decode"]["forecast_tok_s"] < fast["figures"]["decode"]["forecast_tok_s"] / 2


def test_the_bus_of_a_result_and_whether_its_shares_were_measured() -> None:
    assert conditions_of(load("gpu/hybrid_ahead")) == {"bus": "52", "has_steps": True}
    assert conditions_of(load("gpu/desktop_hybrid_slow_bus")) == {"bus": "26", "has_steps": False}
    rates = [
        {"link_bytes_per_s": rate, "shares": {"estimated": estimated}}
        for rate, estimated in ((6.4e9, []), (1.3e10, []), (1.3e10, ["vram"]))
    ]
    assert conditions_of({"rows": [{"rates": each} for each in rates[:2]]}) == {
        "bus": "6–13",
        "has_steps": True,
    }
    assert not conditions_of({"rows": [{"rates": each} for each in rates]})["has_steps"]


def test_a_kept_result_has_its_folder_in_its_name(tmp_path: Path) -> None:
    kept = Path(forecast_again.__file__).parents[2] / "docs" / "results" / "gpu"
    assert name_of(kept / "pairs" / "h100" / "hybrid_new.json") == "pairs/h100/hybrid_new.json"
    assert name_of(kept / "hybrid.json") == name_of(tmp_path / "hybrid.json") == "hybrid.json"


def test_other_results_are_refused(headers: Headers) -> None:
    with pytest.raises(ValueError, match="rates of its machine"):
        again(load("gpu/types"), headers)
