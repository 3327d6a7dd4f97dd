"""The feed-forward network of dense models."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, Ops, Weight


@dataclass(frozen=True)
class DenseFfnWeights:
    """Named as in the file."""

    ffn_gate: Weight  # [F, E]
    ffn_up: Weight  # [F, E]
    ffn_down: Weight  # [E, F]


def dense_ffn(ops: Ops, x: Array, weights: DenseFfnWeights) -> Array:
    """down(silu(gate x) · up x): [T, E] → [T, E]."""
    gate, up = ops.linear(x, (weights.ffn_gate, weights.ffn_up))
    return ops.linear(ops.swiglu(gate, up), (weights.ffn_down,))[0]
