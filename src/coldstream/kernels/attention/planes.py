"""Numbers as planes of signed bytes with one float32 scale: the operands of attention over integers."""

from dataclasses import dataclass

import torch

from coldstream.kernels.arithmetic.reference import LARGEST_CODE, SMALLEST_MAXIMUM, constant

LOW_BITS = 8
LOW_UNIT = 1 << LOW_BITS  # units of the low plane are one of the high plane
LARGEST_TWO_PLANE_CODE = LOW_UNIT * LARGEST_CODE + LARGEST_CODE


@dataclass(frozen=True)
class Planes:
    """Numbers [..., n] that share a scale along n: (high + low / 256) · scale.

    codes: int32 [..., n], 256 · high + low of two planes, or high of one. scale: float32 [...].
    """

    codes: torch.Tensor
    scale: torch.Tensor
    num_planes: int

    @property
    def high(self) -> torch.Tensor:
        """int32 [..., n] in −127 … 127."""
        return self.codes if self.num_planes == 1 else (self.codes + LOW_UNIT // 2) >> LOW_BITS

    @property
    def low(self) -> torch.Tensor:
        """int32 [..., n] in −128 … 127; zeros of one plane."""
        return torch.zeros_like(self.codes) if self.num_planes == 1 else self.codes - LOW_UNIT * self.high

    def values(self) -> torch.Tensor:
        """float32 [..., n], the code (exact in units of the high plane) times the scale."""
        unit = 1 if self.num_planes == 1 else 1 / LOW_UNIT
        return (self.codes.float() * unit) * self.scale.unsqueeze(-1)


def round_planes(values: torch.Tensor, num_planes: int, largest_code: int = LARGEST_CODE) -> Planes:
    """float32 [..., n], rounded with one scale along n: docs/arithmetic.md, Planes of bytes.

    largest_code: code of the greatest magnitude in one plane; unused with two.
    """
    limit = largest_code if num_planes == 1 else LARGEST_TWO_PLANE_CODE
    scaled, scale = scale_to(values, limit, 1 if num_planes == 1 else 1 / LOW_UNIT)
    return Planes(torch.round(scaled).int(), scale, num_planes)


def scale_to(values: torch.Tensor, limit: int, unit: float = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] scaled so that the greatest magnitude is `limit`, and the scale [...] of `unit`.

    All zero if the greatest magnitude is too small or a number is not finite.
    """
    maximum = values.abs().amax(dim=-1)
    is_zero, is_finite = maximum < SMALLEST_MAXIMUM, maximum.isfinite()
    scaled = values * (constant(limit) / maximum).unsqueeze(-1)
    scaled = torch.where((is_finite & ~is_zero).unsqueeze(-1), scaled, 0.0)
    scale = torch.where(is_zero, 0.0, maximum / (constant(limit) * unit))
    return scaled, torch.where(is_finite, scale, torch.nan)


def multiply_planes(equation: str, x: Planes, y: Planes) -> torch.Tensor:
    """einsum of the codes of x, two planes, and of y, in units of one high and one low plane: float32.

    Every sum is Σ (256 · x.high · y.high + x.high · y.low + x.low · y.high), an integer, rounded once; the
    products of two low planes are left out.
    """
    # 64 bits hold the sums of products of 24 bits, and float64 its integers up to 53.
    both = y.codes if y.num_planes == 2 else LOW_UNIT * y.codes
    high = torch.einsum(equation, x.high.double(), both.double())
    return (high + torch.einsum(equation, x.low.double(), y.high.double())).float()
