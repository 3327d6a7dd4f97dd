"""Files of other families for the CPU: what is kept of a model, and a result of one that is small."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf
from bench import full_size_model
from bench.family_models import FAMILIES, Family
from bench.full_size_model import CODE
from bench.peers import family_speed, weight_types
from bench.peers.family_speed import PARTS, Part
from bench.peers.weight_types import Case
from small_shape import SMALL

NAME = "gpt-oss-20b"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family is one with small matrices, and cases are short."""
    family = FAMILIES[NAME]
    shape = replace(SMALL, hidden=544, expert_ffn=288, heads=8)
    monkeypatch.setattr(family_speed, "FAMILIES", {NAME: Family(family.writer, shape, family.mix)})
    monkeypatch.setattr(family_speed, "PARTS", {NAME: Part(layers=2, experts=8)})
    monkeypatch.setattr(family_speed, "VOCAB", 800)
    monkeypatch.setattr(full_size_model, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(weight_types, "CASES", (Case("decode", 3, True, 1), Case("8 rows", 8, False, 2)))


@pytest.mark.sharded(of="measurements")
def test_ours_is_measured_without_peers_too(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speed.json"
    argv = ["family_speed", "--families", NAME, "--threads", "1", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--folder", str(tmp_path), "--out", str(out), "--commit", "c0"])
    assert family_speed.main() == 0
    found: dict[str, Any] = json.loads(out.read_text())["models"][NAME]
    assert (found["layers"], found["experts"], found["mix"]) == (2, 8, "MXFP4")
    for case in found["cases"].values():
        assert len(case["runs"]["ours"]) == 2
        assert case["tok_s"]["ours"] > 0
        assert case["better_peer"] is None
    assert [each.name for each in tmp_path.iterdir()] == ["speed.json"]


def test_tokens_beside_each_other_take_experts_of_their_own(small: None, tmp_path: Path) -> None:
    """Programs feed tokens of different parts of the vocabulary, and all have to read as much."""
    family_speed.write_part(tmp_path / "part.gguf", NAME)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "part.gguf").tensors}
    table = tensors["token_embd.weight"]
    codes = gguf.quants.dequantize(table.data, table.tensor_type)[:, :CODE].astype(np.float64)
    likeness = np.corrcoef(codes[:-1].ravel(), codes[1:].ravel())[0, 1]
    assert abs(likeness) < 0.05
    assert len(codes) == 800


def test_parts_keep_each_kind_of_layer() -> None:
    """Dense ones, those with windows and those with a recurrence among them."""
    assert set(PARTS) <= set(FAMILIES)
    assert all(part.layers >= 4 for part in PARTS.values())
    assert all(part.experts >= 4 * FAMILIES[name].shape.experts_per_token for name, part in PARTS.items())
