"""The attention of `reference.py` to the last bit, as docs/arithmetic.md defines it.

A block of positions is computed in floats here, and in integers in `exact_integers.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from coldstream.kernels.arithmetic.reference import (
    NUM_LANES,
    constant,
    exp,
    fma,
    inverse_sqrt,
    sigmoid,
    softplus,
    sum_lanes,
)
from coldstream.kernels.attention.cache_types import CacheType
from coldstream.kernels.attention.chunks import BLOCK_SIZE, CHUNK_SIZE
from coldstream.kernels.attention.exact_integers import IntegerHeads
from coldstream.kernels.attention.reference import finish, normed_heads, split_gate
from coldstream.kernels.indexer.reference import seen_positions
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, Rows
from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.rope.reference import rotate_exact
from coldstream.kernels.sequences import seen, written

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maximum [H], denominator [H], numerator [H, D]


class Heads(Protocol):
    """The queries of one row, and the keys and values of all positions that it sees, in order."""

    @property
    def num_positions(self) -> int: ...

    def scores(self, block: slice) -> torch.Tensor:
        """float32 [H, n] of the n positions of a block, counted from the first that the row sees."""
        ...

    def add(self, weights: torch.Tensor, block: slice, numerator: torch.Tensor) -> torch.Tensor:
        """numerator [H, D] and the values of a block times weights [H, n]."""
        ...


@dataclass(frozen=True)
class FloatHeads:
    """`Heads` of a float cache type."""

    query: torch.Tensor  # [H, D]
    key: torch.Tensor  # [P, H, D]
    value: torch.Tensor  # [P, H, D]

    @property
    def num_positions(self) -> int:
        return self.key.shape[0]

    def scores(self, block: slice) -> torch.Tensor:
        """One chain of fma over each head's dimensions."""
        key = self.key[block]
        scores = torch.zeros(self.query.shape[0], key.shape[0])
        for i in range(self.query.shape[-1]):
            scores = fma(self.query[:, i : i + 1], key[..., i].T, scores)
        return scores

    def add(self, weights: torch.Tensor, block: slice, numerator: torch.Tensor) -> torch.Tensor:
        """One chain of fma over the positions."""
        for weight, v in zip(weights.T, self.value[block], strict=True):
            numerator = fma(weight.unsqueeze(-1), v, numerator)
        return numerator


def attention_exact(
    inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows
) -> torch.Tensor:
    """See `reference.attention`. Mutates both caches."""
    head_dim = inputs.key.shape[-1] // caches.k.shape[-2]
    cache_type = CacheType.of(caches.k, head_dim)
    query, gate = split_gate(inputs, head_dim, heads)
    query, key, value = normed_heads(query, inputs, heads, rms_norm_exact)
    query, key = (rotate_exact(x, inputs.angles) for x in (query, key))
    query = query * (inverse_sqrt(constant(head_dim)) if heads.scale is None else constant(heads.scale))
    where = written(rows)
    caches.k[where] = cache_type.encode(key)
    caches.v[where] = cache_type.encode(value)
    query = cache_type.rotate_query(query)
    outputs = [query[:0]]
    for row, (q, position) in enumerate(zip(query, rows.positions.tolist(), strict=True)):
        first = first_position(position, heads.window)
        pieces, places = seen(rows, row)
        keys, values = (cache[pieces[first:], places[first:]] for cache in (caches.k, caches.v))
        chosen = None
        if inputs.chosen is not None:
            chosen = seen_positions(inputs.chosen, row, position + 1)[first:]
        of_row = heads_of(cache_type, q, keys, values)
        outputs.append(attend(of_row, first, heads.sinks, chosen).unsqueeze(0))
    output = cache_type.rotate_back(torch.cat(outputs))
    return finish(output, gate, heads, sigmoid, softplus)


