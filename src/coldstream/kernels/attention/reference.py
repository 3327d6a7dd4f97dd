"""Causal attention with grouped key/value heads over a cache.

Per head: queries and keys are RMS-normed, and in some models values; queries and keys are then rotated, and
scores are scaled, in most models by 1/sqrt(D). Query head h reads key/value head h div (H/G). The result is
multiplied by a function of its gate, if there is one.
The cache holds keys after norm and rotation, and values as they are, in one of `cache_types.CACHE_TYPES`.
Everything else is of floats here, over caches of the integer types too.
"""

from collections.abc import Callable

import torch

from coldstream.kernels.attention.cache_types import CacheType
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.indexer.reference import seen_positions
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, Rows
from coldstream.kernels.rms_norm.reference import rms_norm
from coldstream.kernels.rope.reference import rotate
from coldstream.kernels.sequences import is_tree, seen, sequences, written


def attention(inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows) -> torch.Tensor:
    """See `Ops.attention`. Differentiable; mutates both caches."""
    head_dim = inputs.key.shape[-1] // caches.k.shape[-2]
    encode, decode = _codec(caches.k, head_dim)
    query, gate = split_gate(inputs, head_dim, heads)
    query, key, value = normed_heads(query, inputs, heads, rms_norm)
    query, key = (rotate(x, inputs.angles) for x in (query, key))
    where = written(rows)
    caches.k[where] = encode(key)
    caches.v[where] = encode(value)
    outputs = [query[:0]]
    for _, part in sequences(rows):
        # The last row of a chain sees what all of it sees; rows of a tree see what none of the others does.
        parts = (
            [slice(row, row + 1) for row in range(part.start, part.stop)] if is_tree(rows, part) else [part]
        )
        for each in parts:
            where = seen(rows, each.stop - 1)
            keys, values = (decode(cache[where]) for cache in (caches.k, caches.v))
            chosen = None
            if inputs.chosen is not None:
                every = [
                    seen_positions(inputs.chosen, row, len(keys)) for row in range(each.start, each.stop)
                ]
                chosen = torch.stack(every)
            outputs.append(attend(query[each], keys, values, rows.positions[each], heads, chosen))
    output = torch.cat(outputs)
    return finish(output, gate, heads, torch.sigmoid, torch.nn.functional.softplus)


def split_gate(
    inputs: AttentionInputs, head_dim: int, heads: AttentionHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, D] and their gates: [T, H, D], one for a head [T, H, 1], or none [T, H, 0]."""
    if heads.output_gate == "query":
        query, gate = grouped(inputs.query_gate, -1, 2, head_dim).unbind(-2)
        return query, gate
    query = grouped(inputs.query_gate, -1, head_dim)
    if heads.output_gate == "none":
        return query, query[..., :0]
    return query, grouped(inputs.gate, query.shape[1], 1 if heads.output_gate == "head" else head_dim)


def normed_heads(
    query: torch.Tensor,
    inputs: AttentionInputs,
    heads: AttentionHeads,
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], keys and values [T, G, D], with their biases, those normed that have a norm."""
    head_dim = query.shape[-1]
    key, value = (grouped(x, -1, head_dim) for x in (inputs.key, inputs.value))
    if heads.q_bias is not None:
        query, key, value = (
            x + grouped(bias, -1, head_dim)
            for x, bias in ((query, heads.q_bias), (key, heads.k_bias), (value, heads.v_bias))
        )
    if heads.q_norm is not None:
        query, key = rms_norm(query, heads.q_norm, heads.eps), rms_norm(key, heads.k_norm, heads.eps)
    if heads.v_norm:
        value = rms_norm(value, value.new_ones(head_dim), heads.eps)
    return query, key, value


def finish(
    output: torch.Tensor,
    gate: torch.Tensor,
    heads: AttentionHeads,
    sigmoid: Callable[[torch.Tensor], torch.Tensor],
    softplus: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What is done with the results of all heads [T, H, D], with the gate of `split_gate`: [T, H·D]."""
    if heads.output_gate != "none":
        output = output * (sigmoid if heads.output_gate == "query" else softplus)(gate)
    return output.flatten(-2)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    heads: AttentionHeads,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [L, H, D] at `positions` [L] of one sequence, over its keys and values [P, G, D]: [L, H, D].

    chosen: whether each row sees a position, bool [L, P]; None: all.
    """
    num_rows, num_heads, head_dim = query.shape
    scale, window = head_dim**-0.5 if heads.scale is None else heads.scale, heads.window
    query = query.reshape(num_rows, key.shape[-2], -1, head_dim)
    scores = torch.einsum("lgrd,pgd->grlp", query, key.to(query.dtype)) * scale
    distance = positions.unsqueeze(-1) - torch.arange(key.shape[0])  # [L, P]
    is_outside = (distance < 0) | (distance >= (key.shape[0] if window is None else window))
    if chosen is not None:
        is_outside = is_outside | ~chosen
    scores = scores.masked_fill(is_outside, -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.to(scores.dtype).reshape(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    output = torch.einsum("grlp,pgd->lgrd", weights, value.to(query.dtype))
    return output.reshape(num_rows, num_heads, head_dim)


Codec = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def _codec(cache: torch.Tensor, head_dim: int) -> Codec:
    """From values to rows of the cache, and back to values."""
    if not cache.is_floating_point():
        cache_type = CacheType.of(cache, head_dim)
        return cache_type.encode, lambda rows: cache_type.rotate_back(cache_type.decode(rows, head_dim))
    return lambda values: values.to(cache.dtype), lambda rows: rows
