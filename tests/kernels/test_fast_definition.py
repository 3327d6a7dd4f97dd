"""The fast definition of attention over integers, for deep contexts, has the bits of the definition."""

import pytest
import torch
from attention_batches import BatchCase, Kind, Part, some_kinds, some_parts
from cpu_cases import same_bits
from deep_attention import (
    LARGEST_CONTEXT,
    SLAB_SIZE,
    DeepHeads,
    attend_at_depth,
    chunks_together,
    fast_definition,
    random_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.exact import attend, attend_chunk, grid_cells

INTEGER_TYPES = ("i16", "i8", "i4", "i3")


def deep_heads(name: str, num_positions: int, seed: int) -> DeepHeads:
    """Two queries on one head of keys and values, which give many positions a part of the weight."""
    query = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)) / 16
    caches = (random_rows(name, (num_positions,), 1, 32, which) for which in (1, 2))
    return DeepHeads(CACHE_TYPES[name], query, *caches)


def check(heads: DeepHeads, first: int) -> None:
    """Every chunk, and the whole row."""
    exact = heads.part(slice(None))
    maximum, denominator, numerator = chunks_together(heads, first)
    cells = list(grid_cells(first, first + exact.num_positions, CHUNK_SIZE))
    assert len(maximum) == len(cells)
    for i, cell in enumerate(cells):
        found = maximum[i], denominator[i], numerator[i]
        assert all(same_bits(a, b) for a, b in zip(found, attend_chunk(exact, first, cell), strict=True))
    assert same_bits(attend_at_depth(heads, first), attend(exact, first))


@settings(max_examples=40)
@given(st.sampled_from(INTEGER_TYPES), st.integers(1, 800), st.integers(0, 600), st.integers(0, 99))
def test_chunks_have_the_bits_of_the_definition(name: str, count: int, first: int, seed: int) -> None:
    check(deep_heads(name, count, seed), first)


@pytest.mark.parametrize(("first", "count"), [(SLAB_SIZE - 700, 1500), (LARGEST_CONTEXT - 3001, 3001)])
def test_deep_chunks_have_the_bits_of_the_definition(first: int, count: int) -> None:
    check(deep_heads("i16", count, seed=1), first)


@settings(max_examples=10)
@given(
    st.sampled_from(INTEGER_TYPES),
    some_parts(),
    st.sampled_from([None, 1, 60, 300]),
    st.integers(0, 99),
    some_kinds(),
)
def test_whole_rows_have_the_bits_of_the_definition(
    name: str, parts: list[Part], window: int | None, seed: int, kind: Kind
) -> None:
    case = BatchCase(parts, name, (4, 2, 32), window, seed, kind=kind)
    with fast_definition():
        found = case.expected()
    assert all(same_bits(a, b) for a, b in zip(found, case.expected(), strict=True))
