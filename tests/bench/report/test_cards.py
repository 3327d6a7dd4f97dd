"""The first tables of performance have each machine's figures, and llama.cpp's, by the share of experts."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import cards, tables

SHARES = {0.0: 3, 0.17: 7, 1.0: 23}  # of experts on the GPU, and GiB that this takes


def hybrid(tok_s: int, shares: list[float], cores: int) -> dict[str, Any]:
    rows = [
        {"experts_share": share, "vram_bytes": SHARES[share] * cards.GIB, "tok_s": tok_s * (1 + share)}
        for share in shares
    ]
    about = {"commit": f"c{cores}", "command": "made up", "machine": {"gpu": "a GPU", "cores": cores}}
    hardware = {"read_bytes_per_s": 1e11, "gpu": {"link_bytes_per_s": cores * 1e9}}
    return {**about, "hardware": hardware, "rows": rows}


def peer(tok_s: int, share: float) -> dict[str, Any]:
    depths = [{"depth": 0, "decode_tok_s": {"median": tok_s}}]
    return {"placements": [{"resident_share": share, "depths": depths}]}


def test_columns_are_matched_by_the_share_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = list(SHARES)
    written = {
        "hybrid_ahead": hybrid(100, shares, 16),
        "desktop_hybrid": hybrid(200, shares[::-1], 6),
        "desktop_hybrid_slow_bus": hybrid(300, shares[1:] + shares[:1], 5),
        "desktop_peer": peer(11, 0.15),
        "desktop_peer_slow_bus": peer(12, 0.99),
        "peer_llama_cpp": {"partial": {"decode_tok_s": {"0": 10}}},
    }
    (tmp_path / "gpu").mkdir()
    for name, result in written.items():
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = cards.cards_decode().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert cells == [
        ["3 GiB", "0%", "**100**", "10", "**200**", "", "**300**", ""],
        ["7 GiB", "17%", "**117**", "", "**234**", "11", "**351**", ""],
        ["23 GiB", "100%", "**200**", "", "**400**", "", "**600**", "12"],
    ]
    assert "6 cores, RAM 100 GB/s, bus 6 GB/s: tok/s" in lines[0]
    assert "commits c16, c6, c5" in lines[-1]


def test_prompts_are_of_the_newest_runs_that_have_them() -> None:
    newest, shared, older = (tables.load(f"gpu/{name}") for name in cards.PROMPT_RESULTS)
    of_gib = {0: newest, 3: shared, 10: older, None: older}
    found = cards.prompts()
    assert found.keys() == {0, 3, 10, None}
    for gib, rates in found.items():
        rows = of_gib[gib]["rows"]
        assert set(cards.PROMPTS) <= rates.keys()
        assert all(rates[row["tokens"]] == row["tok_s"] for row in rows if row["experts_gib"] == gib)
