"""Gated causal attention with grouped key/value heads over a cache.

Per head: queries and keys are RMS-normed, then rotated; scores are scaled by 1/sqrt(D); query head h reads
key/value head h div (H/G); the result is multiplied by the sigmoid of the gate that came with the query.
The cache holds keys after norm and rotation, and values as they are.
"""

import torch

from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import Rows
from coldstream.kernels.rms_norm.reference import rms_norm
from coldstream.kernels.rope.reference import rotate
from coldstream.kernels.sequences import sequences


def attention(
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
    """See `Ops.attention`. Differentiable; mutates k_cache and v_cache [slots, positions, G, D]."""
    num_kv_heads, head_dim = k_cache.shape[-2:]
    query, gate = grouped(query_gate, -1, 2, head_dim).unbind(-2)  # [T, H, D] each
    query = rotate(rms_norm(query, q_norm, eps), angles)
    key = rotate(rms_norm(grouped(key, num_kv_heads, head_dim), k_norm, eps), angles)
    where = (rows.slots.long(), rows.positions.long())
    k_cache[where] = key.to(k_cache.dtype)
    v_cache[where] = grouped(value, num_kv_heads, head_dim).to(v_cache.dtype)
    outputs = [query[:0]]
    for slot, part in sequences(rows):
        positions = rows.positions[part]
        length = int(positions[-1]) + 1
        outputs.append(attend(query[part], k_cache[slot, :length], v_cache[slot, :length], positions))
    return (torch.cat(outputs) * torch.sigmoid(gate)).flatten(-2)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rows [L, H, D] at `positions` [L] of one sequence, over its keys and values [P, G, D]: [L, H, D]."""
    num_rows, num_heads, head_dim = query.shape
    query = query.reshape(num_rows, key.shape[-2], -1, head_dim)
    scores = torch.einsum("lgrd,pgd->grlp", query, key.to(query.dtype)) * head_dim**-0.5
    is_later = torch.arange(key.shape[0]) > positions.unsqueeze(-1)  # [L, P]
    weights = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1)
    output = torch.einsum("grlp,pgd->lgrd", weights, value.to(query.dtype))
    return output.reshape(num_rows, num_heads, head_dim)
