"""Full attention, from normed hidden states to what is added to the residual stream.

It is in two parts: behind the projections nothing needs the hidden states, whose memory can be used again.
"""

from dataclasses import dataclass

from coldstream.kernels.ops import (
    Array,
    AttentionHeads,
    AttentionInputs,
    Caches,
    Ops,
    RopeSpec,
    Rows,
    Weight,
)


@dataclass(frozen=True)
class AttentionWeights:
    """Named as in the file. attn_q holds per head D rows of the query, then of a gate of kind "query"."""

    attn_q: Weight  # [H · 2 · D, E], or [H · D, E]
    attn_k: Weight  # [G · D, E]
    attn_v: Weight  # [G · D, E]
    attn_output: Weight  # [E, H · D]
    heads: AttentionHeads
    rope: RopeSpec
    attn_gate: Weight = None  # [H, E] of kind "head", [H · D, E] of kind "element", else None


def project_attention(ops: Ops, x: Array, weights: AttentionWeights, angles: Array) -> AttentionInputs:
    """The inputs of `attention` for x [T, E]. angles: by `weights.rope`."""
    projections = (weights.attn_q, weights.attn_k, weights.attn_v)
    if weights.attn_gate is not None:
        query, key, value, gate = ops.linear(x, (*projections, weights.attn_gate))
        return AttentionInputs(query, key, value, angles, gate)
    query_gate, key, value = ops.linear(x, projections)
    return AttentionInputs(query_gate, key, value, angles)


def attention(
    ops: Ops, inputs: AttentionInputs, weights: AttentionWeights, caches: Caches, rows: Rows
) -> Array:
    """→ [T, E]. Writes the caches at `rows`; see `Ops.attention`."""
    mixed = ops.attention(inputs, weights.heads, caches, rows)
    return ops.linear(mixed, (weights.attn_output,))[0]
