"""Residents kept and forgotten: the plans of both, what is counted of their texts, and the table."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.engine import planned_residents as bench
from bench.report import residents as report_residents
from bench.report import tables as report_tables
from coldstream.assets import demo_model_path
from coldstream.errors import OutOfMemoryError
from coldstream.placement.run_plan import RunPlan


def test_experts_are_gib_or_a_share() -> None:
    assert bench.bytes_of("3", 16 * 2**30) == 3 * 2**30
    assert bench.bytes_of("12.5%", 800) == 100
    for wrong in ("0", "100%", "16", "-1", "many"):
        with pytest.raises(ValueError, match=r"--experts|could not convert"):
            bench.bytes_of(wrong, 16 * 2**30)


class Placed:
    def __init__(self, resident_bytes: int) -> None:
        self.resident_bytes = resident_bytes


def test_the_budget_is_the_smallest_to_a_mib() -> None:
    fixed, expert = 100 << 20, 3 << 20

    def place(budget: int, uses: object) -> Placed:
        if budget < fixed:
            raise OutOfMemoryError("too little")
        return Placed((budget - fixed) // expert * expert)

    for count in (1, 2, 50):
        budget = bench.smallest_budget(place, count * expert, 0, 1 << 30)  # type: ignore[arg-type]
        assert 0 <= budget - (fixed + count * expert) <= 2**20


def test_walks_are_apart_and_within_the_vocabulary() -> None:
    for count, vocab_size in ((5, 248_320), (9, 32_768), (3, 3000)):
        firsts = bench.first_ids(count, vocab_size)
        assert len(firsts) == count
        assert firsts[0] - bench.PROFILE_TOKENS >= 0
        assert firsts[-1] + bench.TOKENS < vocab_size
        assert min(np.diff(firsts)) >= bench.PROFILE_TOKENS + bench.TOKENS
    with pytest.raises(ValueError, match="too few"):
        bench.first_ids(9, 3000)


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c"]])
def test_every_way_is_first_and_last_as_often_as_any_other(names: list[str]) -> None:
    orders = list(bench.orders(names, 2 * len(names)))
    assert all(sorted(order) == names for order in orders)
    for position in (0, -1):
        assert sorted(order[position] for order in orders) == sorted(2 * names)


@pytest.fixture(scope="module")
def planner() -> bench.Planner:
    return bench.planner(demo_model_path(), "cpu", 2, "25%")


@pytest.fixture(scope="module")
def texts() -> list[bench.Text]:
    return bench.texts_of(demo_model_path(), 2, threads=2)


@pytest.mark.sharded(of="measurements")
def test_a_forgotten_plan_has_the_same_slots(planner: bench.Planner, texts: list[bench.Text]) -> None:
    ways = bench.ways_of(planner, texts[0].profile, "cpu")
    kept, forgotten = ways.values()
    assert list(ways) == ["kept", "forgotten"]
    assert forgotten.placement == kept.placement
    assert kept.loaded == kept.placement.resident
    assert kept.expected_uses is not None
    assert forgotten.expected_uses is None
    assert not any(forgotten.loaded)
    assert 0 <= planner.experts_bytes - planner.all_expert_bytes // 4 <= 2**20
    assert planner.experts_bytes == planner.plan(None).placement.resident_bytes


def test_a_gpu_has_a_plan_without_a_profile_besides(planner: bench.Planner, texts: list[bench.Text]) -> None:
    ways = bench.ways_of(planner, texts[0].profile, "cuda")
    assert tuple(ways) == bench.WAYS
    assert ways["unprofiled"].uses is None
    assert ways["unprofiled"].placement.resident != ways["kept"].placement.resident


@pytest.mark.sharded(of="measurements")
def test_residents_are_hits_from_the_first_token(
    planner: bench.Planner, texts: list[bench.Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "TOKENS", 10)
    repeats = bench.measure(demo_model_path(), "cpu", planner, texts)
    assert [each["order"] for each in repeats] == [["kept", "forgotten"], ["forgotten", "kept"]]
    kept, forgotten = bench.summary(repeats)
    assert kept["first_hit_rate"] > forgotten["first_hit_rate"]
    for each in repeats:
        for way in each["ways"].values():
            assert sum(way["first_uses"]) == 8 * 8 * 4  # tokens, layers, experts of each
            assert sum(way["uses"]) == 10 * 8 * 4


@pytest.mark.sharded(of="measurements")
def test_ways_that_choose_other_tokens_end_the_run(
    planner: bench.Planner, texts: list[bench.Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(path: Path, device: str, run: RunPlan, token_ids: object) -> dict[str, object]:
        return {"tok_s": 1.0, "chosen": [run.uses is None]}

    monkeypatch.setattr(bench, "decode", decode)
    with pytest.raises(RuntimeError, match="different tokens"):
        bench.measure(demo_model_path(), "cpu", planner, texts[:1])


def way(tok_s: float, hits: int, misses: int) -> dict[str, object]:
    return {"tok_s": tok_s, "first_uses": [hits // 10, misses // 10], "uses": [hits, misses]}


def test_rates_are_of_all_texts_and_ratios_of_each() -> None:
    repeats = [
        {"ways": {"forgotten": way(100, 100, 300), "kept": way(150, 300, 100)}},
        {"ways": {"kept": way(300, 500, 100), "forgotten": way(300, 100, 500)}},
    ]
    kept, forgotten = bench.summary(repeats)
    assert (kept["way"], kept["hit_rate"], kept["tok_s"]) == ("kept", 0.8, 225)
    assert (forgotten["first_hit_rate"], forgotten["tok_s"]) == (0.2, 200)
    assert forgotten["kept_ratios"] == [1.0, 1.5]


def test_the_table_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    assert report_residents.planned_residents() == ""
    row = {"way": "kept", "first_hit_rate": 0.5, "hit_rate": 0.6, "tok_s": 300.4, "kept_ratios": [1.0]}
    other = {**row, "way": "forgotten", "hit_rate": 0.4, "kept_ratios": [0.9, 1.1, 1.25]}
    result = {
        "rows": [row, other],
        "device": "cuda",
        "machine": {"cpu": "a CPU", "gpu": "a GPU"},
        "model": "full.gguf",
        "experts_bytes": 3 * 2**30,
        "experts_share": 0.17,
        "texts": 3,
        "tokens": 64,
        "first_tokens": 8,
        "profile_tokens": 2560,
        "threads": 15,
        "commit": "abc",
        "command": "python -m bench.engine.planned_residents full.gguf",
    }
    (tmp_path / "gpu" / "planned_residents.json").write_text(json.dumps(result))
    lines = report_residents.planned_residents().splitlines()
    assert lines[2] == "| a GPU, 3,072 MiB (17%) | with the plan's residents | 50.0% | 60.0% | 300 |  |"
    assert lines[3].endswith(
        "| with them, and nothing is expected | 50.0% | 40.0% | 300 | 1.10 (0.90–1.25) |"
    )
    assert lines[-1].startswith(
        "full.gguf, 3 texts, a profile of 2,560 tokens; a GPU, 15 threads, commit abc"
    )
    cpu = {**result, "device": "cpu", "machine": {"cpu": "a CPU"}, "experts_bytes": 2**23}
    (tmp_path / "planned_residents.json").write_text(json.dumps(cpu))
    lines = report_residents.planned_residents().splitlines()
    assert lines[3].startswith("| RAM, 8 MiB (17%) | empty |")
    assert len([line for line in lines if line.startswith("| a GPU")]) == 2
