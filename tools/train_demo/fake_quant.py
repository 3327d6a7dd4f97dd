"""Rounding weights to the values that a quantised file can hold, for quantisation-aware training.

Each function rounds `w [..., columns]` to the grid of one block type with scales from the block's extremes.
They follow the types' layouts (what a scale may be, how many levels there are), not any quantiser's search
for better ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def _safe(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def fake_q8_0(w: Tensor) -> Tensor:
    """Blocks of 32, one scale, 8 bits."""
    x = w.unflatten(-1, (-1, 32))
    scale = (x.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((x / _safe(scale)).round().clamp(-127, 127) * scale).flatten(-2)


def fake_q5_0(w: Tensor) -> Tensor:
    """Blocks of 32, one signed scale, levels −16 … 15."""
    x = w.unflatten(-1, (-1, 32))
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = (extreme / -16).half().float()
    return ((x / _safe(scale)).round().clamp(-16, 15) * scale).flatten(-2)


def fake_q6_k(w: Tensor) -> Tensor:
    """Super-blocks of 256 in 16 blocks, 8-bit scales, levels −32 … 31."""
    x = w.unflatten(-1, (-1, 16, 16))
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -32
    largest = scale.gather(-2, scale.abs().argmax(-2, keepdim=True))
    step = (largest / -128).half().float()
    scale = (scale / _safe(step)).round().clamp(-128, 127) * step
    return ((x / _safe(scale)).round().clamp(-32, 31) * scale).flatten(-3)


def fake_q4_k(w: Tensor) -> Tensor:
    """Super-blocks of 256 in 8 blocks, 6-bit scales and minima, levels 0 … 15."""
    x = w.unflatten(-1, (-1, 8, 32))
    low = x.amin(-1, keepdim=True).clamp(max=0)
    scale = (x.amax(-1, keepdim=True) - low) / 15
    step = (scale.amax(-2, keepdim=True) / 63).half().float()
    low_step = (-low.amin(-2, keepdim=True) / 63).half().float()
    scale = (scale / _safe(step)).round().clamp(0, 63) * step
    minimum = (-low / _safe(low_step)).round().clamp(0, 63) * low_step
    return (((x + minimum) / _safe(scale)).round().clamp(0, 15) * scale - minimum).flatten(-3)


FAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_K": fake_q4_k,
    "Q5_0": fake_q5_0,
    "Q6_K": fake_q6_k,
    "Q8_0": fake_q8_0,
}
