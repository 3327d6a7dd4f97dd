"""`coldstream bench` on a tiny model: the ceiling first, llama-bench's table, one line of JSON."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream.cli import bench
from coldstream.engine import EngineConfig, open_model
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hardware_file import default_path, store_rates, with_stored_rates

Run = Callable[..., tuple[int, str, str]]
QUICK = ["-p", "16", "-n", "4", "-r", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf")[0])


@pytest.mark.sharded(of="processes")
def test_the_ceiling_comes_first_and_then_the_table(run: Run, path: str) -> None:
    code, out, _ = run("bench", path, *QUICK, "-d", "0,8")
    assert code == 0
    first, *rest = out.splitlines()
    assert re.fullmatch(
        r"decode reads \S+ MB of weights a token; 1 threads read \S+ GB/s: at most \S+ tok/s", first
    )
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in rest if line.startswith("|")]
    assert rows[0] == ["model", "size", "params", "backend", "threads", "test", "t/s", "of ceiling"]
    assert [row[5] for row in rows[2:]] == ["pp16", "pp16 @ d8", "tg4", "tg4 @ d8"]
    for row in rows[2:]:
        assert row[0] == "tiny"
        assert re.fullmatch(r"CPU \w+", row[3])
        assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[6])
    assert [bool(row[7:] and row[7]) for row in rows[2:]] == [False, False, True, True]


@pytest.mark.sharded(of="processes")
def test_a_budget_of_ram_shows_what_came_from_the_disk(run: Run) -> None:
    code, out, _ = run("bench", *QUICK, "--ram", "30M", "--ctx-size", "64", "--device", "cpu")
    assert code == 0
    assert re.search(r"\d+ of 256 experts fit into RAM; \d+% of their uses", out)
    code, out, _ = run("bench", *QUICK, "--ram", "30M", "--ctx-size", "64", "--device", "cpu", "--json")
    disk = json.loads(out)["experts_on_disk"]
    assert 0 < disk["num_slots"] < disk["num_experts"] == 256
    assert disk["bytes_read"] > 0


def test_json_is_one_line_with_the_samples(run: Run, path: str) -> None:
    code, out, _ = run("bench", path, *QUICK, "--json")
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert [row["test"] for row in report["tests"]] == ["pp16", "tg4"]
    for row in report["tests"]:
        assert len(row["samples"]) == 2
        assert min(row["samples"]) <= row["tokens_per_s_mean"] <= max(row["samples"])
    assert report["tests"][0]["ceiling_tokens_per_s"] is None
    assert (
        report["tests"][1]["ceiling_tokens_per_s"]
        < report["read_bytes_per_s"] / report["weight_bytes_per_token"]
    )
    assert report["size_bytes"] == Path(path).stat().st_size
    assert (report["threads"], report["warm_up_runs"]) == (1, 1)


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("budget", [3, "auto"])
def test_drafts_are_timed_beside_the_same_without(run: Run, budget: int | str) -> None:
    words = ["-p", "0", "-n", "24", "-r", "2", "--threads", "1", "--device", "cpu", "--spec-type", "mtp"]
    code, out, _ = run("bench", *words, "--tree-budget", str(budget), "--json")
    assert code == 0
    (found,) = json.loads(out)["drafts"]
    assert (found["test"], found["drafter"]) == ("tg24, drafted", "mtp")
    assert len(found["samples"]) == len(found["plain_samples"]) == 2
    assert min(found["samples"] + found["plain_samples"]) > 0
    assert found["steps"] + sum(found["accepted_by_depth"]) == 24
    assert (
        sum(count for _, count in found["reasons"])
        == found["steps"]
        == sum(count for _, count in found["sizes"])
    )
    if budget == 3:
        assert found["reasons"] == [["fixed", found["steps"]]]
        assert found["tokens_per_step"] > 1.5
        assert 0 < found["build_s"] < found["draft_s"]
        assert 0 < found["choose_s"] < found["verify_s"]
        assert found["experts"] is None
        code, out, _ = run("bench", *words, "--tree-budget", "3")
        assert re.search(r"\ntg24, drafted: \S+ t/s, \S+ times as fast .* mtp gave \S+ tokens a draft", out)
        assert re.search(r"a step; drafting \S+ s, building trees \S+ s, sizing them \S+ s, steps \S+ s", out)


@pytest.mark.sharded(of="processes")
def test_drafts_under_a_budget_of_ram_say_which_experts_they_used(run: Run) -> None:
    words = ["-p", "0", "-n", "12", "-r", "1", "--threads", "1", "--device", "cpu", "--spec-type", "mtp"]
    words += ["--ram", "40M", "--ctx-size", "128", "--tree-budget", "3"]
    code, out, _ = run("bench", *words, "--json")
    assert code == 0
    (found,) = json.loads(out)["drafts"]
    assert 0 < found["cold_experts"] < found["experts"]
    assert 8 * 4 * found["drafted_steps"] <= found["experts"] <= 8 * 32 * found["drafted_steps"]
    assert re.search(r"; \d+ experts a draft, \d+ not at hand", run("bench", *words)[1])


@pytest.mark.parametrize("context", [(), ("-c", "64")])
def test_a_plan_made_by_plan_is_measured(
    run: Run, path: str, tmp_path: Path, context: tuple[str, ...]
) -> None:
    plan = str(tmp_path / "my.plan")
    assert run("plan", path, "--device", "cpu", "--out", plan, *context)[0] == 0
    code, out, err = run("bench", path, "--plan", plan, *QUICK, "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    assert [row["test"] for row in json.loads(out)["tests"]] == ["pp16", "tg4"]


def test_a_test_that_needs_more_context_than_there_is_is_named(run: Run, path: str, tmp_path: Path) -> None:
    plan = str(tmp_path / "my.plan")
    assert run("plan", path, "--device", "cpu", "--out", plan, "-c", "64")[0] == 0
    for context in (("--plan", plan), ("-c", "64")):
        code, out, err = run("bench", path, "--device", "cpu", *context, "-n", "4,99")
        assert (code, out) == (2, "")
        assert "pp512 needs a context of 513 tokens, there are 64" in err


def test_more_context_than_the_model_has_is_refused(run: Run, path: str) -> None:
    code, out, err = run("bench", path, "-d", "5000")
    assert (code, out) == (2, "")
    assert "beyond the 4096 tokens" in err


def test_a_run_far_faster_than_the_kept_rates_has_the_machine_measured_again(
    run: Run, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = replace(Hardware.measure(), product_values_per_s=((1e9,) * len(PRODUCT_ROWS),) * len(QuantType))
    store_rates(replace(kept, read_bytes_per_s=1e6, measured_at="2026-01-01 00:00 UTC"), default_path())
    assert run("bench", path, *QUICK, "--device", "cpu")[0] == 0
    found = with_stored_rates(kept, default_path())
    assert found is not None
    assert found.read_bytes_per_s is not None
    assert found.read_bytes_per_s > 1e7


def test_a_run_on_a_gpu_is_compared_with_its_copies_and_its_forecast(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuHardware("a GPU", "1", 2, 1, copy_bytes_per_s=1e9)
    machine = replace(Hardware.measure(), gpu=gpu)
    monkeypatch.setattr(bench, "find_gpu", lambda: gpu)
    monkeypatch.setattr(bench, "measure_copy_bandwidth", lambda: 3e9)
    opened = open_model(EngineConfig(path, device="cpu", ctx_size=16))
    planned = replace(opened.planned, config=replace(opened.config, device="cuda"))
    report = bench._Report(replace(opened, planned=planned))
    opened.close()
    for forecast, expected in ((2.0, 3.0), (4.0, 4.0)):
        monkeypatch.setattr(bench, "times_as_forecast", lambda *of, forecast=forecast: forecast)
        assert report.times_as_fast([], machine) == expected
