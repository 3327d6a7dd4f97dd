"""Slots of one size in fast memory: who owns each, and when it may be written again. Pure.

    free ──acquire──▶ loading ──land──▶ ready ──withdraw──▶ withdrawn ──(its last reader has ended)──▶ free
                         └───release───▶ free

A slot has one owner at most. Its generation grows with every owner, so that news of an earlier one is known
to be stale. Where copies wait for a slot's last reader, a withdrawn one is free at once. The pool may shrink:
slots above its size are never acquired again, and keep their state until nobody reads or writes them.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class SlotState(Enum):
    """What may happen to a slot's bytes."""

    FREE = "free"  # nobody's
    LOADING = "loading"  # a copy writes them, nobody reads
    READY = "ready"  # they are its expert's
    WITHDRAWN = "withdrawn"  # steps launched earlier may still read them


@dataclass(slots=True)
class Slot:
    """generation: counts the owners. last_reader: the last step that could ever read the slot; −1: none."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    last_reader: int = -1


class SlotPool:
    """`size` slots of `slot_bytes` each, numbered from 0; the lowest free one is taken first.

    owners: whose each slot is while it is loading or ready, int64 [slots that ever were]; −1: nobody's.
    """

    def __init__(self, slot_bytes: int, size: int, copies_wait: bool) -> None:
        self.slot_bytes = slot_bytes
        self._copies_wait = copies_wait
        self.size = 0
        self.slots: list[Slot] = []
        self.owners: Array = np.empty(0, np.int64)
        self._free: list[int] = []  # a heap
        self._withdrawn: deque[int] = deque()  # their last readers never fall
        self._last_finished = -1
        self.resize(size)

    @property
    def num_free(self) -> int:
        """Slots that can be acquired at once."""
        return len(self._free)

    @property
    def num_vacant(self) -> int:
        """Slots that are free or will be when the steps launched so far have ended."""
        return len(self._free) + sum(index < self.size for index in self._withdrawn)

    @property
    def reclaimed(self) -> bool:
        """Whether nobody reads or writes the slots above the pool's size."""
        return all(
            slot.state is SlotState.FREE and slot.last_reader <= self._last_finished
            for slot in self.slots[self.size :]
        )

    def acquire(self, expert: int) -> int:
        """The lowest free slot, now loading for `expert`. There must be one."""
        index = heappop(self._free)
        slot = self.slots[index]
        slot.state, slot.generation = SlotState.LOADING, slot.generation + 1
        self.owners[index] = expert
        return index

    def land(self, index: int) -> bool:
        """Its copy is finished. False: the slot lies above the pool's size, and is free instead of ready."""
        if index >= self.size:
            self.release(index)
            return False
        self.slots[index].state = SlotState.READY
        return True

    def withdraw(self, index: int, last_reader: int) -> None:
        """Takes a ready slot from its expert; the steps up to last_reader may still read it."""
        slot = self.slots[index]
        slot.state, slot.last_reader = SlotState.WITHDRAWN, last_reader
        self.owners[index] = -1
        if self._copies_wait or last_reader <= self._last_finished:
            self.release(index)
        else:
            self._withdrawn.append(index)

    def release(self, index: int) -> None:
        """Frees a slot that nobody owns any more."""
        self.slots[index].state = SlotState.FREE
        self.owners[index] = -1
        if index < self.size:
            heappush(self._free, index)

    def finish(self, step: int) -> None:
        """All steps up to `step` have ended: frees what only they could read."""
        self._last_finished = step
        while self._withdrawn and self.slots[self._withdrawn[0]].last_reader <= step:
            self.release(self._withdrawn.popleft())

    def resize(self, size: int) -> list[int]:
        """Sets the number of slots; the owners of ready ones above it, which the caller has to withdraw."""
        if size < 0:
            raise ValueError(f"the number of slots must not be negative, but is {size}")
        self.slots += [Slot() for _ in range(size - len(self.slots))]
        self.owners = np.append(self.owners, np.full(len(self.slots) - self.owners.size, -1))
        self._free = [index for index in range(size) if self.slots[index].state is SlotState.FREE]
        self.size = size
        above = range(size, len(self.slots))
        return [int(self.owners[index]) for index in above if self.slots[index].state is SlotState.READY]
