"""Arguments of attention on a GPU, and the tensors between its launches.

T rows, H query heads, G key/value heads, D values a head.
"""

import ctypes
from dataclasses import dataclass, replace

from coldstream.kernels.attention.cache_layout import CacheLayout
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.workspace_sizes import partial_shapes
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.indexer.records import ChosenBlocks
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, OutputGate


@declared_in("attention/grid.cuh")
class CacheStrides(ctypes.Structure): ...


@declared_in("attention/choice.cuh")
class ChosenWords(ctypes.Structure):
    @classmethod
    def of(cls, chosen: ChosenBlocks | None) -> "ChosenWords":
        """Of no choice: without words."""
        if chosen is None:
            return cls()
        words, shift = chosen.words, chosen.block_size.bit_length() - 1
        return cls(words=words.data_ptr(), num_words=words.shape[1], block_shift=shift)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes common to all rows, which choose kernels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_type: CacheLayout
    output_gate: OutputGate = "query"
    has_sinks: bool = False
    has_choice: bool = False  # whether rows see the blocks of `ChosenBlocks` alone

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads")
        self.cache_type.row_bytes(self.head_dim)

    @classmethod
    def of(cls, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches) -> "AttentionShape":
        """The sizes of a layer's tensors."""
        head_dim = inputs.key.shape[1] // caches.k.shape[2]
        num_heads = inputs.query_gate.shape[1] // (2 * head_dim if heads.output_gate == "query" else head_dim)
        cache_type = CacheLayout.of(caches.k, head_dim)
        has_sinks, has_choice = heads.sinks is not None, inputs.chosen is not None
        sizes = num_heads, caches.k.shape[2], head_dim, cache_type
        return cls(*sizes, heads.output_gate, has_sinks, has_choice)

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class IntegerQueries:
    """Rotated queries of new rows, rounded: docs/arithmetic.md, Attention over integers."""

    codes: DeviceArray  # int8 [T, H, 2, D], high planes and low planes
    scales: DeviceArray  # float32 [T, H]
    chosen: ChosenBlocks | None = None  # what the rows see; None: all positions up to their own

    def part(self, rows: slice) -> "IntegerQueries":
        """Those of some of the rows."""
        chosen = self.chosen and replace(self.chosen, words=self.chosen.words[rows])
        return IntegerQueries(self.codes[rows], self.scales[rows], chosen)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of chunks, for the merge; contents undefined at first."""

    values: DeviceArray  # float32 [T, H, chunks, D]
    stats: DeviceArray  # float32 [T, H, chunks, 2]

    @staticmethod
    def shapes(shape: AttentionShape, num_rows: int, num_positions: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the two tensors, for up to `num_rows` rows and contexts of up to `num_positions`."""
        return partial_shapes(num_rows, shape.num_heads, -(-num_positions // CHUNK_SIZE), shape.head_dim)
