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
    attn_v: Weight  # [G · D, E]; None: values are the raw keys
    attn_output: Weight  # [E, H · D]
    heads: AttentionHeads
    rope: RopeSpec
    attn_gate: Weight = None  # [H, E] of kind "head", [H · D, E] of kind "element", else None
    output_bias: Array = None  # [E]; None: none is added


def project_attention(ops: Ops, x: Array, weights: AttentionWeights, angles: Array) -> AttentionInputs:
    """The inputs of `attention` for x [T, E]. angles: by `weights.rope`."""
    optional = [weight for weight in (weights.attn_v, weights.attn_gate) if weight is not None]
    query_gate, key, *others = ops.linear(x, (weights.attn_q, weights.attn_k, *optional))
    value = key if weights.attn_v is None else others[0]
    return AttentionInputs(query_gate, key, value, angles, None if weights.attn_gate is None else others[-1])


def attention(
    ops: Ops, inputs: AttentionInputs, weights: AttentionWeights, caches: Caches, rows: Rows
) -> Array:
    """→ [T, E]. Writes the caches at `rows`; see `Ops.attention`."""
    mixed = ops.attention(inputs, weights.heads, caches, rows)
    (output,) = ops.linear(mixed, (weights.attn_output,))
    return output if weights.output_bias is None else ops.add_bias(output, weights.output_bias)
