"""Pairwise cases: every pair of values meets, in few cases."""

from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from all_pairs import all_pairs, rows


@given(st.lists(st.integers(1, 7), min_size=2, max_size=5))
def test_every_two_values_meet_and_no_case_is_needless(sizes: list[int]) -> None:
    found = list(rows(sizes))
    assert all(0 <= value < size for row in found for value, size in zip(row, sizes, strict=True))
    for (i, one), (j, other) in combinations(enumerate(sizes), 2):
        assert {(row[i], row[j]) for row in found} == {(a, b) for a in range(one) for b in range(other)}
    largest = sorted(sizes)[-2:]
    assert prod(largest) <= len(found) <= min(prod(sizes), 2 * prod(largest))
    assert len(set(found)) == len(found)


def test_three_parameters_take_as_many_cases_as_the_two_largest() -> None:
    assert len(list(rows([23, 2, 6]))) == 23 * 6
    assert len(list(rows([4, 4, 3, 4]))) <= 20
    assert isinstance(all_pairs(a=[1, 2], b=[1, 2]), pytest.MarkDecorator)
