"""The transformation after which caches of integers keep keys and values: the Walsh–Hadamard one, its own
inverse but for a factor. It leaves scalar products as they are, up to that factor, and makes values of any
distribution look like draws of one, the normal. As a scale belongs to a head, it takes the largest blocks
that the head can be cut into.
"""

import torch

from coldstream.kernels.dequantize.integer_blocks import grouped


def head_block(head_dim: int) -> int:
    """Values that `turn_head` turns together: the greatest power of two that divides those of a head."""
    return head_dim & -head_dim


def turn_head(values: torch.Tensor) -> torch.Tensor:
    """H(x) of each `head_block(D)` consecutive values: [..., D] → [..., D], any float type.

    Strides 1, 2, 4, … in turn, without a factor.
    """
    blocks = grouped(values, -1, head_block(values.shape[-1]))
    stride = 1
    while stride < blocks.shape[-1]:
        first, second = grouped(blocks, -1, 2, stride).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return blocks.flatten(-2)


def turn_head_back(turned: torch.Tensor) -> torch.Tensor:
    """What `turn_head` was given, exact but for what the additions round."""
    return turn_head(turned) * (1 / head_block(turned.shape[-1]))
