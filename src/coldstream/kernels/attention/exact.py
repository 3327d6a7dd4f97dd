"""The attention of `reference.py` to the last bit, as docs/arithmetic.md has it."""

from collections.abc import Iterator

import torch

from coldstream.kernels.arithmetic.reference import (
    NUM_LANES,
    constant,
    exp,
    fma,
    inverse_sqrt,
    sigmoid,
    sum_lanes,
)
from coldstream.kernels.attention.cache_layout import BLOCK_VALUES
from coldstream.kernels.attention.cache_types import CacheType
from coldstream.kernels.attention.reference import split_gate
from coldstream.kernels.attention.turn import turn, turn_back
from coldstream.kernels.dequantize.integer_blocks import grouped
from coldstream.kernels.ops import Rows
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.rope.reference import rotate_exact
from coldstream.kernels.sequences import seen, written

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
    window: int | None = None,
    *,
    output_gate: bool = True,
) -> torch.Tensor:
    """See `reference.attention`. Mutates k_cache and v_cache [slots, positions, G, row]."""
    num_kv_heads = k_cache.shape[-2]
    head_dim = key.shape[-1] // num_kv_heads
    cache_type = CacheType.of(k_cache, head_dim)
    query, gate = split_gate(query_gate, head_dim, output_gate)
    query = rotate_exact(rms_norm_exact(query, q_norm, eps), angles) * inverse_sqrt(constant(head_dim))
    key = rotate_exact(rms_norm_exact(grouped(key, num_kv_heads, head_dim), k_norm, eps), angles)
    where = written(rows)
    k_cache[where] = cache_type.encode(key)
    v_cache[where] = cache_type.encode(grouped(value, num_kv_heads, head_dim))
    if cache_type.is_turned:
        query = turn(query) * (1 / BLOCK_VALUES)
    group_size = query.shape[1] // num_kv_heads
    outputs = [query[:0]]
    for row, (q, position) in enumerate(zip(query, rows.positions.tolist(), strict=True)):
        first = first_position(position, window)
        slots, places = seen(rows, row)
        keys, values = (
            cache_type.decode(cache[slots[first:], places[first:]], head_dim).repeat_interleave(
                group_size, dim=1
            )
            for cache in (k_cache, v_cache)
        )
        outputs.append(attend(q, keys, values, first).unsqueeze(0))
    output = torch.cat(outputs)
    if cache_type.is_turned:
        output = turn_back(output)
    return (output if gate is None else output * sigmoid(gate)).flatten(-2)


def first_position(position: int, window: int | None) -> int:
    """The first position that a row at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int = 0) -> torch.Tensor:
    """One row [H, D] over keys and values [P, H, D] of the positions from `first`.

    Chunks on their own, then merged in ascending order.
    """
    parts = list(grid_cells(first, first + key.shape[0], CHUNK_SIZE))
    maximum, denominator, numerator = attend_chunk(query, key, value, first, parts[0])
    for part in parts[1:]:
        chunk_maximum, chunk_denominator, chunk_numerator = attend_chunk(query, key, value, first, part)
        next_maximum = torch.maximum(maximum, chunk_maximum)
        ours, theirs = exp(maximum - next_maximum), exp(chunk_maximum - next_maximum)
        denominator = fma(chunk_denominator, theirs, denominator * ours)
        numerator = fma(chunk_numerator, theirs.unsqueeze(-1), numerator * ours.unsqueeze(-1))
        maximum = next_maximum
    return numerator * (1 / denominator).unsqueeze(-1)


def grid_cells(first: int, end: int, size: int) -> Iterator[range]:
    """The positions first … end − 1, cut at multiples of `size`."""
    for start in range(first // size * size, end, size):
        yield range(max(first, start), min(end, start + size))


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, positions: range
) -> Partial:
    """The blocks of one chunk in ascending order, with a running maximum."""
    maximum = denominator = torch.empty(0)
    numerator = torch.zeros_like(query)
    for cell in grid_cells(positions.start, positions.stop, BLOCK_SIZE):
        block = slice(cell.start - first, cell.stop - first)
        scores = score(query, key[block])  # [H, positions]
        block_maximum = scores.amax(dim=-1)
        is_first = cell.start == positions.start
        next_maximum = block_maximum if is_first else torch.maximum(maximum, block_maximum)
        weights = exp(scores - next_maximum.unsqueeze(-1))
        # Accumulators belong to places on the grid of positions: earlier places count as zeros.
        total = sum_lanes(torch.nn.functional.pad(weights, (cell.start % NUM_LANES, 0)))
        if is_first:
            denominator = total
        else:
            correction = exp(maximum - next_maximum)
            denominator = fma(denominator, correction, total)
            numerator = numerator * correction.unsqueeze(-1)
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
