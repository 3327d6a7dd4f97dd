"""Attention in Triton: the bits of the exact reference."""

import pytest
import torch
from attention_cases import EPS, EXTREMES, Case, make_case
from guarded import DEVICE, Guarded
from triton_interpreter import assert_same_bits

from coldstream.kernels.attention import triton as kernels
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import AttentionInputs, AttentionShape, Caches, DecodeWorkspace
from coldstream.kernels.ops import Rows


def check(case: Case) -> None:
    """Decode and prefill of a case, one after the other over the same caches."""
    expected, *expected_caches = case.expected()
    shape = AttentionShape(case.num_heads, case.num_kv_heads, case.head_dim, case.cache_type, case.window)
    query_gate, *tensors, angles = (tensor.to(DEVICE) for tensor in case.inputs())
    inputs = AttentionInputs(query_gate, *tensors, angles, EPS)
    caches = Caches(*(cache.to(DEVICE) for cache in case.caches()))
    rows = Rows(case.positions.to(DEVICE), case.slots.to(DEVICE))
    query = Guarded(len(query_gate), case.num_heads, case.head_dim)
    kernels.prepare(shape, inputs, caches, rows, query.tensor)
    query.checked()
    for got, want in zip((caches.k, caches.v), expected_caches, strict=True):
        assert_same_bits(got, want)
    shapes = DecodeWorkspace.shapes(shape, len(query_gate), case.num_positions)
    parts = [Guarded(*sizes) for sizes in shapes]
    workspace = DecodeWorkspace(*(part.tensor for part in parts))
    decoded, prefilled = (Guarded(len(query_gate), case.num_heads * case.head_dim) for _ in range(2))
    kernels.decode(shape, query.tensor, query_gate, caches, rows, workspace, decoded.tensor)
    kernels.prefill(shape, query.tensor, query_gate, caches, rows, prefilled.tensor)
    for part in parts:
        part.checked()
    assert_same_bits(decoded.checked(), expected)
    assert_same_bits(prefilled.checked(), expected)


@pytest.mark.parametrize("cache_name", list(CACHE_TYPES))
def test_cache_types(cache_name: str) -> None:
    check(make_case((0, 62, 3), cache_name=cache_name, num_heads=2, num_kv_heads=1, head_dim=32))


@pytest.mark.parametrize("head_dim", [64, 96])
def test_turned_heads_of_several_blocks(head_dim: int) -> None:
    check(make_case((0, 254, 3), cache_name="tq3_0", num_heads=2, num_kv_heads=1, head_dim=head_dim))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, of a block's greatest value
@pytest.mark.parametrize("cache_name", ["q8_0", "q4_0", "tq3_0"])
def test_scales_of_extreme_values(cache_name: str) -> None:
    case = make_case((0, 0, len(EXTREMES)), cache_name=cache_name, num_heads=1, num_kv_heads=1)
    shape = AttentionShape(1, 1, case.head_dim, case.cache_type)
    query_gate, key, value, *norms, angles = (tensor.to(DEVICE) for tensor in case.inputs())
    value = value * torch.tensor(EXTREMES, device=DEVICE).unsqueeze(-1)
    caches = Caches(*(cache.to(DEVICE) for cache in case.caches()))
    rows = Rows(case.positions.to(DEVICE), case.slots.to(DEVICE))
    query = Guarded(len(value), 1, case.head_dim)
    inputs = AttentionInputs(query_gate, key, value, *norms, angles, EPS)
    kernels.prepare(shape, inputs, caches, rows, query.tensor)
    assert_same_bits(caches.v[0, : len(value), 0], case.cache_type.encode(value.cpu()))


@pytest.mark.parametrize("first", [0, 255, 511])
def test_chunk_edges(first: int) -> None:
    check(make_case((0, first, 2), num_heads=2, num_kv_heads=1, head_dim=16, rope_dims=8))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 16), (2, 2, 24), (8, 1, 8)])
def test_head_groups_and_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(
        make_case((0, 5, 3), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope_dims=8)
    )


def test_rows_of_several_slots() -> None:
    check(make_case((2, 60, 1), (0, 0, 2), (1, 63, 2), num_heads=2, num_kv_heads=1, head_dim=16, rope_dims=8))


@pytest.mark.parametrize("window", [1, 70])
def test_window(window: int) -> None:
    check(make_case((0, 255, 2), window=window, num_heads=2, num_kv_heads=1, head_dim=16, rope_dims=8))
