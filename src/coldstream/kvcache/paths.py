"""Paths of rows of a pending draft tree, that a commit keeps. Pure."""

from coldstream.errors import InvalidRequestError


def check_path(path: tuple[int, ...], parents: tuple[int, ...]) -> None:
    """Raises InvalidRequestError unless the rows are one path of the tree, from what is committed on."""
    before = -1
    for row in path:
        if not 0 <= row < len(parents):
            raise InvalidRequestError(
                f"row {row} cannot be committed: the pending tree has {len(parents)} rows"
            )
        if parents[row] != before:
            raise InvalidRequestError(
                f"row {row} cannot be committed after {_row_name(before)}: it follows "
                f"{_row_name(parents[row])}; a path begins at what is committed and goes from parent to child"
            )
        before = row


def _row_name(row: int) -> str:
    return "what is committed" if row < 0 else f"row {row}"
