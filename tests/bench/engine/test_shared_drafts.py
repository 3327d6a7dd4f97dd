"""Drafts for answers that share steps: a small run."""

import json
import sys
from pathlib import Path

import pytest

from bench.engine import shared_drafts


@pytest.mark.sharded(of="measurements")
def test_each_number_of_answers_has_a_ratio_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    words = "--lists 2 --tokens 12 --counts 1 3 --drafters ngram mtp --threads 1 --out"
    monkeypatch.setattr(sys, "argv", ["shared_drafts.py", *words.split(), str(out)])
    monkeypatch.setattr(shared_drafts, "KINDS", ("numbers",))
    prompts = [f"x{i} = [{', '.join(map(str, range(i, i + 30)))}" for i in range(3)]
    monkeypatch.setattr(shared_drafts, "texts", lambda count: {"numbers": prompts[:count]})
    assert shared_drafts.main() == 0
    result = json.loads(out.read_text())
    assert [each["answers"] for each in result["results"]] == [1, 3]
    for each in result["results"]:
        assert each["tok_s"] > 0
        ways = {(way["drafter"], way["budget"]): way for way in each["ways"]}
        assert ways.keys() == {(name, size) for name in ("ngram", "mtp") for size in (1, 3, "auto")}
        assert all(way["ratio"] > 0 for way in ways.values())
        assert ways["mtp", 3]["nodes_per_step"] > ways["mtp", 1]["nodes_per_step"] > 0
        assert ways["mtp", 3]["tokens_per_step"] > 1.2
