"""The Walsh–Hadamard rotation of heads in caches of integers.

It is its own inverse and keeps scalar products, both up to a factor. Values of any distribution become
nearly normal, which one scale for a head then fits; so blocks are the largest that a head can be split into.
"""

import torch

from coldstream.kernels.dequantize.integer_blocks import grouped


def head_block(head_dim: int) -> int:
    """Values in a block of `rotate_head`: the greatest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate_head(values: torch.Tensor) -> torch.Tensor:
    """H(x) of each `head_block(D)` consecutive values: [..., D] → [..., D], any float type.

    Strides 1, 2, 4, … in this order, without a factor.
    """
    blocks = grouped(values, -1, head_block(values.shape[-1]))
    stride = 1
    while stride < blocks.shape[-1]:
        first, second = grouped(blocks, -1, 2, stride).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return blocks.flatten(-2)


def rotate_head_back(rotated: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate_head` [..., D], exact up to the rounding of additions."""
    return rotate_head(rotated) * (1 / head_block(rotated.shape[-1]))
