"""The comparison of policies: its rows, its windows of text, and what the published figures claim."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine import policy_table
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.placement import RoutedModel, RoutingTrace
from tools.train_demo.data import SourceFile

RESULT = Path(__file__).parents[3] / "docs" / "results" / "policies.json"


def test_every_policy_is_compared_at_every_share() -> None:
    rng = np.random.default_rng(0)
    topk_ids = rng.random((200, 2, 50)).argsort(axis=2)[:, :, :2].astype(np.uint16)
    trace = RoutingTrace(RoutedModel("0" * 32, 2, 50, 2), topk_ids)
    rows = policy_table.compare(trace, trace.counts() / trace.num_steps)
    assert [row["slots"] for row in rows] == [6, 12, 19, 25, 38, 50, 75]
    for row in rows:
        rates, copies = row["hit_rate"], row["copies_per_token"]
        assert set(rates) == set(copies) == {"lru", "lfu", "static", "ours", "ours_4_copies", "belady"}
        assert max(rates.values()) == rates["belady"]
        assert copies["static"] == 0


def test_weights_of_the_outer_layers_are_compared_at_every_share() -> None:
    rng = np.random.default_rng(0)
    topk_ids = rng.random((200, 4, 25)).argsort(axis=2)[:, :, :2].astype(np.uint16)
    trace = RoutingTrace(RoutedModel("0" * 32, 4, 25, 2), topk_ids)
    rows = policy_table.weigh_outer_layers(trace, trace.counts() / trace.num_steps)
    assert [row["share"] for row in rows] == list(policy_table.SHARES)
    for row in rows:
        assert list(row["hit_rate"]) == ["0.5", "1.25", "1.5", "2.0", "4.0"]
        assert len(set(row["hit_rate"].values())) > 1


def test_windows_are_whole_and_evenly_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_table, "WINDOW", 10)
    with GGUFFile.open(demo_model_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    files = [SourceFile("a.py", "import os\n" * 20), SourceFile("b.py", "x = 1\n" * 30)]
    stream = policy_table.even_windows(tokenizer, files, 2)
    end = tokenizer.encode(policy_table.END_OF_TEXT, parse_special=True)
    assert stream[:10] == [*end, *tokenizer.encode(files[0].text)][:10]
    assert stream[10:] == tokenizer.encode(files[1].text)[-10:]


def test_no_published_weight_of_the_outer_layers_holds_more_than_none() -> None:
    result = json.loads(RESULT.read_text())
    for row, weighted in zip(result["rows"], result["outer_layers_weighted"], strict=True):
        assert max(weighted["hit_rate"].values()) < row["hit_rate"]["ours"]


def test_published_ours_is_above_lru_and_below_the_bound_at_every_share() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert [row["share"] for row in rows] == list(policy_table.SHARES)
    for row in rows:
        rates = row["hit_rate"]
        assert rates["lru"] <= rates["ours"] <= rates["belady"]
