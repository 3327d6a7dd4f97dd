"""What prefix caches and tiers keep, with contents that say which tokens they are of."""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cache_shape import Shape
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import AttentionState, CacheSize, Demand, Sequence, SequenceCache


class Memory:
    """A `SequenceCache` as `PrefixCache` uses it.

    Keys hold the tokens, and a state is a checksum of all tokens before it.
    """

    def __init__(self, num_blocks: int, num_states: int, *, is_recurrent: bool = True) -> None:
        shape = Shape() if is_recurrent else Shape(layer_kinds=("attention",))
        self.cache = SequenceCache(shape, CpuOps(1), CacheSize(num_blocks, num_states), "f32")
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
        self.cache.append(sequence, demand.num_rows)
        indices = np.arange(start, len(ids))
        places = np.array(sequence.blocks)[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS
        for layer in self.cache.tensors.layers:
            if isinstance(layer, AttentionState):
                layer.k[places] = layer.v[places] = ids[start:, None, None]
            else:
                layer.state[sequence.state] = layer.conv_state[sequence.state] = checksum(ids)

    def check(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """Asserts that the sequence holds the first of `token_ids`."""
        ids, length = np.array(token_ids, np.int32), sequence.length
        if not length:
            return
        indices = np.arange(length)
        places = np.array(sequence.blocks)[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS
        for layer in self.cache.tensors.layers:
            if isinstance(layer, AttentionState):
                for cached in (layer.k, layer.v):
                    assert (cached[places] == ids[:length, None, None]).all()
            else:
                for states in (layer.state, layer.conv_state):
                    assert (states[sequence.state] == checksum(ids[:length])).all()


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
