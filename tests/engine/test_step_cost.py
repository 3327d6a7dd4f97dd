"""How many rows of prompts fit into a step, from what steps took: no clock, no model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.step_cost import StepCost

NUM_ROWS = 512


def settled(seconds_of_row: float, constant_s: float, num_decoding: int, target_s: float) -> list[float]:
    """The seconds of 200 steps on a machine where a step takes `constant_s` and so much for each row."""
    cost, taken = StepCost(NUM_ROWS), []
    for _ in range(200):
        rows = min(NUM_ROWS, num_decoding + cost.most_prompt_rows(num_decoding, target_s))
        seconds = constant_s + rows * seconds_of_row
        cost.record(rows, seconds)
        taken.append(seconds)
    return taken


@given(st.floats(1e-5, 1e-3), st.floats(0, 0.01), st.integers(1, 64))
def test_steps_keep_to_the_target_and_use_it(row_s: float, constant_s: float, num_decoding: int) -> None:
    target_s = 0.1
    taken = settled(row_s, constant_s, num_decoding, target_s)
    assert max(taken) <= max(target_s, 2.5 * (constant_s + num_decoding * row_s))
    assert taken[-1] >= min(0.4 * target_s, constant_s + NUM_ROWS * row_s)


def test_prompts_get_on_where_decoding_alone_misses_the_target() -> None:
    taken = settled(0.01, 0.1, num_decoding=4, target_s=0.05)
    assert 0.15 < taken[-1] <= 2 * 0.14 + 1e-9


def test_a_slow_step_changes_nothing_but_slow_ones_do() -> None:
    cost = StepCost(NUM_ROWS)
    for _ in range(9):
        cost.record(64, 0.01)
    before = cost.most_prompt_rows(1, 0.05)
    cost.record(64, 5.0)
    assert cost.most_prompt_rows(1, 0.05) == before > 64
    for _ in range(9):
        cost.record(64, 5.0)
    assert cost.most_prompt_rows(1, 0.05) < 8


def test_what_was_slow_long_ago_is_tried_again() -> None:
    cost = StepCost(NUM_ROWS)
    for _ in range(9):
        cost.record(64, 5.0)
        cost.record(1, 0.001)
    assert cost.most_prompt_rows(1, 0.05) < 8
    for _ in range(1024):
        cost.record(48, 0.001)
    assert cost.most_prompt_rows(1, 0.05) >= 63


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 512, 8192])
def test_every_number_of_rows_is_in_a_range(num_rows: int) -> None:
    cost = StepCost(num_rows)
    for rows in range(1, num_rows + 1):
        cost.record(rows, 0.001)
    assert 1 <= cost.most_prompt_rows(1, 1e9) <= max(16, num_rows)
