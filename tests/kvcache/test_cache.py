"""Shapes, sizes and state_ids of the cache."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_shape import Shape
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import (
    MAX_POSITIONS,
    MAX_SEQUENCES,
    AttentionState,
    CacheSize,
    DeltaNetState,
    ModelCache,
    affordable_context,
    kv_token_bytes,
    least_kv_bytes,
    num_blocks_of,
    window_token_bytes,
)
from coldstream.kvcache.cache_bytes import block_bytes, read_block, write_block
from coldstream.kvcache.windows import blocks_of_pool


def test_shapes_and_bytes() -> None:
    cache = ModelCache(Shape(), ReferenceOps(), num_states=5, context_length=100, kv_type="f16")
    first, second, third = cache.layers
    assert isinstance(first, DeltaNetState)
    assert isinstance(second, AttentionState)
    assert isinstance(third, DeltaNetState)
    assert first.conv_state.shape == (5, 3, 24)
    assert first.state.shape == (5, 3, 4, 4)
    assert second.k.shape == second.v.shape == (5, 100, 2, 8)
    assert second.k.dtype == torch.float16
    assert first.state.dtype == first.conv_state.dtype == torch.float32
    assert cache.num_bytes == 5 * (2 * 100 * 2 * 8 * 2 + 2 * (3 * 24 + 3 * 4 * 4) * 4)
    assert ModelCache(Shape(), ReferenceOps(), 5, 100, "f32").layers[1].k.dtype == torch.float32


@pytest.mark.parametrize(("kv_type", "num_bytes"), [("f32", 4), ("i16", 2)])
def test_an_indexer_keeps_a_row_of_every_position(kv_type: str, num_bytes: int) -> None:
    shape = Shape(kv_heads=((2, 16),), index_dim=24)
    cache = ModelCache.in_blocks(shape, CpuOps(1), CacheSize(3, 1), kv_type)
    layer = cache.layers[1]
    assert isinstance(layer, AttentionState)
    assert layer.index.shape == (3, 256, 1, 24)
    assert layer.index.nbytes == 3 * 256 * 24 * num_bytes
    assert any(tensor is layer.index for tensor in cache.tensors())
    plain = kv_token_bytes(Shape(kv_heads=((2, 16),)), kv_type)
    assert (
        kv_token_bytes(shape, kv_type) == plain + 24 * num_bytes == sum(a[0, 0].nbytes for a in layer.arrays)
    )
    for array in layer.arrays:
        array[0], array[1] = 1, 0
    cache.copy_block(0, 1, 100)
    assert all((array[1, :100] == 1).all() and (array[1, 100:] == 0).all() for array in layer.arrays)
    assert block_bytes(cache, 100) == 100 * kv_token_bytes(shape, kv_type)
    write_block(cache, 2, 100, read_block(cache, 0, 100))
    assert all((array[2, :100] == 1).all() for array in layer.arrays)


def test_every_tensor_is_its_own() -> None:
    tensors = ModelCache(Shape(), ReferenceOps(), 2, 10, "f32").tensors()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 6


def test_reset_clears_one_state() -> None:
    cache = ModelCache(Shape(), ReferenceOps(), 3, 10, "f32")
    for tensor in cache.tensors():
        tensor.fill_(1.0)
    cache.reset(1)
    for layer in cache.layers:
        if isinstance(layer, DeltaNetState):
            for tensor in (layer.conv_state, layer.state):
                assert (tensor[1] == 0).all()
                assert (tensor[[0, 2]] == 1).all()


def test_one_state_of_all_layers_is_copied() -> None:
    cache = ModelCache(Shape(), ReferenceOps(), 3, 10, "f32")
    for number, tensor in enumerate(cache.tensors()):
        for state_id, state in enumerate(tensor):
            state.fill_(10.0 * number + state_id)
    cache.copy_state(2, 0)
    for number, layer in ((0, cache.layers[0]), (4, cache.layers[2])):
        assert isinstance(layer, DeltaNetState)
        for place, tensor in enumerate((layer.conv_state, layer.state)):
            found = [float(state.flatten()[0]) for state in tensor]
            assert found == [10.0 * (number + place) + state_id for state_id in (2, 1, 2)]
            assert all((state == state.flatten()[0]).all() for state in tensor)


@pytest.mark.parametrize("state_id", [-1, 3])
def test_there_must_be_such_a_state(state_id: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        ModelCache(Shape(), ReferenceOps(), 3, 10, "f32").reset(state_id)


@pytest.mark.parametrize(("state_ids", "positions"), [(0, 10), (1, 0), (-1, 10)])
def test_an_empty_cache_is_refused(state_ids: int, positions: int) -> None:
    with pytest.raises(ValueError, match="hold nothing"):
        ModelCache(Shape(), ReferenceOps(), state_ids, positions)


@pytest.mark.parametrize(
    ("num_positions", "is_scarce", "expected"),
    [
        (1, False, CacheSize(1, 1)),
        (700, False, CacheSize(3, 3)),
        (2**20, False, CacheSize(4096, MAX_SEQUENCES)),
        (700, True, CacheSize(3, 1)),
        (100 * 256, True, CacheSize(100, 5)),
        (2**20, True, CacheSize(4096, MAX_SEQUENCES)),
    ],
)
def test_sequences_share_the_blocks_of_one(num_positions: int, is_scarce: bool, expected: CacheSize) -> None:
    """Of scarce memory all states but one take a quarter of what keys and values take at most."""
    shape = Shape(ssm_state_size=64)  # a state is as large as 6 blocks
    assert CacheSize.shared(shape, num_positions, "f16", is_scarce=is_scarce, num_rows=1) == expected


def test_without_recurrent_states_nothing_is_scarce_and_without_keys_everything() -> None:
    attention, recurrent = Shape(("attention",)), Shape(("delta_net",), kv_heads=(), kv_windows=())
    assert CacheSize.shared(attention, 700, "f16", is_scarce=True, num_rows=1) == CacheSize(3, 3)
    assert CacheSize.shared(recurrent, 700, "f16", is_scarce=True, num_rows=1) == CacheSize(3, 1)


def windowed_shape(num_layers: int, window: int) -> Shape:
    """As of gemma-4: every sixth layer sees all positions."""
    full = [layer % 6 == 5 for layer in range(num_layers)]
    return Shape(
        ("attention",) * num_layers,
        tuple((2, 512) if each else (8, 256) for each in full),
        tuple(None if each else window for each in full),
    )


def test_windows_of_a_large_model_take_no_more_in_a_long_text() -> None:
    """The bytes of gemma-4-26B-A4B, of which a cache of all positions takes 28.3 GiB."""
    shape = windowed_shape(30, 1024)
    assert (kv_token_bytes(shape, "i16"), window_token_bytes(shape, "i16")) == (232_000, 211_200)
    size = CacheSize.shared(shape, 131_072, "i16", is_scarce=True, num_rows=2048)
    assert size == CacheSize(512, 16, num_window_blocks=3 * 5 + 8 + 3)
    assert size.kv_bytes(shape, "i16") == 256 * (512 * 20_800 + 26 * 211_200)
    one = replace(size, num_window_blocks=blocks_of_pool(1024, 1, 2048) - 1)
    assert one.kv_bytes(shape, "i16") / 2**30 == pytest.approx(3.2, abs=0.05)


@pytest.mark.parametrize("window", [1, 256, 1024, 5000])
@pytest.mark.parametrize("is_scarce", [False, True])
def test_blocks_of_windows_are_there_where_they_take_less(window: int, is_scarce: bool) -> None:
    shape = windowed_shape(6, window)
    for length in (1, 600, 4096, 8192, 20_000, 131_072):
        size = CacheSize.shared(shape, length, "i16", is_scarce=is_scarce, num_rows=512)
        assert size.num_window_blocks < size.num_blocks == num_blocks_of(length)
        assert size.kv_bytes(shape, "i16") <= num_blocks_of(length) * 256 * kv_token_bytes(shape, "i16")
        if size.num_window_blocks:
            whole_windows = blocks_of_pool(window, 2 if is_scarce else size.num_states, 512)
            assert size.num_window_blocks >= whole_windows
            assert is_scarce or size.num_window_blocks == whole_windows
            assert size.num_states == min(16, size.num_blocks)
    assert size.num_window_blocks


@given(
    num_bytes=st.integers(0, 2**36),
    window=st.sampled_from((0, 1, 1024, 40_000)),
    num_layers=st.sampled_from((1, 6, 12)),
)
def test_a_context_that_is_affordable_is_the_longest(num_bytes: int, window: int, num_layers: int) -> None:
    shape = windowed_shape(num_layers, window or 1)
    if not window:
        shape = replace(shape, kv_windows=(None,) * num_layers)
    longest = affordable_context(shape, num_bytes, "i16")
    assert least_kv_bytes(shape, longest, "i16") <= num_bytes
    assert longest == MAX_POSITIONS or least_kv_bytes(shape, longest + 1, "i16") > num_bytes
