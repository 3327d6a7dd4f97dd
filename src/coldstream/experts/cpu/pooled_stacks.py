"""PooledStacks: experts of an open file, for slots in RAM into which their bytes are read.

The threads that compute decide in C++ which experts are read, and when (`kernels/csrc/quant/expert_pool.h`).
This module names stacks and sizes, and orders the slots for overwriting.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels import _csrc

Array = np.ndarray[Any, Any]

NUM_READERS: Final = 8  # threads: what keeps the queue of a fast disk full
MOST_ORDERED: Final = 1024  # slots of a size: more than a step takes, and sorted ten times as fast as all


class PooledStacks:
    """A pool over tensors [experts, rows, cols] of each layer, which needs `allocate` before it is used.

    parts: (layer, part) in the pool by tensor name. An expert's number is layer · num_experts + expert.
    """

    def __init__(self, file: GGUFFile, stacks: Sequence[Sequence[TensorInfo]]) -> None:
        self.num_experts = stacks[0][0].shape[0]
        files = [(file.descriptor(shard), path) for shard, path in enumerate(file.shown_paths)]
        layers = [
            [(info.shard, info.offset, info.num_bytes // self.num_experts) for info in layer]
            for layer in stacks
        ]
        self.pool = _csrc.ExpertPool(files, layers, self.num_experts, NUM_READERS)
        self.parts: Mapping[str, tuple[int, int]] = {
            info.name: (number, part)
            for number, layer in enumerate(stacks)
            for part, info in enumerate(layer)
        }
        self.num_layers = len(layers)
        self.num_slots: tuple[int, ...] = ()  # by size, as `pool.slot_bytes`
        self._worth: Array = np.zeros(0)  # of the last `order`
        self._ordered: list[Array] = []  # by size: ascending, of the experts in slots
        self.lasting = np.zeros(self.num_layers * self.num_experts, bool)  # see `order`

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of an expert's slot, by layer."""
        return tuple(self.pool.slot_bytes[self.pool.class_of(layer)] for layer in range(self.num_layers))

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        sizes = self.pool.slot_bytes[: len(self.num_slots)]
        return sum(count * size for count, size in zip(self.num_slots, sizes, strict=True))

    def weight(self, info: TensorInfo) -> _csrc.Weight:
        """A stack of the pool, for the CPU's kernels."""
        layer, part = self.parts[info.name]
        _, rows, cols = info.shape
        return _csrc.Weight.from_pool(self.pool, layer, part, int(info.quant_type), rows, cols)

    def allocate(self, num_slots: Mapping[int, int], num_staging: int) -> None:
        """Allocates `num_slots` by bytes of an expert. Prefill reuses `num_staging` of them. MemoryError."""
        self.num_slots = tuple(num_slots[size] for size in self.pool.slot_bytes)
        self.pool.allocate(self.num_slots, num_staging)

    def in_memory(self) -> Array:
        """Which experts are in slots, bool [layers, experts]. Between steps."""
        there = np.zeros(self.num_layers * self.num_experts, bool)
        owners = np.concatenate([self.pool.owners(each) for each, _ in enumerate(self.num_slots)])
        there[owners[owners > -1]] = True
        return there.reshape(self.num_layers, self.num_experts)

    def order(self, worth: Array, num_spare: Sequence[int] | None = None) -> None:
        """Has slots overwritten first whose experts are worth least, at most MOST_ORDERED in their order.

        worth: by number of the expert. num_spare: by size, the number of slots that steps may overwrite soon,
        at most MOST_ORDERED; `lasting` becomes the experts in the other slots. None: in none of them.
        """
        self._worth, self._ordered = worth, []
        self.lasting = np.zeros_like(self.lasting)
        for size_class in range(len(self.num_slots)):
            owners = self.pool.owners(size_class)
            in_use = np.flatnonzero(owners >= 0)
            experts = owners[in_use]
            scores = worth[experts]
            order = _least(scores, MOST_ORDERED)
            self._ordered.append(scores[order])
            self.pool.set_order(size_class, in_use[order])
            if num_spare is not None:
                self.lasting[experts] = True
                self.lasting[experts[order[: num_spare[size_class]]]] = False

    def num_worse(self, layer: int, expert: int) -> int:
        """How many of the slots that `order` named had experts of less worth than this one."""
        worth = self._worth[layer * self.num_experts + expert]
        return int(np.searchsorted(self._ordered[self.pool.class_of(layer)], worth))


def _least(values: Array, most: int) -> Array:
    """Where the least values are, ascending: at most so many."""
    if len(values) <= most:
        return np.argsort(values, kind="stable")
    first = np.argpartition(values, most)[:most]
    return first[np.argsort(values[first], kind="stable")]
