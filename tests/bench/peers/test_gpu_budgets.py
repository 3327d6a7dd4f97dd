"""Both sides by budget: what they are asked for, which number of layers fits, and the ratio."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xllamacpp

from bench.engine import desktop_workers
from bench.family_models import FAMILIES
from bench.peers import gpu_budgets, gpu_peer
from bench.peers.gpu_budgets import Weights, budgets, fitting_row, table
from coldstream.planning import gather
from side_in_thread import MACHINE, side
from small_shape import SMALL

(LLAMA,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
SMALL_LAGUNA = replace(SMALL, heads=64, head_dim=128)
GIB = 2**30


@pytest.mark.sharded(of="measurements")
def test_both_sides_have_a_row_and_none_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "small.gguf", tmp_path / "budgets.json"
    family = FAMILIES["Laguna-XS-2.1"]
    family.writer(path, SMALL_LAGUNA, seed=3, threads=2).write()
    monkeypatch.setattr(gpu_budgets, "side", side)
    monkeypatch.setattr(desktop_workers, "measured_hardware", lambda *_, **__: MACHINE)
    monkeypatch.setattr(gather, "measured_hardware", lambda *_, **__: MACHINE)
    monkeypatch.setattr(desktop_workers, "run_on", lambda cpus: None)
    monkeypatch.setattr(gpu_peer, "SWEEP_TOKENS", 2)
    words = "--prompts 20,33 --warm-tokens 4 --timed-tokens 4 --texts 1 --generate 4 --commit c0ffee"
    argv = ["gpu_budgets", str(path), "--llama", str(LLAMA), "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*argv, *words.split()])
    assert gpu_budgets.main() == 0
    written: dict[str, Any] = json.loads(out.read_text())
    assert [(row["budget"], row["side"]) for row in written["rows"]] == [
        ("all", "coldstream"),
        ("all", "llama.cpp"),
    ]
    assert all(list(row["figures"]) == ["decode", "20", "33"] for row in written["rows"])
    monkeypatch.setattr(gpu_budgets, "our_row", lambda *_: pytest.fail("measured again"))
    assert gpu_budgets.main() == 0
    assert json.loads(out.read_text()) == written
    assert capsys.readouterr().out.count("ratio\n") == 1


class Loads:
    """llama.cpp, which takes `base` bytes and a GiB for each of ten layers on the GPU."""

    def __init__(self, base: float) -> None:
        self.base, self.numbers = base, list[int]()

    def row(self, options: object, cpu_layers: int) -> dict[str, Any]:
        self.numbers.append(cpu_layers)
        return {"vram_bytes": int((self.base + 10 - cpu_layers) * GIB), "cpu_layers": cpu_layers}


WEIGHTS = Weights(expert_layer=GIB, others=GIB, layers=10, name="a model")


@pytest.mark.parametrize(("base", "expected"), [(0.5, 3), (2.3, 5), (2.5, 5), (3.2, 6), (5.0, 7)])
def test_the_fewest_layers_that_fit_are_found(
    base: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(base)
    monkeypatch.setattr(gpu_budgets, "their_row", loads.row)
    row = fitting_row(None, WEIGHTS, 8 * GIB)  # type: ignore[arg-type]
    assert row["cpu_layers"] == expected == min(n for n in range(11) if base + 10 - n <= 8)
    assert len(loads.numbers) <= 3


def test_what_never_fits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_budgets, "their_row", Loads(9.0).row)
    with pytest.raises(RuntimeError, match="took more than 8589934592 bytes with"):
        fitting_row(None, WEIGHTS, 8 * GIB)  # type: ignore[arg-type]


def test_without_a_budget_no_layer_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(100)
    monkeypatch.setattr(gpu_budgets, "their_row", loads.row)
    assert fitting_row(None, WEIGHTS, None)["cpu_layers"] == 0  # type: ignore[arg-type]


def test_the_table_has_ours_over_theirs() -> None:
    rows = [
        {"budget": "12G", "side": side, "figures": {"decode": {"tok_s": rate}}}
        for side, rate in (("coldstream", 150.0), ("llama.cpp", 100.0))
    ]
    assert table(rows).splitlines()[1].split() == ["12G", "decode", "150.0", "100.0", "1.50"]
    assert "1.50" not in table(rows[:1])


def test_a_budget_is_a_size_or_all() -> None:
    assert budgets("all,12G") == ["all", "12G"]
    with pytest.raises(ValueError, match="lots"):
        budgets("all,lots")
