"""Slots of one size in fast memory: the expert in each, and when it may be written again. Pure.

    free ──acquire──▶ loading ──complete──▶ ready ──withdraw──▶ free
                         └───release───▶ free

A slot has at most one owner. Its generation grows with every owner, so that an event of an earlier owner is
recognised as stale. A slot is free as soon as it is withdrawn: the next copy into it waits for its last
reader. The pool may shrink. Slots above its size are never acquired again.
"""

from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush


class SlotState(Enum):
    """What may happen to a slot's bytes."""

    FREE = "free"  # no owner; steps launched earlier may still read them
    LOADING = "loading"  # a copy writes them, no step reads them
    READY = "ready"  # complete: steps may read them


@dataclass(slots=True)
class Slot:
    """owner: the expert that is loading or ready; −1: none. generation: number of owners so far. last_reader:
    the last step that may read the slot; −1: none.
    """

    state: SlotState = SlotState.FREE
    owner: int = -1
    generation: int = 0
    last_reader: int = -1


class SlotPool:
    """`size` slots of `slot_bytes` each, numbered from 0; the lowest free one is taken first."""

    def __init__(self, slot_bytes: int, size: int) -> None:
        self.slot_bytes = slot_bytes
        self.size = 0
        self.slots: list[Slot] = []
        self._free: list[int] = []  # a heap
        self._last_finished = -1
        self.resize(size)

    @property
    def num_free(self) -> int:
        """Slots that can be acquired at once."""
        return len(self._free)

    @property
    def reclaimed(self) -> bool:
        """Whether no step reads and no copy writes the slots above the pool's size."""
        return all(
            slot.state is SlotState.FREE and slot.last_reader <= self._last_finished
            for slot in self.slots[self.size :]
        )

    def acquire(self, expert: int) -> int:
        """The lowest free slot, now loading for `expert`. There must be one."""
        index = heappop(self._free)
        slot = self.slots[index]
        slot.state, slot.owner, slot.generation = SlotState.LOADING, expert, slot.generation + 1
        return index

    def is_loading(self, index: int, generation: int) -> bool:
        """Whether the owner of that generation is being copied into a slot."""
        slot = self.slots[index]
        return slot.state is SlotState.LOADING and slot.generation == generation

    def complete(self, index: int) -> bool:
        """Ends the copy of a slot. False if the slot lies above the pool's size: it is freed, not ready."""
        if index >= self.size:
            self.release(index)
            return False
        self.slots[index].state = SlotState.READY
        return True

    def withdraw(self, index: int, last_reader: int) -> None:
        """Takes a ready slot from its expert; the steps up to last_reader may still read it."""
        self.slots[index].last_reader = last_reader
        self.release(index)

    def release(self, index: int) -> None:
        """Frees a slot and removes its owner."""
        slot = self.slots[index]
        slot.state, slot.owner = SlotState.FREE, -1
        if index < self.size:
            heappush(self._free, index)

    def finish(self, step: int) -> None:
        """All steps up to `step` have ended."""
        self._last_finished = step

    def resize(self, size: int) -> list[int]:
        """Sets the number of slots. Returns owners of ready slots above it, for the caller to withdraw."""
        if size < 0:
            raise ValueError(f"the number of slots must not be negative, but is {size}")
        self.slots += [Slot() for _ in range(size - len(self.slots))]
        self._free = [index for index in range(size) if self.slots[index].state is SlotState.FREE]
        self.size = size
        return [slot.owner for slot in self.slots[size:] if slot.state is SlotState.READY]
