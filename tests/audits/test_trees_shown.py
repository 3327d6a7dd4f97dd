"""Draft trees beside plain decoding: what is compared, what a difference says, and the table of both."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from one_sequence import open_cpu
from runner_cases import VARIANTS
from tree_cases import CONTEXT, Compared, Difference, first_difference

from bench.report import tables as report_tables
from bench.report import tests as report_tests
from tests.audits import draft_trees


def test_a_difference_is_one_of_bits() -> None:
    expected = np.array([[1.0, 2.0], [0.0, 3.0], [4.0, 5.0]], np.float32)
    assert first_difference(expected.copy(), expected) is None
    for value in (-0.0, np.nextafter(np.float32(0.0), np.float32(1.0))):
        actual = expected.copy()
        actual[1, 0] = value
        assert first_difference(actual, expected) == 1
    actual[2, 1] = expected[2, 1] = np.nan  # the same bits on both sides, and no logit
    actual[1, 0] = 0.0
    assert first_difference(actual, expected) == 2


def test_the_cases_are_all_kinds_of_models_wherever_experts_can_be() -> None:
    cases = draft_trees.cpu_cases(threads=2)
    by_place = {
        place: [case.model.name for case in cases if case.place == place]
        for place in (draft_trees.RESIDENT["cpu"], draft_trees.ON_DISK)
    }
    resident, on_disk = by_place.values()
    assert resident == [draft_trees.DEMO, *VARIANTS]
    assert set(resident) - set(on_disk) == {"dense-tied"}
    places = {case.place for case in draft_trees.cuda_cases() if case.model.name == draft_trees.DEMO}
    assert places == {draft_trees.RESIDENT["cuda"], *draft_trees.STREAMED}


def test_all_cases_together_have_as_many_trees_as_were_asked_for() -> None:
    per_step = draft_trees.TREES_PER_STEP
    for num_trees, num_cases in ((500, 23), (500, 11), (500, 100), (1, 1)):
        batches = draft_trees.batches_of(num_trees, num_cases)
        assert (batches - 1) * num_cases * per_step < num_trees <= batches * num_cases * per_step


def small_case(monkeypatch: pytest.MonkeyPatch) -> draft_trees.Case:
    """A case whose experts come from the disk, and little work in each."""
    monkeypatch.setattr(draft_trees, "NEXT_TOKENS", 3)
    monkeypatch.setattr(draft_trees, "SEQUENCES", 4)
    cases = draft_trees.cpu_cases(threads=2)
    return next(case for case in cases if (case.model.name, case.place) == ("qwen3moe", draft_trees.ON_DISK))


@pytest.mark.sharded(of="measurements")
def test_what_was_compared_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = draft_trees.run([small_case(monkeypatch)], 1, seed=3)
    assert (row["trees"], row["sequences"]) == (5, 4)
    assert row["next_tokens"] == (5 + 2 + 4) * 3
    assert row["logits"] == (row["rows"] + row["next_tokens"]) * 320


@pytest.mark.sharded(of="measurements")
def test_a_model_that_is_another_one_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_with_a_window(path: Path, model: draft_trees.Model) -> object:
        return open_cpu(
            path,
            threads=2,
            context_length=CONTEXT,
            cache_size=draft_trees.SIZE,
            kv_type=model.kv_type,
            attention_window=2,
        )

    case = replace(small_case(monkeypatch), open=open_with_a_window)
    with pytest.raises(Difference) as caught:
        draft_trees.run([case], 1, seed=3)
    message = str(caught.value)
    assert message.startswith(
        f"seed '3 qwen3moe {draft_trees.ON_DISK} 0', qwen3moe, {draft_trees.ON_DISK}: row "
    )
    assert "Tree(token_ids=" in message
    monkeypatch.setattr(draft_trees, "cpu_cases", lambda threads: [case])
    monkeypatch.setattr("sys.argv", ["draft_trees.py", "--trees", "1"])
    assert draft_trees.main() == 1


def test_counts_add_up() -> None:
    compared = Compared(1, 2, 3, 4)
    compared.add(Compared(10, 20, 30, 40))
    assert compared == Compared(11, 22, 33, 44)


def test_the_table_has_a_row_for_each_place_of_each_device_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    assert report_tests.draft_trees() == ""
    row = {"model": "a", "place": "all in RAM", "trees": 5, "rows": 600, "next_tokens": 7, "sequences": 32}
    row["logits"] = 1000
    command = "python -m tests.audits.draft_trees"
    rest = {"differences": 0, "wall_s": 61.2, "commit": "abc", "command": command}
    cpu = {
        "rows": [row, {**row, "model": "b"}, {**row, "place": "disk"}],
        "machine": {"cpu": "a CPU"},
        **rest,
    }
    (tmp_path / "trees_cpu.json").write_text(json.dumps(cpu))
    lines = report_tests.draft_trees().splitlines()
    assert lines[2] == "| CPU | all in RAM | 2 | 10 | 1,200 | 14 | 64 | 2,000 |"
    assert lines[3] == "| CPU | disk | 1 | 5 | 600 | 7 | 32 | 1,000 |"
    assert lines[-1] == f"a CPU, 15 trees, 0 differences, 61 s, commit abc: `{command}`"
    gpu = {"rows": [{**row, "place": "over the bus"}], "machine": {"cpu": "a CPU", "gpu": "a GPU"}, **rest}
    (tmp_path / "gpu" / "trees.json").write_text(json.dumps(gpu))
    lines = report_tests.draft_trees().splitlines()
    assert lines[4] == "| GPU | over the bus | 1 | 5 | 600 | 7 | 32 | 1,000 |"
    assert lines[-1].startswith("a GPU, 5 trees")
