"""Files of other families: llama.cpp's clear choices are ours, and a part that is missing shows."""

import json
import sys
from pathlib import Path

import pytest

from bench import full_size_model
from bench.peers import family_agreement
from bench.peers.family_agreement import CASES, measure_family

POSITIONS = 320


@pytest.mark.sharded(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_clear_choices_are_those_of_llama_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size_model, "POOL_BYTES", 8 << 20)
    found = measure_family(name, POSITIONS)
    assert found["clear_positions"] > POSITIONS // 2
    assert found["clear_top1_agreement"] > 0.995
    assert found["logit_distance"] < 0.05 * found["logit_deviation"]
    for row in found["without"]:
        shows = row["clear_top1_agreement"] < 0.99 or row["logit_distance"] > 2 * found["logit_distance"]
        assert shows, row


def test_the_result_names_what_was_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size_model, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(family_agreement, "COMMON", {**family_agreement.COMMON, "layers": 2})
    out = tmp_path / "agreement.json"
    argv = ["family_agreement", "--families", "gpt-oss-20b", "--positions", "16", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert family_agreement.main() == 0
    found = json.loads(out.read_text())["models"]["gpt-oss-20b"]
    assert found["positions"] == 16
    assert found["without"][0]["part"] == "sinks"
