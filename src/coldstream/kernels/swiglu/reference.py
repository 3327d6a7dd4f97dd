"""The gated activation of every FFN."""

import math

import torch

from coldstream.kernels.arithmetic.reference import constant, fma, sigmoid, silu
from coldstream.kernels.ops import SWIGLU, Activation

CLAMPED_ALPHA = 1.702
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, element by element. Differentiable."""
    return torch.nn.functional.silu(gate) * up


def swiglu_exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same with the exact exp of docs/arithmetic.md, float32."""
    return silu(gate) * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """g · sigmoid(1.702 · g) · (u + 1) with g = min(gate, limit) and u = up within ±limit. Differentiable."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(CLAMPED_ALPHA * gate) * (up + 1)


def clamped_swiglu_exact(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """The same to the last bit, as docs/arithmetic.md defines it, float32."""
    most = constant(limit)
    gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return gate * sigmoid(gate * constant(CLAMPED_ALPHA)) * (up + 1)


def gelu_exact(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x · fma(x², c_3, c_1)), float32: the GELU with tanh, which is 2 · sigmoid(2z) − 1 at z."""
    return x * sigmoid(x * fma(x * x, constant(GELU_CUBIC), constant(GELU_LINEAR)))


def glu(gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
    """The gated unit of a model. Differentiable."""
    if activation.kind == "clamped swiglu":
        return clamped_swiglu(gate, up, activation.limit)
    if activation.kind == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return swiglu(gate, up)


def glu_exact(gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
    """The same to the last bit."""
    if activation.kind == "clamped swiglu":
        return clamped_swiglu_exact(gate, up, activation.limit)
    if activation.kind == "geglu":
        return gelu_exact(gate) * up
    return swiglu_exact(gate, up)
