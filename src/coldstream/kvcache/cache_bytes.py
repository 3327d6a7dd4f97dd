"""Blocks and recurrent states of a `ModelCache` as bytes, on any device: for memory beside it, and for files.

A block is one of layers that keep all positions. Where layers with windows are a group of their own, their
last blocks are a part of a state, as both are of the end of a sequence alone. The bytes are those of the
arrays, layer by layer, and only of committed positions: the rest of a block may be another caller's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coldstream.kernels.ops import BLOCK_POSITIONS, Array
from coldstream.kvcache.cache import AttentionState, DeltaNetState, ModelCache

Content = bytes | memoryview  # of unsigned bytes


@dataclass(frozen=True)
class StatePlace:
    """Where the state of a sequence is.

    window: blocks of layers with windows in order of position, each with the positions that are of the state.
    """

    state_id: int
    window: tuple[tuple[int, int], ...] = ()


def block_bytes(cache: ModelCache, num_positions: int = BLOCK_POSITIONS) -> int:
    """Bytes of the first positions of a block."""
    return sum(_num_bytes(part) for part in _block_parts(cache, 0, num_positions))


def state_bytes_of(cache: ModelCache, window_positions: int = 0) -> int:
    """Bytes of a recurrent state of all layers, and of so many positions of layers with windows."""
    of_position = sum(_num_bytes(part) for part in _block_parts(cache, 0, 1, is_windowed=True))
    return sum(_num_bytes(part) for part in _state_parts(cache, 0)) + window_positions * of_position


def read_block(cache: ModelCache, block: int, num_positions: int) -> Content:
    """Keys and values of the first positions of a block."""
    return _read(_block_parts(cache, block, num_positions))


def read_state(cache: ModelCache, place: StatePlace) -> Content:
    """The state at a place."""
    return _read(_parts_of(cache, place))


def write_block(cache: ModelCache, block: int, num_positions: int, content: Content) -> None:
    """Mutates the first positions of a block; content: as `read_block` gives it, of as many positions."""
    _write(_block_parts(cache, block, num_positions), content)


def write_state(cache: ModelCache, place: StatePlace, content: Content) -> None:
    """Mutates the state at a place; content: as `read_state` gives it, of as many positions."""
    _write(_parts_of(cache, place), content)


def _block_parts(
    cache: ModelCache, block: int, num_positions: int, *, is_windowed: bool = False
) -> Iterator[Array]:
    for layer in cache.layers:
        if isinstance(layer, AttentionState) and layer.is_windowed == is_windowed:
            yield from (array[block, :num_positions] for array in layer.arrays)


def _parts_of(cache: ModelCache, place: StatePlace) -> Iterator[Array]:
    yield from _state_parts(cache, place.state_id)
    for block, num_positions in place.window:
        yield from _block_parts(cache, block, num_positions, is_windowed=True)


def _state_parts(cache: ModelCache, state_id: int) -> Iterator[Array]:
    for layer in cache.layers:
        if isinstance(layer, DeltaNetState):
            yield layer.conv_state[state_id]
            yield layer.state[state_id]
            if layer.ngram is not None:
                yield layer.ngram.tokens[state_id]
                yield layer.ngram.conv[state_id]


def _num_bytes(part: Array) -> int:
    return int(part.nbytes)


def _read(parts: Iterator[Array]) -> memoryview:
    """The bytes in one piece of memory. Its pages are touched once, which takes longest for large states."""
    arrays = list(parts)
    content, start = np.empty(sum(map(_num_bytes, arrays)), np.uint8), 0
    for part in arrays:
        host = np.asarray(part)
        content[start : start + host.nbytes].view(host.dtype).reshape(host.shape)[...] = host
        start += host.nbytes
    return content.data


def _write(parts: Iterator[Array], content: Content) -> None:
    start = 0
    for part in parts:
        host = np.frombuffer(content, part.dtype, int(np.prod(part.shape)), start).reshape(part.shape)
        part[:] = host
        start += host.nbytes
    assert start == len(content), "bytes of another cache"
