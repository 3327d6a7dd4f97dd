"""Sizes of what an indexer on a GPU keeps between its launches.

Knows nothing of tensors, so that memory can also be estimated without a GPU's packages.
"""

MOST_SCORES = 4 << 20  # that are kept at once, unless a single row has more
NUMBER_BYTES = 4


def rows_at_once(num_rows: int, num_blocks: int) -> int:
    """Rows of a step that have their scores, one for each block of positions, at the same time."""
    return max(1, min(num_rows, MOST_SCORES // num_blocks))


def workspace_bytes(num_rows: int, row_numbers: int, num_blocks: int) -> int:
    """Of queries with `row_numbers` numbers a row, of scores, and of a bit for each block."""
    scores = rows_at_once(num_rows, num_blocks) * num_blocks
    return NUMBER_BYTES * (num_rows * (row_numbers + -(-num_blocks // 32)) + scores)
