"""Full attention, from normed hidden states to what is added to the residual stream.

It is in two parts: behind the projections nothing needs the hidden states, whose memory can be used again.
"""

from dataclasses import dataclass, replace

from coldstream.kernels.indexer.records import IndexerHeads, IndexerInputs
from coldstream.kernels.linear.records import BiasedOutput
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
class IndexerWeights:
    """What chooses the blocks of positions that rows attend to."""

    q_proj: Weight  # [n · d, E]
    k_proj: Weight  # [d, E]
    heads: IndexerHeads
    block_rope: RopeSpec  # that of the layer, of the first positions of blocks


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
    indexer: IndexerWeights | None = None  # None: rows attend to all positions


def project_attention(
    ops: Ops, x: Array, weights: AttentionWeights, angles: Array, block_angles: Array = None
) -> AttentionInputs:
    """The inputs of `attention` for x [T, E]. angles: by `weights.rope`; block_angles: by the indexer's."""
    optional = [weight for weight in (weights.attn_v, weights.attn_gate) if weight is not None]
    indexer = weights.indexer
    of_indexer = () if indexer is None else (indexer.q_proj, indexer.k_proj)
    query_gate, key, *others = ops.linear(x, (weights.attn_q, weights.attn_k, *optional, *of_indexer))
    value = key if weights.attn_v is None else others[0]
    gate = None if weights.attn_gate is None else others[len(optional) - 1]
    inputs = AttentionInputs(query_gate, key, value, angles, gate)
    if indexer is None:
        return inputs
    query, raw_key = others[len(optional) :]
    return replace(inputs, indexer=IndexerInputs(query, raw_key, angles, block_angles))


def attention(
    ops: Ops, inputs: AttentionInputs, weights: AttentionWeights, caches: Caches, rows: Rows
) -> Array | BiasedOutput:
    """→ [T, E]. Writes the caches at `rows`; see `Ops.attention` and `Ops.choose_blocks`."""
    if weights.indexer is not None and inputs.indexer is not None:
        chosen = ops.choose_blocks(inputs.indexer, weights.indexer.heads, caches.index, rows)
        inputs = replace(inputs, indexer=None, chosen=chosen)
    mixed = ops.attention(inputs, weights.heads, caches, rows)
    (output,) = ops.linear(mixed, (weights.attn_output,))
    return output if weights.output_bias is None else BiasedOutput(output, weights.output_bias)
