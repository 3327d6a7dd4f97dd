"""What forecasts depend on: a constant that nothing has to do with changes none, and all are put back."""

from typing import Any

import pytest

from bench.engine import forecast_influence
from bench.engine.forecast_influence import CONSTANTS, changed, changed_novelty, influence
from coldstream.placement import prompt_cost


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


def test_how_alike_tokens_choose_is_changed_and_put_back() -> None:
    before = prompt_cost.expected_touched
    rows = prompt_cost.np.full((1, 4), 5.0)
    with changed_novelty(0.5):
        assert (prompt_cost.expected_touched(rows, 20, 0.8) == before(rows, 20, 0.4)).all()
    assert prompt_cost.expected_touched is before
    assert forecast_influence.CHANGE == 0.2
