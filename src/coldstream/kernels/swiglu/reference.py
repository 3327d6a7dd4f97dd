"""The gated activation of every FFN."""

import torch

from coldstream.kernels.arithmetic.reference import silu


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, element by element. Differentiable."""
    return torch.nn.functional.silu(gate) * up


def swiglu_exact(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same with the exact exp of docs/arithmetic.md, float32."""
    return silu(gate) * up
