"""Which rows of a pending tree a commit may keep."""

from itertools import product

import pytest

from coldstream.errors import InvalidRequestError
from coldstream.kvcache.sequence_cache import check_path


def test_a_path_goes_from_what_is_committed_from_parent_to_child() -> None:
    """All trees of up to three rows, and all paths of up to three."""
    trees = [parents for size in range(4) for parents in product(*(range(-1, row) for row in range(size)))]
    paths = [path for length in range(4) for path in product(range(-1, 4), repeat=length)]
    for parents, path in product(trees, paths):
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
