"""The table of answers with drafts beside those without."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coldstream.decoding import Speculation
from tests.audits import draft_equality
from tests.audits.draft_equality import BUDGETS, main
from tests.audits.draft_kinds import DRAFTS


def table(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["draft_equality.py", *words, "--out", str(out)])
    code = main()
    return code, json.loads(out.read_text())


@pytest.mark.sharded(of="measurements")
def test_pairs_of_a_drafter_and_a_size_are_interleaved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, found = table(
        monkeypatch, tmp_path / "out.json", "--prompts", "12", "--pairs", "10", "--tokens", "6"
    )
    assert code == 0
    assert found["answers"] == found["equal"] == 120
    assert {(pair["kind"], pair["budget"]) for pair in found["pairs"]} == {
        (kind, budget) for kind in ("ngram", "mtp", "dflash", *DRAFTS) for budget in BUDGETS
    }
    assert sorted({pair["answers"] for pair in found["pairs"]}) == [1, 2]
    assert all(pair["tokens"] == 6 * pair["answers"] for pair in found["pairs"])
    assert found["command"] == "python -m tests.audits.draft_equality --prompts 12 --pairs 10 --tokens 6"


@pytest.mark.sharded(of="measurements")
def test_trap_broken_rollback_another_answer_is_counted_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def answer(opened: Any, speculation: Speculation | None, prompt: Sequence[int], params: Any) -> Any:
        return (1, 2) if speculation is None or speculation.drafter.name == "ngram" else (1, 3)

    monkeypatch.setattr(draft_equality, "answer", answer)
    code, found = table(monkeypatch, tmp_path / "out.json", "--prompts", "11", "--pairs", "10")
    assert code == 1
    assert (found["answers"], found["equal"]) == (110, len(BUDGETS))
