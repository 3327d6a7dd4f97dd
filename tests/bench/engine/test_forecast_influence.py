"""What forecasts depend on: a constant that nothing has to do with changes none, and all are put back."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from bench.engine import forecast_influence
from bench.engine.forecast_influence import CONSTANTS, changed, changed_novelty, influence
from coldstream.placement import cost, prompt_cost


def test_the_larger_change_of_both_ways_counts_by_kind() -> None:
    keys = [("gpu decode", "a", "0", "x"), ("gpu decode", "a", "1", "x"), ("cpu prompts", "b", "0", "9")]
    before = dict(zip(keys, (100.0, 10.0, 50.0), strict=True))
    more = dict(zip(keys, (110.0, 10.0, 50.0), strict=True))
    less = dict(zip(keys, (70.0, 10.0, 50.0), strict=True))
    found = influence(before, [more, less])
    assert found == {
        "gpu decode": {"mean": pytest.approx(0.15), "largest": pytest.approx(0.3)},
        "cpu prompts": {"mean": 0.0, "largest": 0.0},
    }


@pytest.mark.parametrize(("module", "name"), CONSTANTS)
def test_a_constant_is_changed_and_put_back(module: Any, name: str) -> None:
    before = getattr(module, name)
    with changed(module, name, 1.2):
        assert getattr(module, name) == pytest.approx(1.2 * before)
    assert getattr(module, name) == before


@pytest.mark.parametrize("module", [cost, prompt_cost])
def test_what_functions_kept_is_forgotten_with_each_change(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or forecasts of another constant would be those of the one before."""
    kept = lru_cache(lambda: cost.LAYER_LAUNCHES)
    monkeypatch.setattr(module, "kept", kept, raising=False)
    before = kept()
    with changed(cost, "LAYER_LAUNCHES", 2.0):
        assert kept() == 2 * before
    assert kept() == before


def test_each_constant_is_made_larger_and_smaller_and_figures_are_by_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forecast that falls faster than it rises, so that the smaller constant changes it more."""
    seen: list[float] = []

    def again(result: dict[str, Any], headers: object) -> list[dict[str, Any]]:
        ratio = cost.KV_SHARE / 0.25
        seen.append(cost.KV_SHARE)
        figures = {"decode at 0": {"forecast_tok_s": ratio**-2}, "512": {"forecast_tok_s": 5.0}}
        return [{"figures": figures}]

    monkeypatch.setattr(cost, "KV_SHARE", 0.25)
    monkeypatch.setattr(forecast_influence, "CONSTANTS", ((cost, "KV_SHARE"),))
    monkeypatch.setattr(forecast_influence, "again", again)
    paths = []
    for name, machine in (("a", {"gpu": "H200"}), ("b", {"cpu": "EPYC"})):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"machine": machine}))
    out = tmp_path / "influence.json"
    forecast_influence.main([*map(str, paths), "--out", str(out), "--commit", "c0ffee"])
    found = json.loads(out.read_text())["influence"]["KV_SHARE"]
    assert set(found) == {"gpu decode", "gpu prompts", "cpu decode", "cpu prompts"}
    for device in ("gpu", "cpu"):
        assert found[f"{device} decode"]["mean"] == pytest.approx(0.8**-2 - 1)
        assert found[f"{device} prompts"]["largest"] == 0
    assert sorted({round(each, 6) for each in seen}) == [0.2, 0.25, 0.3]


def test_how_alike_tokens_choose_is_changed_and_put_back() -> None:
    before = prompt_cost.expected_touched
    rows = prompt_cost.np.full((1, 4), 5.0)
    with changed_novelty(0.5):
        assert (prompt_cost.expected_touched(rows, 20, 0.8) == before(rows, 20, 0.4)).all()
    assert prompt_cost.expected_touched is before
    assert forecast_influence.CHANGE == 0.2
