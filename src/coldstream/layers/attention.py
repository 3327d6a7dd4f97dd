"""Full attention, from normed hidden states to what is added to the residual stream."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, Ops, Rows, Weight


@dataclass(frozen=True)
class AttentionWeights:
    """Named as in the file. attn_q holds per head D rows of the query, then of the gate if there is one."""

    attn_q: Weight  # [H · 2 · D, E], or [H · D, E]
    attn_k: Weight  # [G · D, E]
    attn_v: Weight  # [G · D, E]
    attn_output: Weight  # [E, H · D]
    attn_q_norm: Array  # [D]
    attn_k_norm: Array  # [D]
    eps: float
    output_gate: bool
    window: int | None  # positions that a token sees, its own included; None: all


def attention(
    ops: Ops,
    x: Array,
    weights: AttentionWeights,
    angles: Array,
    k_cache: Array,
    v_cache: Array,
    rows: Rows,
) -> Array:
    """x [T, E] → [T, E]. Writes the caches [sequences, positions, G, D] at `rows`; see `Ops.attention`."""
    query_gate, key, value = ops.linear(x, (weights.attn_q, weights.attn_k, weights.attn_v))
    mixed = ops.attention(
        query_gate,
        key,
        value,
        weights.attn_q_norm,
        weights.attn_k_norm,
        weights.eps,
        angles,
        k_cache,
        v_cache,
        rows,
        output_gate=weights.output_gate,
        window=weights.window,
    )
    return ops.linear(mixed, (weights.attn_output,))[0]
