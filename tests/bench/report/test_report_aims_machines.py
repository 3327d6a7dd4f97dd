"""The aims of several answers: the worst step from fewer to more, and what eight have over one."""

from typing import Any

import pytest

from bench.report import aims_machines


def placement(totals: dict[int, dict[int, float]]) -> dict[str, Any]:
    """Totals by length of prompts and number of answers, in no order."""
    rows = [
        {"prompt": prompt, "streams": number, "runs_tok_s": [total - 1, total + 1]}
        for prompt, each in totals.items()
        for number, total in reversed(each.items())
    ]
    return {"experts_share": 0.25, "rows": rows}


def test_the_worst_step_counts_of_any_length_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {64: {1: 100.0, 8: 150.0, 32: 300.0}, 512: {1: 100.0, 8: 200.0, 32: 180.0}}
    monkeypatch.setattr(aims_machines, "load", lambda _: {"placements": [placement(totals)]})
    found = [aim.found for aim in aims_machines._answers()]
    assert found == pytest.approx([0.9, 0.9, 1.5, 2.0])
