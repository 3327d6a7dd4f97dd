"""Rotary position embedding of the first dimensions of a head, in halves: pairs are (i, i + num_dims / 2).

For text the three position streams of multimodal rope are equal, so that its sections have no effect.
"""

import torch

from coldstream.kernels.arithmetic.reference import fma
from coldstream.kernels.ops import RopeSpec


def rope_angles(positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """cos and sin of position · theta^(−2i/num_dims): int [T] → [T, num_dims / 2, 2].

    The position is the first one of its `rope.block_size`. With a scaling, frequencies are multiplied by
    their factors, and cos and sin by the magnitude. Computed in float64, then rounded to float32.
    """
    exponents = torch.arange(0, rope.num_dims, 2, dtype=torch.float64) / rope.num_dims
    frequencies, magnitude = rope.theta**-exponents, 1.0
    if rope.scaling is not None:
        frequencies = frequencies * torch.tensor(rope.scaling.frequency_factors, dtype=torch.float64)
        magnitude = rope.scaling.magnitude
    firsts = positions // rope.block_size * rope.block_size
    angles = firsts.double().unsqueeze(-1) * frequencies
    return (magnitude * torch.stack((angles.cos(), angles.sin()), dim=-1)).float()


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Heads [T, heads, D] rotated by angles [T, num_dims / 2, 2]; dimensions past num_dims are kept."""
    cos, sin = angles.to(x.dtype).unsqueeze(1).unbind(-1)  # [T, 1, num_dims / 2]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate_exact(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`rotate` to the last bit, as docs/arithmetic.md defines it, float32."""
    cos, sin = angles.unsqueeze(1).unbind(-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((fma(first, cos, -(second * sin)), fma(second, cos, first * sin), rest), dim=-1)
