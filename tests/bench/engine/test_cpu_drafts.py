"""The bench of drafts on a CPU, with a small model."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine import cpu_drafts
from bench.engine.cpu_drafts import SHALLOW, Case, SizesByCpuTime
from bench.engine.stated_drafts import ACCEPTED, FIRST_ID, Acceptance
from coldstream.decoding import SizesByCost

SMALL = replace(
    SHALLOW["layers-4"], hidden=512, expert_ffn=256, heads=4, head_dim=64, key_heads=2, value_heads=4,
    state_dim=64, vocab=FIRST_ID + 1024,
)  # fmt: skip


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize(("name", "by_cost"), [("small", SizesByCost), ("small-wrong", SizesByCpuTime)])
def test_all_ways_give_the_same_text_and_are_compared_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_cost: type[SizesByCost]
) -> None:
    monkeypatch.setitem(cpu_drafts.SHALLOW, "small", SMALL)
    case = Case(name, tmp_path, 2, 96)
    found = case.measure([2], threads=1, by_cost=by_cost)
    none, fixed, by_cost, again = found["ways"]
    assert [way["budget"] for way in found["ways"]] == [0, 2, "auto", 0]
    assert fixed["nodes_per_step"] == pytest.approx(2, rel=0.1)
    right = [case.acceptance.right_depths(at) for at in range(2000)] if case.acceptance else []
    expected = 1 + sum(min(2, each) for each in right) / len(right)
    assert fixed["tokens_per_step"] == pytest.approx(expected, rel=0.2)
    assert by_cost["draft_ms"] > 0
    assert all(len(way[f"{kind}_ratios"]) == 2 for way in found["ways"] for kind in ("wall", "cpu"))
    # Twice the same: of each text one is above its mean and the other one below it.
    pairs = zip(none["cpu_ratios"], again["cpu_ratios"], strict=True)
    assert all(1 / one + 1 / other == pytest.approx(2) for one, other in pairs)


def test_a_model_is_accepted_as_published_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_drafts.SHALLOW, "small", SMALL)
    stated, wrong = (Case(name, tmp_path, 1, 32).acceptance for name in ("small", "small-wrong"))
    assert (stated, wrong) == (Acceptance(ACCEPTED["mtp"]), Acceptance((0.0,)))
