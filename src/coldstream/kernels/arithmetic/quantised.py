"""Rows of activations as integers: how many inputs share a scale, and their arrays. docs/arithmetic.md.

Knows nothing of who made the arrays: PyTorch's tensors in definitions, the device's arrays in launchers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 256  # inputs with one activation scale, for weights in super-blocks
BLOCK_SIZE = 32  # inputs with one activation scale, for weights in blocks of 32
SUM_SIZE = 16  # inputs that share one entry of `sums`

Empty = Callable[[tuple[int, ...], str], Any]  # an array of a shape and type, contents undefined


@dataclass(frozen=True)
class QuantActivations:
    """Rows of K activations as int8, with one scale per group of 256 inputs or per block of 32."""

    q: Any  # int8 [T, K]
    scales: Any  # float32 [T, ceil(K / 256)] or [T, ceil(K / 32)]
    sums: Any  # int16 [T, ceil(K / 16)], of q over 16 inputs


def padded_cols(cols: int) -> int:
    """Codes in a row of `cols` activations in a GPU's memory: whole groups."""
    return -(-cols // GROUP_SIZE) * GROUP_SIZE


def activations_from(
    empty: Empty, num_rows: int, cols: int, scale_size: int = GROUP_SIZE
) -> QuantActivations:
    """Unwritten rows from `empty`: q int8 [T, Kp], scales float32 [T, Kp / S], sums int16 [T, Kp / 16].

    S, `scale_size`, is GROUP_SIZE, or BLOCK_SIZE for weights in blocks of 32.
    """
    padded = padded_cols(cols)
    return QuantActivations(
        empty((num_rows, padded), "int8"),
        empty((num_rows, padded // scale_size), "float32"),
        empty((num_rows, padded // SUM_SIZE), "int16"),
    )
