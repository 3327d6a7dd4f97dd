"""RMS norm."""

import torch

from coldstream.kernels.arithmetic.reference import constant, inverse_sqrt, sum_of_squares


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; any offset of 1 is already in the weight."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rms_norm_exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` to the last bit, as docs/arithmetic.md defines it, float32."""
    mean = sum_of_squares(x) / x.shape[-1]
    return x * inverse_sqrt(mean + constant(eps)).unsqueeze(-1) * weight
