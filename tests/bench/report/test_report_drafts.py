"""Tables of drafts, from made-up figures."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.engine.speculation import NUM_TEXTS, _given
from bench.report import tables as report_tables
from bench.report.drafts import DRAFTERS, cpu_drafts, cpu_shallow_drafts, demo_drafter, speeds
from coldstream.assets import demo_model_path


def write(folder: Path, name: str, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(report_tables, "RESULTS", folder)


def test_speeds_are_of_the_best_size_and_of_sizes_by_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[dict[str, Any]] = [
        {"drafter": name, "budget": budget, "ratio": ratio, "tok_s": 500.0, "tokens_per_step": 2.5}
        for name in DRAFTERS
        for budget, ratio in ((2, 0.5), (3, 0.75), ("auto", 0.875))
    ]
    again = {"drafter": "none", "budget": 0, "ratio": 1.03, "tok_s": 1000.0, "tokens_per_step": 1.0}
    result = {
        **dict.fromkeys(("texts", "new_tokens", "threads", "tier", "cpu", "commit", "command"), "given"),
        "results": [{"kind": "code", "sampling": "greedy", "ways": [again, *ways]}],
    }
    write(tmp_path, "cpu_speculation", result, monkeypatch)
    lines = cpu_drafts().splitlines()
    assert (
        lines[2]
        == "| code | greedy | 1000 | "
        + " | ".join(["0.75× (3: 2.50 tokens a step) | 0.88×"] * len(DRAFTERS))
        + " |"
    )
    assert "none, again 1.03 (1.03–1.03), mtp 0.88 (0.88–0.88)" in lines[4]


def test_speeds_of_models_with_few_layers_have_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: dict[str, Any] = {"budget": 0}
    way = {"budget": "auto", "cpu_ratio": 1.25, "cpu_interval": [1.0, 1.5], "wall_ratio": 1.5}
    way |= {"wall_interval": [1.25, 2.0], "tokens_per_step": 2.5}
    case = {"name": "shallow", "accepted": [0.75, 0.5], "tier": "given", "ways": [plain, way, plain]}
    result = {**dict.fromkeys(("texts", "tokens", "commit", "command"), "given"), "cases": [case]}
    result["machine"] = dict.fromkeys(("cpu", "threads"), "given")
    for name in ("cpu_shallow_drafts", "cpu_deep_drafts"):
        write(tmp_path, name, result, monkeypatch)
    row = "| shallow | 75%, 50% | by cost | 2.50 | 1.25 (1.00–1.50) | 1.50 (1.25–2.00) |"
    assert cpu_shallow_drafts().splitlines()[2:4] == [row, row]


def test_depths_that_were_never_right_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [
        {"sampling": "drawn", "drafter": "dflash", "shape": shape, "nodes": nodes, "tokens_per_step": 1.625}
        | {"accepted_by_depth": [0.5, 0.125]}
        for shape, nodes in (("chain", 2), ("chain", 3), ("tree", 16))
    ]
    result = {"held_out_files": 3, "new_tokens": 9, "bytes": 2000, "command": "given", "results": ways}
    write(tmp_path, "demo_drafter", result, monkeypatch)
    lines = demo_drafter().splitlines()
    assert lines[0] == "| sampling | tokens a step by | chain of 2 | chain of 3 | tree of 16 |"
    assert lines[2] == "| drawn | dflash | 1.62 | 1.62 | 1.62 |"
    assert "Along a chain of 3" in lines[4]
    assert lines[-3] == "| drawn | dflash | 50% | 12% | 0% |"


def test_the_command_that_is_written_down_has_what_was_given() -> None:
    options = Namespace(
        model=demo_model_path(), model_draft=Path("drafter.gguf"), texts=NUM_TEXTS, budgets=[1, 2], kinds=None
    )
    assert _given(options) == " --model-draft drafter.gguf --budgets 1 2"


def test_speeds_compare_each_text_with_itself() -> None:
    """The second text and the machine at its time are twice as slow, which says nothing of drafts."""

    def row(budget: int | str, *seconds: float) -> dict[str, Any]:
        return {"budget": budget, "texts": [{"seconds": each} for each in seconds]}

    rows = [row(0, 0.9, 1.8, 1.0), row("auto", 0.5, 1.0, 0.25), row(0, 1.1, 2.2, 1.0)]
    assert speeds(rows)[1] == pytest.approx(2.0)
    assert speeds(rows)[0] == pytest.approx(1 / 0.9)
