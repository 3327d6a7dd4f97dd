"""Rotated values as eight levels times a float32 scale a head: the type `i3`."""

import torch

from coldstream.kernels.attention.planes import Planes, scale_to
from coldstream.kernels.dequantize.integer_blocks import grouped

# The best eight levels for a normal variable (0.2451, 0.7560, 1.3439 and 2.1520 deviations) in units of 1/53:
# among the units that make them bytes the one with the least mean square error, 0.004 % above the best.
LEVELS = (13, 40, 71, 114, -13, -40, -71, -114)  # by code: the highest bit is the sign
THRESHOLDS = (26.5, 55.5, 92.5)  # halfway between levels
# The greatest magnitude of a head in units of the levels. Compared with 1/53 of the deviation as the unit,
# the error of normal heads of 128 and 256 is at most 4 % greater, and that of heads with two channels 20 or
# 100 times as great as the others is 6 to 23 % less.
LARGEST_LEVEL = 140


def round_levels(values: torch.Tensor) -> Planes:
    """float32 [..., n] as levels with one scale along n: docs/arithmetic.md, Planes of bytes."""
    scaled, scale = scale_to(values, LARGEST_LEVEL)
    codes = 4 * (scaled < 0).int()
    for threshold in THRESHOLDS:
        codes += scaled.abs() >= threshold
    return Planes(_levels(codes).int(), scale, num_planes=1)


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """Levels [..., 32 · B] of any integer type → bytes of codes [..., 12 · B]; see `cache_layout.py`."""
    codes = sum((levels.abs() > level).to(torch.uint8) for level in LEVELS[:3]) + 4 * (levels < 0)
    codes = grouped(codes.to(torch.uint8), -1, 4, 8)
    low, high = codes & 3, codes >> 2
    low = low[..., ::2, :] | low[..., 1::2, :] << 2
    shifts = torch.arange(4, dtype=torch.uint8).unsqueeze(-1)
    high = (high << shifts).sum(dim=-2, dtype=torch.uint8)
    nibbles = torch.cat((low.flatten(-3), high.flatten(-2)), dim=-1)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 12 · B] → levels, int8 [..., 32 · B]."""
    low_bytes = packed.shape[-1] // 3 * 2
    low = grouped(_nibbles(packed[..., :low_bytes]), -1, 2, 8)
    high = grouped(_nibbles(packed[..., low_bytes:]), -1, 8)
    codes = torch.stack((low & 3, low >> 2), dim=-2).flatten(-3, -2)  # [..., B, 4, 8]
    codes = codes + torch.stack([high >> part & 1 for part in range(4)], dim=-2) * 4
    return _levels(codes.flatten(-3))


def _levels(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(LEVELS, dtype=torch.int8)[codes.long()]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] → [..., 2 n], the low half of a byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
