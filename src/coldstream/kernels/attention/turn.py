"""The transformation after which `tq3_0` keeps keys and values: of 32 values each, its own inverse but for
signs and a factor. It leaves scalar products as they are, up to that factor, and makes 32 values of any
distribution look like draws of one, the normal, for which the levels are best.
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


def _signs(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([-1 if SIGNS >> i & 1 else 1 for i in range(BLOCK_VALUES)], dtype=like.dtype)


def _butterflies(blocks: torch.Tensor) -> torch.Tensor:
    """The unnormalised Walsh–Hadamard transform over the last dimension, strides 1, 2, 4, 8, 16."""
    stride = 1
    while stride < BLOCK_VALUES:
        first, second = grouped(blocks, -1, 2, stride).unbind(-2)
        blocks = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return blocks
