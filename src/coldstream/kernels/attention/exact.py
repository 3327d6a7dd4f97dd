"""The attention of `reference.py` to the last bit, as docs/arithmetic.md has it."""

import torch

from coldstream.kernels.arithmetic.reference import constant, exp, fma, inverse_sqrt, sigmoid, sum_lanes
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import Rows
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.rope.reference import rotate_exact

CHUNK_SIZE = 256  # positions
BLOCK_SIZE = 64

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum [H], denominator [H], numerator [H, D]


def attention_exact(
    query_gate: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    angles: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """See `Ops.attention`. Mutates k_cache and v_cache [slots, positions, G, D]."""
    num_kv_heads, head_dim = k_cache.shape[-2:]
    query, gate = grouped(query_gate, -1, 2, head_dim).unbind(-2)  # [T, H, D] each
    query = rotate_exact(rms_norm_exact(query, q_norm, eps), angles) * inverse_sqrt(constant(head_dim))
    key = rotate_exact(rms_norm_exact(grouped(key, num_kv_heads, head_dim), k_norm, eps), angles)
    where = (rows.slots.long(), rows.positions.long())
    k_cache[where] = key.to(k_cache.dtype)
    v_cache[where] = grouped(value, num_kv_heads, head_dim).to(v_cache.dtype)
    group_size = query.shape[1] // num_kv_heads
    outputs = [query[:0]]
    for q, slot, position in zip(query, rows.slots.tolist(), rows.positions.tolist(), strict=True):
        keys, values = (
            cache[slot, : position + 1].float().repeat_interleave(group_size, dim=1)
            for cache in (k_cache, v_cache)
        )
        outputs.append(attend(q, keys, values).unsqueeze(0))
    return (torch.cat(outputs) * sigmoid(gate)).flatten(-2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One row [H, D] over keys and values [P, H, D]: chunks on their own, then merged in ascending order."""
    maximum, denominator, numerator = attend_chunk(query, key[:CHUNK_SIZE], value[:CHUNK_SIZE])
    for start in range(CHUNK_SIZE, key.shape[0], CHUNK_SIZE):
        part = slice(start, start + CHUNK_SIZE)
        chunk_maximum, chunk_denominator, chunk_numerator = attend_chunk(query, key[part], value[part])
        next_maximum = torch.maximum(maximum, chunk_maximum)
        ours, theirs = exp(maximum - next_maximum), exp(chunk_maximum - next_maximum)
        denominator = fma(chunk_denominator, theirs, denominator * ours)
        numerator = fma(chunk_numerator, theirs.unsqueeze(-1), numerator * ours.unsqueeze(-1))
        maximum = next_maximum
    return numerator * (1 / denominator).unsqueeze(-1)


def attend_chunk(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Partial:
    """The blocks of one chunk in ascending order, with a running maximum."""
    maximum = denominator = torch.empty(0)
    numerator = torch.zeros_like(query)
    for start in range(0, key.shape[0], BLOCK_SIZE):
        block = slice(start, start + BLOCK_SIZE)
        scores = score(query, key[block])  # [H, positions]
        block_maximum = scores.amax(dim=-1)
        next_maximum = torch.maximum(maximum, block_maximum) if start else block_maximum
        weights = exp(scores - next_maximum.unsqueeze(-1))
        total = sum_lanes(weights)
        if start:
            correction = exp(maximum - next_maximum)
            denominator = fma(denominator, correction, total)
            numerator = numerator * correction.unsqueeze(-1)
        else:
            denominator = total
        for weight, v in zip(weights.T, value[block], strict=True):
            numerator = fma(weight.unsqueeze(-1), v, numerator)
        maximum = next_maximum
    return maximum, denominator, numerator


def score(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One chain of fma over each head's dimensions: [H, D], [P, H, D] → [H, P]."""
    scores = torch.zeros(query.shape[0], key.shape[0])
    for i in range(query.shape[-1]):
        scores = fma(query[:, i : i + 1], key[..., i].T, scores)
    return scores
