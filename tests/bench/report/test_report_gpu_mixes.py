"""The tables of mixes on a GPU, from results as the benchmarks write them."""

from typing import Any

import pytest

from bench.report import gpu_mixes as report

GIB = 2**30


def placement(share: float, decode: float, prompts: dict[int, float], used: float = 0.0) -> dict[str, Any]:
    return {
        "resident_share": share,
        "gpu_memory_used_bytes": used * GIB,
        "depths": [{"decode_tok_s": {"median": decode}}],
        "prefill": [{"tokens": n, "tok_s": {"median": rate}} for n, rate in prompts.items()],
    }


def row(share: float, budget: str | None, **measured: float) -> dict[str, Any]:
    figures = {name.strip("_"): {"measured_tok_s": rate, "ratio": 1.25} for name, rate in measured.items()}
    return {"experts_share": share, "budget": budget, "figures": figures}


OURS = {
    "commit": "c0ffee",
    "command": "plan_forecast",
    "machine": {"gpu": "a GPU", "cores": 16},
    "mixes": {
        "Q2_K": {
            "file_bytes": 13.2e9,
            "rows": [
                row(1.0, "auto", decode=500.0, _512=15000.0, _2048=25000.0),
                row(0.2, "2641M", decode=250.0, _512=3000.0, _2048=8000.0),
            ],
        }
    },
}
PEER = {
    "command": "gpu_peer",
    "gpu_memory_before_bytes": 1 * GIB,
    "placements": [
        placement(1.0, 200.0, {512: 3750.0, 2048: 5000.0}, 13),
        placement(0.275, 100.0, {2048: 4000.0}, 8.8),
        placement(0.0, 50.0, {512: 1000.0, 2048: 2000.0}, 4),
    ],
}


def cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Q2_K")]


def test_a_mix_without_a_peer_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"gpu/mixes": OURS}
    monkeypatch.setattr(report, "load", files.__getitem__)
    monkeypatch.setattr(report, "has", files.__contains__)
    assert cells(report.gpu_mixes())[0][4:6] == ["**500**, –", "**15,000**, –"]


def test_each_budget_is_beside_the_nearest_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"gpu/mixes": OURS, "gpu/peer_Q2_K": PEER}
    monkeypatch.setattr(report, "load", files.__getitem__)
    monkeypatch.setattr(report, "has", files.__contains__)
    text = report.gpu_mixes()
    whole, part = cells(text)
    assert whole[:5] == ["Q2_K", "13.2", "auto", "100%", "**500**, 200, 2.5×"]
    assert whole[5:] == ["**15,000**, 3,750, 4.0×", "**25,000**, 5,000, 5.0×", "1.25, 1.25, 1.25"]
    assert part[2:7] == ["2,641 MiB", "20%", "**250**, 100, 2.5×", "**3,000**, –", "**8,000**, 4,000, 2.0×"]
    assert "a GPU, 16 cores, commit c0ffee" in text
    assert "Other commits" not in text


def test_a_mix_of_another_commit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = OURS | {"mixes": {"Q2_K": OURS["mixes"]["Q2_K"] | {"commit": "facade"}}}
    files = {"gpu/mixes": ours}
    monkeypatch.setattr(report, "load", files.__getitem__)
    monkeypatch.setattr(report, "has", files.__contains__)
    assert "Other commits: Q2_K facade." in report.gpu_mixes()


def test_a_budget_is_beside_the_placement_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(0.3, "8G", decode=90.0, _512=900.0, _2048=3000.0)]
    ours = OURS | {"mixes": {"Q2_K": {"file_bytes": 1.0, "rows": rows}}}
    results = {"gpu/desktop_mix": ours, "gpu/desktop_mix_peer": PEER}
    monkeypatch.setattr(report, "load", results.__getitem__)
    (found,) = cells(report.desktop_mix())
    assert found[1:4] == ["8G", "30%, llama.cpp 28%", "**90**, 100, 0.9×"]
    with pytest.raises(ValueError, match="no placement of llama"):
        report.fitting(PEER, 2 * GIB)