def heads_of(cache_type: CacheType, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Heads:
    """The heads of a row: rotated queries [H, D], over rows [P, G, row] of its caches."""
    head_dim, group_size = query.shape[-1], query.shape[0] // keys.shape[-2]
    keys, values = (rows.repeat_interleave(group_size, dim=1) for rows in (keys, values))
    if cache_type.is_integer:
        return IntegerHeads.of(query, cache_type.planes(keys, head_dim), cache_type.planes(values, head_dim))
    return FloatHeads(query, cache_type.decode(keys, head_dim), cache_type.decode(values, head_dim))


def first_position(position: int, window: int | None) -> int:
    """The first position that a row at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def attend(
    heads: Heads, first: int = 0, sinks: torch.Tensor | None = None, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """The result [H, D] of one row that sees the positions from `first`; sinks [H] if there are any.

    Chunks are computed separately, then merged in ascending order. chosen: whether it sees each of these
    positions, bool; None: all. A chunk and a block of which it sees none are left out.
    """
    parts = grid_cells(first, first + heads.num_positions, CHUNK_SIZE)
    if chosen is not None:
        parts = (part for part in parts if chosen[part.start - first : part.stop - first].any())
    return merge_chunks([attend_chunk(heads, first, part, chosen) for part in parts], sinks)


def merge_chunks(chunks: Sequence[Partial], sinks: torch.Tensor | None = None) -> torch.Tensor:
    """The result [H, D] of chunks in ascending order, at least one; sinks [H] if there are any."""
    maximum, denominator, numerator = chunks[0]
    for chunk_maximum, chunk_denominator, chunk_numerator in chunks[1:]:
        next_maximum = torch.maximum(maximum, chunk_maximum)
        ours, theirs = exp(maximum - next_maximum), exp(chunk_maximum - next_maximum)
        denominator = fma(chunk_denominator, theirs, denominator * ours)
        numerator = fma(chunk_numerator, theirs.unsqueeze(-1), numerator * ours.unsqueeze(-1))
        maximum = next_maximum
    return divided((maximum, denominator, numerator), sinks)


def divided(merged: Partial, sinks: torch.Tensor | None) -> torch.Tensor:
    """The result [H, D] of all chunks, after one last merge with the heads' sinks [H]."""
    maximum, denominator, numerator = merged
    if sinks is not None:
        last_maximum = torch.maximum(maximum, sinks)
        ours = exp(maximum - last_maximum)
        denominator = denominator * ours + exp(sinks - last_maximum)
        numerator = numerator * ours.unsqueeze(-1)
    return numerator * (1 / denominator).unsqueeze(-1)


def grid_cells(first: int, end: int, size: int) -> Iterator[range]:
    """The positions first … end − 1, split at multiples of `size`."""
    for start in range(first // size * size, end, size):
        yield range(max(first, start), min(end, start + size))


def attend_chunk(heads: Heads, first: int, positions: range, chosen: torch.Tensor | None = None) -> Partial:
    """The blocks of one chunk in ascending order, with a running maximum; chosen: as in `attend`."""
    if chosen is None:
        chosen = torch.ones(heads.num_positions, dtype=torch.bool)
    maximum = denominator = torch.empty(0)
    numerator = torch.zeros(1, 1)
    is_first = True
    for cell in grid_cells(positions.start, positions.stop, BLOCK_SIZE):
        block = slice(cell.start - first, cell.stop - first)
        if not chosen[block].any():
            continue
        scores = heads.scores(block).masked_fill(~chosen[block], -torch.inf)  # [H, positions]
        block_maximum = scores.amax(dim=-1)
        next_maximum = block_maximum if is_first else torch.maximum(maximum, block_maximum)
        weights = exp(scores - next_maximum.unsqueeze(-1)).masked_fill(~chosen[block], 0.0)
        # Accumulators belong to fixed places of a block; places that are not seen count as zeros.
        total = sum_lanes(torch.nn.functional.pad(weights, (cell.start % NUM_LANES, 0)))
        if is_first:
            denominator = total
        else:
            correction = exp(maximum - next_maximum)
            denominator = fma(denominator, correction, total)
            numerator = numerator * correction.unsqueeze(-1)
        numerator = heads.add(weights, block, numerator)
        maximum, is_first = next_maximum, False
    return maximum, denominator, numerator
