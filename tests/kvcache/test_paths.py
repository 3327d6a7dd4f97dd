"""Which rows of a pending tree a commit may keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import InvalidRequestError
from coldstream.kvcache.paths import check_path

TREES = st.integers(0, 6).flatmap(lambda size: st.tuples(*(st.integers(-1, row - 1) for row in range(size))))


@given(TREES, st.lists(st.integers(-2, 7), max_size=5).map(tuple))
def test_a_path_goes_from_what_is_committed_from_parent_to_child(
    parents: tuple[int, ...], path: tuple[int, ...]
) -> None:
    is_path = all(0 <= row < len(parents) for row in path) and all(
        parents[row] == before for before, row in zip((-1, *path), path, strict=False)
    )
    if is_path:
        check_path(path, parents)
    else:
        with pytest.raises(InvalidRequestError, match="cannot be committed"):
            check_path(path, parents)


def test_the_row_behind_the_last_one_is_no_row() -> None:
    check_path((0, 1), (-1, 0))
    for row in (2, -1):
        with pytest.raises(InvalidRequestError, match=f"row {row} .*: the pending tree has 2 rows"):
            check_path((0, row), (-1, 0))
