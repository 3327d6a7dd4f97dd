"""Where prompts pause for prefixes to be kept."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.prefix.cache import MIN_GAP, choose_checkpoints

POSITIONS = st.integers(0, 20_000)


@given(POSITIONS, st.integers(1, 20_000), POSITIONS, st.lists(POSITIONS, max_size=40), st.integers(0, 40))
def test_checkpoints_are_not_many_and_close_enough(
    start: int, length: int, parting: int, boundaries: list[int], limit: int
) -> None:
    checkpoints = choose_checkpoints(
        start, length, parting=parting, boundaries=boundaries, max_replay=2048, limit=limit
    )
    assert list(checkpoints) == sorted(set(checkpoints))
    assert all(start < checkpoint < length for checkpoint in checkpoints)
    assert len(checkpoints) <= limit
    points = [start, *checkpoints, max(length - 1, start)]
    gaps = [after - before for before, after in pairwise(points)]
    if limit > 2 * 20_000 // 2048 + len(set(boundaries)) + 3:
        assert max(gaps) <= 2048
        assert gaps[-1] < MIN_GAP
        inside = [boundary for boundary in (parting, *boundaries) if start < boundary < length]
        assert all(min(abs(boundary - point) for point in points) < BLOCK_POSITIONS for boundary in inside)


def test_a_prompt_pauses_where_others_part_from_it_exactly() -> None:
    assert 777 in choose_checkpoints(0, 1000, parting=777, boundaries=[], max_replay=2048, limit=8)
    assert choose_checkpoints(0, 1000, parting=777, boundaries=[300], max_replay=2048, limit=1) == (777,)


def test_a_prompt_that_is_known_to_its_end_pauses_before_its_last_token() -> None:
    assert choose_checkpoints(0, 1000, parting=1000, boundaries=[], max_replay=2048, limit=1) == (999,)
    assert choose_checkpoints(999, 1000, parting=1000, boundaries=[], max_replay=2048, limit=8) == ()


def test_the_last_boundary_goes_before_the_others_if_states_are_few() -> None:
    boundaries = [100, 400, 500, 900]
    assert choose_checkpoints(0, 1000, parting=0, boundaries=boundaries, max_replay=2048, limit=1) == (900,)
    assert choose_checkpoints(0, 1000, parting=0, boundaries=boundaries, max_replay=2048, limit=2) == (
        900,
        999,
    )
    assert choose_checkpoints(0, 1000, parting=0, boundaries=boundaries, max_replay=2048, limit=3) == (
        100,
        900,
        999,
    )
    assert choose_checkpoints(0, 1000, parting=0, boundaries=boundaries, max_replay=2048, limit=9) == (
        100,
        400,
        900,
        999,
    )


def test_a_boundary_just_before_the_end_stands_for_the_end() -> None:
    assert choose_checkpoints(0, 1000, parting=0, boundaries=[990], max_replay=2048, limit=9) == (990,)


@pytest.mark.parametrize(("limit", "spacing"), [(99, 2048), (6, 4096), (3, 8192)])
def test_long_prompts_pause_at_ends_of_blocks_less_often_if_states_are_few(limit: int, spacing: int) -> None:
    checkpoints = choose_checkpoints(0, 16_000, parting=0, boundaries=[], max_replay=2048, limit=limit)
    assert checkpoints == (*range(spacing, 15_999, spacing), 15_999)
