"""Sizes of what attention on a GPU leaves of each chunk of positions for the merge.

Knows nothing of tensors, so that memory can also be estimated without PyTorch. H query heads of D values.
"""

from math import prod

from coldstream.kernels.ops import BLOCK_POSITIONS

SPLIT_ROWS = 64  # up to which the chunks of a row are computed beside each other
PART_ROWS = 512  # up to which rows far into a text are computed SPLIT_ROWS at a time, for the same reason
FLOAT_BYTES = 4


def num_chunks(num_rows: int, num_positions: int) -> int:
    """Of each row, for contexts of up to `num_positions`: one in prefill, which merges at once."""
    return -(-num_positions // BLOCK_POSITIONS) if num_rows <= SPLIT_ROWS else 1


def rows_at_once(num_rows: int, *, is_deep: bool, has_trees: bool) -> int:
    """How many of a step's rows are computed together.

    All, but a few hundred far into a text in parts: a block of theirs would walk over the whole text, and
    there are too few blocks to fill a GPU. Rows of trees need those before them in the same part.
    """
    in_parts = is_deep and not has_trees and SPLIT_ROWS < num_rows <= PART_ROWS
    return SPLIT_ROWS if in_parts else num_rows


def partial_shapes(
    num_rows: int, num_heads: int, chunks: int, head_dim: int
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Float32: numerators [rows, H, chunks, D], and maxima and denominators [rows, H, chunks, 2]."""
    return (num_rows, num_heads, chunks, head_dim), (num_rows, num_heads, chunks, 2)


def most_partial_bytes(num_heads: int, head_dim: int, num_positions: int) -> int:
    """Bytes of both for SPLIT_ROWS rows in contexts of up to `num_positions`: the most of any step."""
    shapes = partial_shapes(SPLIT_ROWS, num_heads, num_chunks(SPLIT_ROWS, num_positions), head_dim)
    return FLOAT_BYTES * sum(map(prod, shapes))
