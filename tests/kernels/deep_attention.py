"""The definition of attention over integers, fast enough for rows that see 262,144 positions.

`exact.attend` computes one chunk of 256 positions after the other, 46 s for such a row. Chunks do not depend
on each other: here those of a row are computed together, by the definition's own arithmetic, and the factors
of their merge are found beforehand. `test_fast_definition.py` compares both, bit for bit. For finite numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from coldstream.kernels.arithmetic.reference import exp, fma, sum_lanes
from coldstream.kernels.attention import exact
from coldstream.kernels.attention.cache_types import CACHE_TYPES, CacheType
from coldstream.kernels.attention.chunks import BLOCK_SIZE, CHUNK_SIZE
from coldstream.kernels.attention.exact import Partial, divided, grid_cells, heads_of
from coldstream.kernels.attention.exact_integers import NUM_PLANES, IntegerHeads
from coldstream.kernels.attention.planes import LOW_UNIT, Planes, multiply_planes, round_planes

LARGEST_CONTEXT = 262_144
SLAB_SIZE = 64 * CHUNK_SIZE  # positions whose chunks are computed together: more do not fit a CPU's cache
POOL_SIZE = 4096  # different rows of a cache


@dataclass(frozen=True)
class DeepHeads:
    """One row's rotated queries [H, D], and rows [P, G, row] of the caches at the positions that it sees."""

    cache_type: CacheType
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def part(self, positions: slice) -> IntegerHeads:
        """The same of some positions, as the definition takes them."""
        heads = heads_of(self.cache_type, self.query, self.keys[positions], self.values[positions])
        assert isinstance(heads, IntegerHeads)
        return heads


def attend_at_depth(
    heads: DeepHeads, first: int = 0, sinks: torch.Tensor | None = None, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """`exact.attend`: the result [H, D] of one row that sees the positions from `first`, all of them."""
    assert chosen is None, "no part of the positions is computed together"
    return merge_together(*chunks_together(heads, first), sinks)


def chunks_together(heads: DeepHeads, first: int) -> Partial:
    """`exact.attend_chunk` of all chunks: maxima [C, H], denominators [C, H], numerators [C, H, D]."""
    slabs = [
        _chunks_of_slab(heads.part(slice(cell.start - first, cell.stop - first)), cell.start)
        for cell in grid_cells(first, first + len(heads.keys), SLAB_SIZE)
    ]
    maximum, denominator, numerator = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    return maximum, denominator, numerator


def _chunks_of_slab(heads: IntegerHeads, first: int) -> Partial:
    """Block number i of all chunks at once, for ascending i. Chunks begin with the first block they have."""
    end = first + heads.num_positions
    margins = first % CHUNK_SIZE, -end % CHUNK_SIZE
    keys, values = (_on_grid_of(planes, margins) for planes in (heads.key, heads.value))
    seen = _on_grid(torch.ones(heads.num_positions, dtype=torch.bool), margins).unsqueeze(-2)
    num_chunks, (num_heads, head_dim) = len(seen), heads.query.codes.shape
    maximum = torch.full((num_chunks, num_heads), -torch.inf)
    denominator = torch.zeros(num_chunks, num_heads)
    numerator = torch.zeros(num_chunks, num_heads, head_dim)
    has_begun = torch.zeros(num_chunks, 1, dtype=torch.bool)
    for i in range(CHUNK_SIZE // BLOCK_SIZE):
        key, value, sees = _block(keys, i), _block(values, i), seen[:, i]  # sees: [C, 1, 64]
        has_block = sees.any(dim=-1)
        products = multiply_planes("hd,cphd->chp", heads.query, key)
        scores = products * (heads.query.scale * (1 / LOW_UNIT)).unsqueeze(-1) * key.scale.transpose(-1, -2)
        highest = torch.where(sees, scores, -torch.inf).amax(dim=-1)
        highest = torch.where(has_block, torch.maximum(maximum, highest), 0.0)
        weights = torch.where(sees, exp(torch.where(sees, scores - highest.unsqueeze(-1), 0.0)), 0.0)
        correction = exp(torch.where(has_begun, maximum - highest, 0.0))
        total = sum_lanes(weights)
        total = torch.where(has_begun, fma(denominator, correction, total), total)
        scaled = round_planes(weights * value.scale.transpose(-1, -2), NUM_PLANES)
        added = multiply_planes("chp,cphd->chd", scaled, value)
        corrected = fma(
            (scaled.scale * (1 / LOW_UNIT)).unsqueeze(-1), added, numerator * correction.unsqueeze(-1)
        )
        maximum = torch.where(has_block, highest, maximum)
        denominator = torch.where(has_block, total, denominator)
        numerator = torch.where(has_block.unsqueeze(-1), corrected, numerator)
        has_begun = has_begun | has_block
    return maximum, denominator, numerator


def _on_grid(rows: torch.Tensor, margins: tuple[int, int]) -> torch.Tensor:
    """[P, …] → [C, 4, 64, …] with zeros before and behind."""
    before, after = (rows.new_zeros(count, *rows.shape[1:]) for count in margins)
    blocks = CHUNK_SIZE // BLOCK_SIZE, BLOCK_SIZE
    return torch.cat((before, rows, after)).view(-1, *blocks, *rows.shape[1:])


def _on_grid_of(planes: Planes, margins: tuple[int, int]) -> Planes:
    return Planes(_on_grid(planes.codes, margins), _on_grid(planes.scale, margins), planes.num_planes)


def _block(planes: Planes, i: int) -> Planes:
    return Planes(planes.codes[:, i], planes.scale[:, i], planes.num_planes)


def merge_together(
    maximum: torch.Tensor, denominator: torch.Tensor, numerator: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """`exact.merge_chunks` of [C, H], [C, H] and [C, H, D]: the result [H, D]."""
    highest = maximum.cummax(dim=0).values
    ours, theirs = exp(highest[:-1] - highest[1:]), exp(maximum[1:] - highest[1:])
    weights, sums = denominator[0], numerator[0]
    for i, (own, their) in enumerate(zip(ours, theirs, strict=True), 1):
        weights = fma(denominator[i], their, weights * own)
        sums = fma(numerator[i], their.unsqueeze(-1), sums * own.unsqueeze(-1))
    return divided((highest[-1], weights, sums), sinks)


@contextmanager
def fast_definition() -> Iterator[None]:
    """Within it, `attention_exact` attends by `attend_at_depth`: caches of integer types only.

    On one thread, as the tensors are small and a tests' process shares its cores with others.
    """
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "heads_of", DeepHeads)
        patch.setattr(exact, "attend", attend_at_depth)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


@cache
def _pool(name: str, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    return CACHE_TYPES[name].encode(torch.randn(POOL_SIZE, num_kv_heads, head_dim, generator=generator))


def random_rows(
    name: str, shape: tuple[int, ...], num_kv_heads: int, head_dim: int, seed: int
) -> torch.Tensor:
    """A cache [*shape, G, row] of rows of a cache type drawn from few, as rounding so many takes long."""
    generator = torch.Generator().manual_seed(seed)
    return _pool(name, num_kv_heads, head_dim)[torch.randint(POOL_SIZE, shape, generator=generator)]
