"""How many rows of prompts fit into a step, from what steps took: no clock, no model."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.engine.scheduler import QUANTUM
from coldstream.engine.step_cost import StepCost

NUM_ROWS = 512
PROMPT_ROWS = 8192  # rows of a prompt


def settled(seconds_of_row: float, constant_s: float, num_decoding: int, target_s: float) -> list[float]:
    """The seconds of 200 steps on a machine where a step takes `constant_s` and so much for each row. Others
    decode already.
    """
    cost, taken = StepCost(NUM_ROWS), []
    for _ in range(2):
        cost.record(num_decoding, constant_s + num_decoding * seconds_of_row)
    for _ in range(200):
        rows = min(NUM_ROWS, num_decoding + cost.most_prompt_rows(num_decoding, [PROMPT_ROWS], target_s))
        seconds = constant_s + rows * seconds_of_row
        cost.record(rows, seconds)
        taken.append(seconds)
    return taken


@given(st.floats(1e-5, 1e-3), st.floats(0, 0.01), st.integers(1, 64))
def test_steps_keep_to_the_target_and_use_it(row_s: float, constant_s: float, num_decoding: int) -> None:
    """But for four that show what more rows cost, at most."""
    target_s = 0.1
    taken = settled(row_s, constant_s, num_decoding, target_s)
    assert sorted(taken)[-5] <= max(target_s, 2.5 * (constant_s + num_decoding * row_s))
    assert max(taken) <= 20 * target_s
    assert taken[-1] >= min(0.4 * target_s, constant_s + NUM_ROWS * row_s)


def test_prompts_get_on_where_decoding_alone_misses_the_target() -> None:
    taken = settled(0.01, 0.1, num_decoding=4, target_s=0.05)
    assert 0.15 < taken[-1] <= 2 * 0.14 + 1e-9


def streamed_s(rows: int) -> float:
    """Of a step where experts are missing: each small step reads some of them, each large one all."""
    return 0.004 + 0.25 * (1 - math.exp(-rows / 100)) + 4e-5 * rows


def served(
    seconds_of: Callable[[int], float], prompts: list[int], num_decoding: int, most_rows: Callable[..., int]
) -> tuple[float, list[float], list[float]]:
    """Prompts that come while others decode, first come first served: until when they take, their ends, and
    the seconds of the steps."""
    left, now, ends, taken = list(prompts), 0.0, [], []
    while left:
        rows = min(sum(left), NUM_ROWS - num_decoding, most_rows(num_decoding, left))
        taken.append(seconds_of(num_decoding + rows))
        now += taken[-1]
        while left and rows >= left[0]:
            rows -= left.pop(0)
            ends.append(now)
        if rows:
            left[0] -= rows
    return now, ends, taken


def learned(seconds_of: Callable[[int], float]) -> StepCost:
    """What decoding and prompts alone have shown."""
    cost = StepCost(NUM_ROWS)
    for rows in (1, 2, 4, 8, 16, 32, 48, 64, NUM_ROWS):
        for _ in range(9):
            cost.record(rows, seconds_of(rows))
    return cost


@pytest.mark.parametrize("num_decoding", [1, 4, 16])
@pytest.mark.parametrize("prompts", [[400], [500] * 8, [100] * 6, [5000]])
def test_prompts_take_longer_steps_where_every_step_reads_all_experts(
    num_decoding: int, prompts: list[int]
) -> None:
    """Those that decode and those that wait are both served sooner."""
    cost, target_s = learned(streamed_s), 0.05

    def most(num_decoding: int, wanted: list[int]) -> int:
        return cost.most_prompt_rows(num_decoding, wanted, target_s)

    fits = max(r for r in range(1, NUM_ROWS) if streamed_s(r) <= max(0.05, 2 * streamed_s(num_decoding)))
    until, ends, taken = served(streamed_s, prompts, num_decoding, most)
    short_until, short_ends, short_taken = served(
        streamed_s, prompts, num_decoding, lambda *_: max(1, fits - num_decoding)
    )
    assert max(taken) <= 20 * target_s
    stalled = until - len(taken) * streamed_s(num_decoding)
    assert sum(ends) < 0.7 * sum(short_ends)
    assert stalled < short_until - len(short_taken) * streamed_s(num_decoding)


def of_missing(num_experts: int, num_chosen: int, whole_s: float) -> Callable[[int], float]:
    """The seconds of a step that reads each expert that any row chooses; whole_s: all of them."""
    kept = 1 - num_chosen / num_experts
    return lambda rows: 0.002 + whole_s * (1 - kept**rows) + 4e-5 * rows


@given(
    st.sampled_from([(64, 8), (128, 8), (256, 8), (512, 10)]),
    st.floats(0.05, 0.5),
    st.integers(1, 16),
    st.booleans(),
)
def test_what_long_steps_cost_is_found_where_experts_are_missing(
    shape: tuple[int, int], whole_s: float, num_decoding: int, has_first: bool
) -> None:
    """Even if the first steps are short, and even if the first long one is the only one of its kind."""
    seconds_of, cost, prompts = of_missing(*shape, whole_s), StepCost(NUM_ROWS), [2000] * 4
    if has_first:
        cost.record(NUM_ROWS, 1.5 * seconds_of(NUM_ROWS))
    for _ in range(20):
        cost.record(num_decoding, seconds_of(num_decoding))

    def most(num_decoding: int, wanted: list[int]) -> int:
        return cost.most_prompt_rows(num_decoding, wanted, 0.05)

    def recorded(rows: int) -> float:
        cost.record(rows, seconds_of(rows))
        return seconds_of(rows)

    until, _, taken = served(recorded, prompts, num_decoding, most)
    best, _, _ = served(seconds_of, prompts, num_decoding, lambda *_: NUM_ROWS - num_decoding)
    assert until < 2.2 * best + 10 * 0.05
    assert max(taken) <= 20 * 0.05


def test_a_long_step_is_tried_twice_where_rows_cost_the_same_in_any() -> None:
    """And only while prompts wait for long."""
    cost, target_s, tried = StepCost(NUM_ROWS), 0.05, []
    for wanted in (100, 5000):
        taken = []
        for _ in range(500):
            rows = 1 + cost.most_prompt_rows(1, [wanted], target_s)
            cost.record(rows, 0.002 * rows)
            taken.append(rows)
        tried.append(sum(0.002 * rows > target_s for rows in taken))
    assert tried == [0, 2]


def test_a_step_is_never_longer_than_twenty_targets() -> None:
    cost = learned(lambda rows: 10 * streamed_s(rows))
    rows = cost.most_prompt_rows(4, [5000], 0.05)
    assert 10 * streamed_s(4 + rows) <= 1.5 * 20 * 0.05, "as far as a straight line tells it"
    for _ in range(50):
        rows = cost.most_prompt_rows(4, [5000], 0.05)
        cost.record(4 + rows, 10 * streamed_s(4 + rows))
    assert 10 * streamed_s(4 + rows) <= 20 * 0.05


@given(st.floats(1e-5, 1e-3), st.floats(0, 0.005), st.lists(st.integers(2, 9000), min_size=1, max_size=9))
def test_the_target_holds_where_rows_cost_the_same_in_any_step(
    row_s: float, constant_s: float, prompts: list[int]
) -> None:
    cost = learned(lambda rows: constant_s + row_s * rows)
    for num_decoding in (4, 16):
        rows = cost.most_prompt_rows(num_decoding, prompts, 0.05)
        decoding_s = constant_s + row_s * num_decoding
        assert constant_s + row_s * (num_decoding + rows) <= max(0.05, 2 * decoding_s) + 1e-9 or rows == 1


def cost_ranges() -> list[int]:
    """Of at least 16 rows."""
    return [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, NUM_ROWS]


def settled_alone(cost: StepCost, seconds_of: Callable[[int], float], target_s: float) -> list[int]:
    """The rows of 50 steps of a long prompt that is alone."""
    taken = []
    for _ in range(50):
        taken.append(cost.prompt_rows_alone(target_s))
        cost.record(taken[-1], seconds_of(taken[-1]))
    return taken


@given(st.floats(1e-5, 1e-2), st.floats(0, 0.1), st.floats(1e-3, 1.0))
def test_prompts_alone_take_short_steps_where_these_cost_little(
    row_s: float, constant_s: float, target_s: float
) -> None:
    """Where a step takes `constant_s` and so much for each row."""

    def seconds(rows: int) -> float:
        return constant_s + rows * row_s

    taken = settled_alone(StepCost(NUM_ROWS), seconds, target_s)
    assert taken[0] == NUM_ROWS
    # Where steps above the target are expensive, those within it may yet be worth it: that is one leap.
    assert sum(fewer < rows // 2 for rows, fewer in itertools.pairwise(taken)) <= 1, "in small steps"

    def more_expensive(rows: int) -> float:
        return seconds(rows) / max(1, rows) * NUM_ROWS / seconds(NUM_ROWS) - 1

    settled = taken[-1]
    assert more_expensive(settled) <= (0.301 if seconds(settled) <= target_s else 0.151)
    is_least = more_expensive(settled // 2) > 0.149
    assert is_least or seconds(settled) < 0.7 * target_s or settled == 1


@pytest.mark.parametrize(("whole_s", "settled"), [(0.07, 256), (0.3, NUM_ROWS)])
def test_a_row_may_cost_a_quarter_more_only_where_the_step_keeps_to_the_target(
    whole_s: float, settled: int
) -> None:
    """Half the rows take three fifths of the time: 0.042 s of 0.05, or 0.18."""

    def seconds(rows: int) -> float:
        return whole_s * (0.2 + 0.8 * rows / NUM_ROWS)

    assert settled_alone(StepCost(NUM_ROWS), seconds, 0.05)[-1] in (settled, settled * 3 // 4)


def test_prompts_alone_take_whole_steps_where_fewer_rows_take_as_long() -> None:
    """As where the bytes of all experts are moved for any number of rows."""
    taken = settled_alone(StepCost(NUM_ROWS), lambda rows: 0.4, 0.05)
    assert taken.count(NUM_ROWS) >= len(taken) - 2
    assert min(taken) >= NUM_ROWS // 2


def test_what_fewer_rows_cost_is_learned_from_steps_that_had_them() -> None:
    cost = StepCost(NUM_ROWS)
    for _ in range(3):
        cost.record(128, 0.3)
    assert cost.prompt_rows_alone(0.05) == NUM_ROWS, "what all rows cost is not known"
    for _ in range(3):
        cost.record(NUM_ROWS, 0.4)
    assert cost.prompt_rows_alone(0.05) == NUM_ROWS
    for _ in range(9):
        cost.record(384, 0.3)
    assert cost.prompt_rows_alone(0.05) == 384


def test_a_first_step_that_pays_for_other_things_shortens_no_steps_of_prompts_alone() -> None:
    cost = StepCost(NUM_ROWS)
    cost.record(NUM_ROWS, 10.0)
    cost.record(NUM_ROWS // 2, 1.0)
    cost.record(NUM_ROWS // 2, 1.0)
    assert cost.prompt_rows_alone(0.05) == NUM_ROWS
    assert cost.prompt_rows_together(0, [300, 300], NUM_ROWS, 0.05) == NUM_ROWS


def test_rows_that_were_expensive_in_a_bad_moment_do_not_keep_steps_long() -> None:
    cost = StepCost(NUM_ROWS)
    settled_alone(cost, lambda rows: 0.001 * rows, 0.05)
    for _ in range(9):
        cost.record(256, 2.0)
    assert cost.prompt_rows_alone(0.05) < 64


def test_decoding_does_not_make_it_forget_what_prompts_cost() -> None:
    cost = StepCost(NUM_ROWS)
    settled = settled_alone(cost, lambda rows: 0.001 * rows, 0.05)[-1]
    for _ in range(5000):
        cost.record(1, 0.001)
    assert cost.prompt_rows_alone(0.05) == settled < 64


def test_a_slow_step_changes_nothing_but_slow_ones_do() -> None:
    cost = StepCost(NUM_ROWS)
    for _ in range(9):
        cost.record(64, 0.01)
    before = cost.most_prompt_rows(1, [PROMPT_ROWS], 0.05)
    cost.record(64, 5.0)
    assert cost.most_prompt_rows(1, [PROMPT_ROWS], 0.05) == before > 64
    for _ in range(9):
        cost.record(64, 5.0)
    assert cost.most_prompt_rows(1, [PROMPT_ROWS], 0.05) < 8


def test_what_was_slow_long_ago_is_tried_again() -> None:
    cost = StepCost(NUM_ROWS)
    for _ in range(9):
        cost.record(64, 5.0)
        cost.record(1, 0.001)
    assert cost.most_prompt_rows(1, [PROMPT_ROWS], 0.05) < 8
    for _ in range(1024):
        cost.record(48, 0.001)
    assert cost.most_prompt_rows(1, [PROMPT_ROWS], 0.05) >= 63


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 512, 8192])
def test_every_number_of_rows_is_in_a_range(num_rows: int) -> None:
    cost = StepCost(num_rows)
    for rows in range(1, num_rows + 1):
        cost.record(rows, 0.001)
    assert 1 <= cost.most_prompt_rows(1, [PROMPT_ROWS], 1e9) <= max(16, num_rows)


def test_a_short_prompt_goes_on_nearly_alone_beside_long_ones() -> None:
    cost = learned(lambda rows: 0.0001 * rows)
    assert cost.prompt_rows_together(0, [2000, 100, 700], NUM_ROWS, 0.05) == 100 + 2 * QUANTUM
    assert cost.prompt_rows_together(0, [2000, 400], NUM_ROWS, 0.05) == NUM_ROWS, "little would be won"
    assert cost.prompt_rows_together(0, [100], NUM_ROWS, 0.05) == 100, "there is no other"


@given(st.integers(0, 3), st.lists(st.integers(2, 3000), min_size=1, max_size=6), st.integers(1, NUM_ROWS))
def test_several_prompts_have_no_more_rows_than_one_alone(
    num_last: int, wanted: list[int], most: int
) -> None:
    """So one that comes meanwhile waits as little, unless the shortest of them is done by that."""
    shortest = min(wanted) + QUANTUM * (len(wanted) - 1)
    for cost in (learned(lambda rows: 0.0001 * rows), learned(streamed_s), StepCost(NUM_ROWS)):
        rows = cost.prompt_rows_together(num_last, wanted, most, 0.05)
        assert 1 <= rows <= min(most, sum(wanted)) or (rows == shortest and not num_last)


def test_where_all_rows_take_about_as_long_no_prompt_waits_for_a_short_one() -> None:
    cost = learned(streamed_s)
    assert cost.prompt_rows_together(0, [2000, 100], NUM_ROWS, 0.05) == NUM_ROWS


@pytest.mark.parametrize("num_last", [1, 3])
def test_a_step_with_a_prompts_last_row_is_short(num_last: int) -> None:
    """Its first token comes with that step."""
    cost = learned(lambda rows: 0.0001 * rows)
    rows = cost.prompt_rows_together(num_last, [2000, 100], NUM_ROWS, 0.05)
    assert 0.006 < 0.0001 * (rows + num_last) <= 0.05 / 6
    assert learned(lambda rows: 0.1).prompt_rows_together(num_last, [2000], NUM_ROWS, 0.05) == 1
    assert StepCost(NUM_ROWS).prompt_rows_together(num_last, [2000], NUM_ROWS, 0.05) == NUM_ROWS, (
        "nothing is known"
    )


@pytest.mark.parametrize("stale", [64, 1024])
def test_what_was_expensive_in_a_bad_moment_is_tried_again_once_it_is_stale(stale: int) -> None:
    cost = StepCost(NUM_ROWS, stale=stale)
    for rows in cost_ranges():
        for _ in range(9):
            cost.record(rows, 0.0004 * rows if rows < NUM_ROWS else 0.0001 * rows)
    taken = [rows for _ in range(5) for rows in settled_alone(cost, lambda rows: 0.0001 * rows, 0.05)]
    assert set(taken[:50]) == {NUM_ROWS} if stale > 64 else min(taken[:50]) < NUM_ROWS
    assert (min(taken) < 384) == (stale == 64)


def test_what_is_expensive_takes_few_steps_to_know_it_again() -> None:
    cost = StepCost(NUM_ROWS, stale=64)
    taken = [rows for _ in range(20) for rows in settled_alone(cost, lambda rows: 0.4, 0.05)]
    assert taken.count(NUM_ROWS) > 0.7 * len(taken)


def test_longer_steps_than_those_that_are_cheap_are_not_tried_again() -> None:
    cost = StepCost(NUM_ROWS, stale=64)
    settled_alone(cost, lambda rows: 0.0001 * rows, 0.05)
    for _ in range(9):
        cost.record(384, 5.0)
    taken = [rows for _ in range(4) for rows in settled_alone(cost, lambda rows: 0.0001 * rows, 0.05)]
    assert 384 not in taken
