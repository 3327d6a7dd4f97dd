"""Device memory, planned to the byte: all memory of a model is counted before any is allocated.

The same code runs twice: over a `MemoryPlan`, whose arrays have no memory, to count bytes, then over a
`DeviceMemory` of that size. *Persistent* memory holds weights and caches; the *workspace* holds what is alive
between the operations of one step, and is reused by the next step.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from coldstream.kernels.cuda.array import ALIGNMENT, ELEMENT_BYTES, DeviceArray, PlannedArray, RawArray
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.kernels.cuda.runtime import allocations


@dataclass
class Intervals:
    """Best-fit allocation over offsets; adjacent free intervals are merged. Grows at its end."""

    size: int = 0  # the highest end that was ever in use
    _free: dict[int, int] = field(default_factory=dict)  # start → end

    def take(self, num_bytes: int) -> int:
        """Allocates `num_bytes`; the start."""
        fitting = [(end - start, start) for start, end in self._free.items() if end - start >= num_bytes]
        if fitting:
            length, start = min(fitting)
            end = self._free.pop(start)
            if length > num_bytes:
                self._free[start + num_bytes] = end
            return start
        # A free interval at the end is used and extended.
        start = next((start for start, end in self._free.items() if end == self.size), self.size)
        self._free.pop(start, None)
        self.size = start + num_bytes
        return start

    def give_back(self, start: int, num_bytes: int) -> None:
        """Frees what `take` allocated."""
        end = start + num_bytes
        end = self._free.pop(end, end)
        before = next((other for other, other_end in self._free.items() if other_end == start), start)
        self._free[before] = end


class _Part:
    """Bytes of the workspace, which come back when the array that owns them, and its views, have gone.

    memory: what they lie in, if it goes with them.
    """

    __slots__ = ("_ended", "memory", "num_bytes", "start")

    def __init__(self, start: int, num_bytes: int, ended: "deque[tuple[int, int]]") -> None:
        self.start, self.num_bytes, self._ended = start, num_bytes, ended
        self.memory: object = None

    def __del__(self) -> None:
        self._ended.append((self.start, self.num_bytes))


class Memory(ABC):
    """Allocates arrays from a persistent part, which is never freed, and from a workspace.

    Workspace is freed when neither the array nor a view of it is alive, and all of it when the next step
    starts, so that a step's allocations do not depend on earlier steps. This is safe because all work is in
    the order of one stream: a new owner writes the memory after its last reader. Arrays may die at any
    moment, even during an allocation: their memory is freed before the next one.
    """

    _array: type[RawArray] = CudaArray  # makes one of an address, a shape, a type and an owner

    def __init__(self) -> None:
        self.persistent_bytes = 0
        self._most_of_a_step = 0
        self._workspace = Intervals()
        self._ended = deque[tuple[int, int]]()  # parts that have come back since the step began

    def start_step(self) -> None:
        """Frees the workspace of earlier steps, whose arrays must no longer be read.

        An array may outlive its step, for example in the traceback of an error.
        """
        self._most_of_a_step = self.workspace_bytes
        self._workspace = Intervals()
        self._ended = deque()

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that were in use at the same time."""
        return max(self._most_of_a_step, self._workspace.size)

    def persistent(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Contiguous, contents undefined."""
        num_bytes = aligned(math.prod(shape) * ELEMENT_BYTES[dtype])
        start = self.persistent_bytes
        self.persistent_bytes += num_bytes
        return self._array(self._persistent_at(start, num_bytes), shape, dtype, None)

    def workspace(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Contiguous, contents undefined."""
        num_bytes = aligned(math.prod(shape) * ELEMENT_BYTES[dtype])
        while self._ended:
            self._workspace.give_back(*self._ended.popleft())
        part = _Part(self._workspace.take(num_bytes), num_bytes, self._ended)
        return self._array(self._workspace_at(part), shape, dtype, part)

    @abstractmethod
    def _persistent_at(self, start: int, num_bytes: int) -> int:
        """The address of a part of the persistent memory."""

    @abstractmethod
    def _workspace_at(self, part: _Part) -> int:
        """The address of a part of the workspace."""


class MemoryPlan(Memory):
    """Counts bytes; its arrays are without memory."""

    _array = PlannedArray

    def _persistent_at(self, start: int, num_bytes: int) -> int:
        return start

    def _workspace_at(self, part: _Part) -> int:
        return part.start


class DeviceMemory(Memory):
    """Two blocks of memory of the device, of given sizes. MemoryError beyond them.

    Arrays do not keep the blocks, which go with this object or with `close`. Raises OutOfMemoryError,
    DeviceError.
    """

    def __init__(self, persistent_bytes: int, workspace_bytes: int) -> None:
        super().__init__()
        self._blocks = tuple(allocations.block(size) for size in (persistent_bytes, workspace_bytes))

    def close(self) -> None:
        """Frees both blocks once the device is idle. Arrays in them must not be used afterwards."""
        for block in self._blocks:
            block.close()

    def _persistent_at(self, start: int, num_bytes: int) -> int:
        return self._at(self._blocks[0], start, num_bytes)

    def _workspace_at(self, part: _Part) -> int:
        return self._at(self._blocks[1], part.start, part.num_bytes)

    @staticmethod
    def _at(block: allocations.Allocation, start: int, num_bytes: int) -> int:
        if start + num_bytes > block.num_bytes:
            raise MemoryError(f"{start + num_bytes} bytes of a plan for {block.num_bytes}")
        return block.address + start


def own_bytes(num_bytes: int) -> CudaArray:
    """uint8 in a block of its own, contents undefined. Raises OutOfMemoryError, DeviceError."""
    allocation = allocations.block(num_bytes)
    return CudaArray(allocation.address, (num_bytes,), "uint8", allocation)


def aligned(num_bytes: int) -> int:
    """What an array of so many bytes takes of planned memory."""
    return -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
