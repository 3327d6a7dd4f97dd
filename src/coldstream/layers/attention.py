"""Full attention, from normed hidden states to what is added to the residual stream."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, AttentionHeads, AttentionInputs, Caches, Ops, Rows, Weight


@dataclass(frozen=True)
class AttentionWeights:
    """Named as in the file. attn_q holds per head D rows of the query, then of the gate if there is one."""

    attn_q: Weight  # [H · 2 · D, E], or [H · D, E]
    attn_k: Weight  # [G · D, E]
    attn_v: Weight  # [G · D, E]
    attn_output: Weight  # [E, H · D]
    heads: AttentionHeads


def attention(
    ops: Ops, x: Array, weights: AttentionWeights, angles: Array, caches: Caches, rows: Rows
) -> Array:
    """x [T, E] → [T, E]. Writes the caches at `rows`; see `Ops.attention`."""
    query_gate, key, value = ops.linear(x, (weights.attn_q, weights.attn_k, weights.attn_v))
    inputs = AttentionInputs(query_gate, key, value, angles)
    mixed = ops.attention(inputs, weights.heads, caches, rows)
    return ops.linear(mixed, (weights.attn_output,))[0]
