"""Where prompts pause for prefixes to be kept."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.prefix.cache import MIN_GAP, choose_cuts

POSITIONS = st.integers(0, 20_000)


@given(POSITIONS, st.integers(1, 20_000), POSITIONS, st.lists(POSITIONS, max_size=40), st.integers(0, 40))
def test_cuts_are_few_inside_and_close_enough(
    start: int, length: int, parting: int, borders: list[int], limit: int
) -> None:
    cuts = choose_cuts(start, length, parting=parting, borders=borders, max_replay=2048, limit=limit)
    assert list(cuts) == sorted(set(cuts))
    assert all(start < cut < length for cut in cuts)
    assert len(cuts) <= limit
    points = [start, *cuts, max(length - 1, start)]
    gaps = [after - before for before, after in pairwise(points)]
    if limit > 2 * 20_000 // 2048 + len(set(borders)) + 3:
        assert max(gaps) <= 2048
        assert gaps[-1] < MIN_GAP
        inside = [border for border in (parting, *borders) if start < border < length]
        assert all(min(abs(border - point) for point in points) < BLOCK_POSITIONS for border in inside)


def test_a_prompt_pauses_where_others_part_from_it_exactly() -> None:
    assert 777 in choose_cuts(0, 1000, parting=777, borders=[], max_replay=2048, limit=8)
    assert choose_cuts(0, 1000, parting=777, borders=[300], max_replay=2048, limit=1) == (777,)


def test_a_prompt_that_is_known_to_its_end_pauses_before_its_last_token() -> None:
    assert choose_cuts(0, 1000, parting=1000, borders=[], max_replay=2048, limit=1) == (999,)
    assert choose_cuts(999, 1000, parting=1000, borders=[], max_replay=2048, limit=8) == ()


def test_the_last_border_goes_before_the_others_if_states_are_few() -> None:
    borders = [100, 400, 500, 900]
    assert choose_cuts(0, 1000, parting=0, borders=borders, max_replay=2048, limit=1) == (900,)
    assert choose_cuts(0, 1000, parting=0, borders=borders, max_replay=2048, limit=2) == (900, 999)
    assert choose_cuts(0, 1000, parting=0, borders=borders, max_replay=2048, limit=3) == (100, 900, 999)
    assert choose_cuts(0, 1000, parting=0, borders=borders, max_replay=2048, limit=9) == (100, 400, 900, 999)


def test_a_prompt_that_comes_once_pauses_for_what_others_share_alone() -> None:
    def cuts(parting: int, borders: list[int], length: int) -> tuple[int, ...]:
        return choose_cuts(
            0, length, parting=parting, borders=borders, max_replay=2048, limit=8, comes_again=False
        )

    assert cuts(0, [], 16_000) == ()
    assert cuts(300, [700], 1000) == (300, 700)


def test_a_border_just_before_the_end_stands_for_the_end() -> None:
    assert choose_cuts(0, 1000, parting=0, borders=[990], max_replay=2048, limit=9) == (990,)


@pytest.mark.parametrize(("limit", "spacing"), [(99, 2048), (6, 4096), (3, 8192)])
def test_long_prompts_pause_at_ends_of_blocks_less_often_if_states_are_few(limit: int, spacing: int) -> None:
    cuts = choose_cuts(0, 16_000, parting=0, borders=[], max_replay=2048, limit=limit)
    assert cuts == (*range(spacing, 15_999, spacing), 15_999)
