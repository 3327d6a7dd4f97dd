"""The transformations after which caches keep keys and values: Walsh–Hadamard ones of consecutive values,
each its own inverse but for signs and a factor. They leave scalar products as they are, up to that factor,
and make values of any distribution look like draws of one, the normal.

`tq3_0`, whose levels are the best for that one, has blocks of 32 values and changes signs first; the integer
types, whose scale belongs to a head, have the largest blocks that the head can be cut into.
"""

import torch

from coldstream.kernels.attention.cache_layout import BLOCK_VALUES
from coldstream.kernels.dequantize.integer_blocks import grouped

# Bit i: whether value i changes its sign first. Without, a constant block would come out as one value and 31
# zeros; with these it, and each other block that is a row of the transformation, comes out as 28 values of
# one magnitude and four of three times that: as even as there are signs for.
SIGNS = 0x48280955


def turn(values: torch.Tensor) -> torch.Tensor:
    """H(s ⊙ x) of each 32 consecutive values: [..., D] → [..., D], any float type, differentiable."""
    return (_butterflies(grouped(values, -1, BLOCK_VALUES) * _signs(values))).flatten(-2)


def turn_back(turned: torch.Tensor) -> torch.Tensor:
    """What `turn` was given: s ⊙ H(y) · (1/32), exact but for what the additions round."""
    blocks = _butterflies(grouped(turned, -1, BLOCK_VALUES)) * _signs(turned)
    return (blocks * (1 / BLOCK_VALUES)).flatten(-2)


def head_block(head_dim: int) -> int:
    """Values that `turn_head` turns together: the greatest power of two that divides those of a head."""
    return head_dim & -head_dim


def turn_head(values: torch.Tensor) -> torch.Tensor:
    """H(x) of each `head_block(D)` consecutive values: [..., D] → [..., D], any float type."""
    return _butterflies(grouped(values, -1, head_block(values.shape[-1]))).flatten(-2)


def turn_head_back(turned: torch.Tensor) -> torch.Tensor:
    """What `turn_head` was given, exact but for what the additions round."""
    return turn_head(turned) * (1 / head_block(turned.shape[-1]))


def _signs(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([-1 if SIGNS >> i & 1 else 1 for i in range(BLOCK_VALUES)], dtype=like.dtype)


def _butterflies(blocks: torch.Tensor) -> torch.Tensor:
    """The unnormalised Walsh–Hadamard transform over the last dimension, strides 1, 2, 4, … in turn."""
    stride = 1
    while stride < blocks.shape[-1]:
        first, second = grouped(blocks, -1, 2, stride).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return blocks
