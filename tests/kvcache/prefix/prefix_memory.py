"""What prefix caches and tiers keep, with contents that say which tokens they are of."""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from cache_shape import Shape
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import BLOCK_POSITIONS, Array
from coldstream.kvcache import AttentionState, CacheSize, Demand, Sequence, SequenceCache
from coldstream.kvcache.windows import blocks_of_pool

KINDS = ("recurrent", "windows", "none")
WINDOW = 300
MOST_ROWS = 4096  # of a call of `Memory.extend`


class Memory:
    """A `SequenceCache` as `PrefixCache` uses it.

    Keys hold the tokens, and a state is a checksum of all tokens before it. kind: of the layers beside one
    whose keys and values are kept of all positions: "recurrent", "windows" or "none".
    """

    def __init__(self, num_blocks: int, num_states: int, kind: str = "recurrent") -> None:
        size, shape = CacheSize(num_blocks, num_states), Shape()
        if kind == "none":
            shape = Shape(layer_kinds=("attention",))
        if kind == "windows":
            shape = Shape(("attention", "attention"), ((2, 8), (1, 8)), (None, WINDOW))
            size = replace(size, num_window_blocks=blocks_of_pool(WINDOW, num_states, MOST_ROWS))
        self.size = size
        self.cache = SequenceCache(shape, CpuOps(1), size, "f32", MOST_ROWS)
        self.new_sequence = self.cache.new
        self.fork = self.cache.fork
        self.release = self.cache.release
        self.freed_by = self.cache.freed_by

    @property
    def free(self) -> CacheSize:
        return self.cache.free

    @contextmanager
    def contents(self) -> Iterator[SequenceCache]:
        yield self.cache

    def need(self, sequence: Sequence, count: int) -> CacheSize:
        return self.cache.need_of([Demand(sequence, count)])

    def extend(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """Computes what follows of `token_ids`, for which there has to be room."""
        self.check(sequence, token_ids)
        ids, start = np.array(token_ids, np.int32), sequence.length
        demand = Demand(sequence, len(ids) - start)
        self.cache.check_room([demand])
        self.cache.reserve([demand])
        for layer in self.cache.tensors.layers:
            if isinstance(layer, AttentionState):
                places = places_of(layer, sequence, start, len(ids))
                layer.k[places] = layer.v[places] = ids[start:, None, None]
            else:
                layer.state[sequence.state] = layer.conv_state[sequence.state] = checksum(ids)
        self.cache.append(sequence, demand.num_rows)

    def check(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """Asserts that the sequence holds the first of `token_ids`."""
        ids, length = np.array(token_ids, np.int32), sequence.length
        if not length:
            return
        for layer in self.cache.tensors.layers:
            if isinstance(layer, AttentionState):
                first = max(0, length - WINDOW + 1) if layer.is_windowed else 0
                for cached in (layer.k, layer.v):
                    held = cached[places_of(layer, sequence, first, length)]
                    assert (held == ids[first:length, None, None]).all()
            else:
                for states in (layer.state, layer.conv_state):
                    assert (states[sequence.state] == checksum(ids[:length])).all()


def places_of(layer: AttentionState, sequence: Sequence, first: int, end: int) -> tuple[Array, Array]:
    """Blocks and positions in them."""
    blocks = sequence.windows if layer.is_windowed else sequence.blocks
    indices = np.arange(first, end)
    return np.array(blocks, np.int64)[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS


@dataclass
class Source:
    """A prefix to be saved: bytes that say where they are from, and which blocks were read."""

    length: int
    position_bytes: int = 10
    state_bytes: int = 5
    read: list[int] = field(default_factory=list)

    def read_block(self, index: int) -> bytes:
        self.read.append(index)
        positions = min(BLOCK_POSITIONS, self.length - index * BLOCK_POSITIONS)
        return bytes([index]) * positions * self.position_bytes

    def read_state(self) -> bytes:
        return bytes([self.length % 251]) * self.state_bytes


def ids_of(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def checksum(ids: np.ndarray) -> int:
    """A number that float32 holds exactly."""
    return zlib.crc32(ids.tobytes()) & 0xFFFFFF
