"""A soft cap of logits: cap · tanh(x / cap) grows with x and stays within ±cap."""

import torch

from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.arithmetic.reference import constant


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap). Differentiable."""
    return cap * torch.tanh(x / cap)


def softcap_exact(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`softcap` to the last bit, as docs/arithmetic.md defines it: tanh(z) is 2 · sigmoid(2z) − 1."""
    most = constant(cap)
    return exact.fma(2 * most, exact.sigmoid(x * (2 / most)), -most)
