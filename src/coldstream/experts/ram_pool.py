"""RamPool: experts in page-locked RAM under a budget, beside a GPU's slots; all others are on the disk.

The CPU's threads read the experts that the GPU asks for into the pool, and compute them there
(`kernels/csrc/hybrid/expert_server.h`). This module keeps an expert in place while a copy to the GPU reads
it. Between steps it says which slots are overwritten first: those of experts that the GPU holds by now, whose
bytes are there twice, and then those of the lowest scores. An expert that leaves the GPU comes back in place
of one that is worth less, so that nobody reads it from the disk again. All but the first in that order last:
the GPU reads them in the pool (`slots/pool_reads.py`).

Layers are numbered as by `partial_experts.py:slot_shares`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from coldstream.experts.cpu.disk_tier import DiskStatistics, Progress
from coldstream.experts.cpu.pooled_stacks import MOST_ORDERED, PooledStacks
from coldstream.gguf.reader import TensorInfo
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.experts.table import ExpertTable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Room:
    """A place for an expert that comes back from the GPU: its slot, and addresses of gate, up and down."""

    layer: int
    expert: int
    slot: int
    addresses: tuple[int, ...]


class RamPool:
    """The slots of `num_slots`, by bytes of an expert, for `stacks`. Raises MemoryError."""

    def __init__(self, stacks: PooledStacks, num_slots: dict[int, int], num_experts_per_tok: int) -> None:
        self.stacks = stacks
        fewest = min(num_slots.values())
        # So few that some experts can be kept in place.
        num_staging = max(1, min(2 * num_experts_per_tok, fewest - num_experts_per_tok))
        assert fewest > num_staging, "a plan has room for more than one expert"
        stacks.allocate(num_slots, num_staging)
        num_layers = Counter(map(stacks.pool.class_of, range(stacks.num_layers)))
        # As many as a token uses may be overwritten beside those that the GPU reads, or half of the slots.
        self._num_spare = [
            min(num_experts_per_tok * num_layers[each], count // 2, MOST_ORDERED)
            for each, count in enumerate(stacks.num_slots)
        ]
        self.lasting: Array = stacks.lasting  # by number: what the GPU may be given to read; see `order`
        self._registered: RegisteredMemory | None = None
        self._is_emptied = False  # whether it was tried to lock the memory
        self._before = DiskStatistics.of(stacks)  # before the first step that counts
        self._most_held = [count - num_staging for count in stacks.num_slots]
        self._sources: dict[str, int] = {}  # by tensor: where expert 0 is mapped
        self._matrices: list[list[tuple[int, int]]] = []  # by layer: part and first byte of gate, up, down

    def weight(self, info: TensorInfo, source: int) -> _csrc.Weight:
        """A stack for the CPU's kernels, expert 0 of which is mapped at the address `source`."""
        self._sources[info.name] = source
        return self.stacks.weight(info)

    def add_layer(self, stacks: Sequence[ExpertTable]) -> None:
        """Adds the next layer's gate, up and down. Their `host` weights are from `weight`, or rows of it."""
        layer = len(self._matrices)
        parts = [
            (part, self._sources[name])
            for name, (number, part) in self.stacks.parts.items()
            if number == layer
        ]
        # Gate and up may be rows of one part: the one that begins last before it.
        nearest = [max((begin, part) for part, begin in parts if begin <= each.source) for each in stacks]
        self._matrices.append(
            [(part, each.source - begin) for each, (begin, part) in zip(stacks, nearest, strict=True)]
        )

    def hold(self, layer: int, expert: int) -> tuple[int, ...] | None:
        """The addresses of gate, up and down of an expert in the pool, which stays there until `release`.

        None if it is on the disk, or too few slots would be left for others.
        """
        parts = self.stacks.pool.hold(layer, expert)
        return None if parts is None else self._matrices_in(layer, parts)

    def _matrices_in(self, layer: int, parts: Sequence[int]) -> tuple[int, ...]:
        return tuple(parts[part] + first for part, first in self._matrices[layer])

    def release(self, layer: int, expert: int) -> None:
        """Ends one `hold`."""
        self.stacks.pool.release(layer, expert)

    def room_for(self, layer: int, expert: int) -> Room | None:
        """A place for an expert that leaves the GPU, until `take_back`.

        None if the pool has it, or only experts that `order` says are worth more, or if the memory is not
        locked as a whole: a copy to it would wait for the running step.
        """
        if not self.is_registered:
            return None
        found = self.stacks.pool.reserve(layer, expert, self.stacks.num_worse(layer, expert))
        if found is None:
            return None
        slot, parts = found
        return Room(layer, expert, slot, self._matrices_in(layer, parts))

    def take_back(self, room: Room, *, is_whole: bool) -> None:
        """Ends `room_for`. is_whole: whether the expert's bytes are there."""
        self.stacks.pool.deliver(room.layer, room.expert, room.slot, is_whole)

    def empty(self) -> None:
        """Forgets all experts and locks the memory. Call once between steps, before the pool is filled."""
        self.stacks.pool.clear()
        self._before = DiskStatistics.of(self.stacks)
        self._is_emptied = True
        # None: the system refuses. Copies from it are slower then, and none come back to it.
        self._registered = RegisteredMemory.register(*self.stacks.pool.memory(), is_read_only=False)

    @property
    def is_registered(self) -> bool:
        """Whether all of the memory is page-locked by now."""
        return self._registered is not None and self._registered.is_whole

    @property
    def device_offset(self) -> int:
        """From the host's addresses in the locked memory to the device's."""
        return 0 if self._registered is None else self._registered.offset

    @property
    def is_locked(self) -> bool:
        """Whether all of the memory is page-locked; assumed until `empty`."""
        return not self._is_emptied or self.is_registered

    @property
    def locked_bytes(self) -> int:
        """Bytes of the memory that are page-locked; all are assumed to be until `empty`."""
        if self.is_locked:
            return self.num_bytes
        return 0 if self._registered is None else self._registered.part_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return int(self.stacks.pool.memory()[1])

    def brought(self, experts: Iterable[int]) -> Iterator[list[int]]:
        """Reads experts, by ascending number, into the empty pool, as many at a time as may be held.

        Yields each portion, whose experts leave the pool then. No step may run. Raises ModelChangedError.
        """
        pool, num_experts = self.stacks.pool, self.stacks.num_experts
        for layer, numbers in groupby(experts, lambda number: number // num_experts):
            ids, most = list(numbers), self._most_held[pool.class_of(layer)]
            for begin in range(0, len(ids), most):
                portion = ids[begin : begin + most]
                pool.preload(layer, [number % num_experts for number in portion])
                yield portion
                pool.clear()

    def load(self, experts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Reads experts, given by layer, into slots that must be free. Raises ModelChangedError.

        progress is called with (experts read, experts in all).
        """
        done, num_all = 0, sum(map(len, experts))
        for layer, ids in enumerate(experts):
            self.stacks.pool.preload(layer, list(ids))
            done += len(ids)
            if progress is not None and ids:
                progress(done, num_all)

    def order(self, scores: Array, on_gpu: Array) -> None:
        """Orders the slots for overwriting; at any time. scores: by number, from 0 on; on_gpu: bool.

        `lasting` becomes the experts that the GPU lacks in all slots but the first. If the memory is not
        locked as a whole, there are none.
        """
        self.stacks.order(np.where(on_gpu, scores - scores.max() - 1.0, scores), self._num_spare)
        self.lasting = self.stacks.lasting & ~on_gpu & self.is_registered

    def statistics(self) -> DiskStatistics:
        """What the pool has done since `empty`."""
        now, before = DiskStatistics.of(self.stacks), self._before
        return replace(
            now,
            hits=now.hits - before.hits,
            misses=now.misses - before.misses,
            bytes_read=now.bytes_read - before.bytes_read,
            wait_s=now.wait_s - before.wait_s,
            retries=now.retries - before.retries,
        )

    def close(self) -> None:
        """Unlocks the memory, which no copy may read any more."""
        if self._registered is not None:
            self._registered.close()
            self._registered = None
