"""Device memory, planned to the byte: all memory of a model is counted before any is allocated.

The same code runs twice: over a `MemoryPlan`, whose tensors have no memory, to count bytes, then over a
`DeviceMemory` of that size. *Persistent* memory holds weights and caches; the *workspace* holds what is alive
between the operations of one step, and is reused by the next step.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

import torch

from coldstream.kernels.cuda.array import ALIGNMENT, DTYPES, ELEMENT_BYTES, DeviceArray, RawArray


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


class _Lifetimes:
    """Which parts of the workspace have come back since the step began, by when their storages died.

    Like `weakref.finalize`, which takes three times as long.
    """

    def __init__(self) -> None:
        self.ended: deque[tuple[int, int]] = deque()
        self._parts: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}
        parts, ended = self._parts, self.ended  # not the object itself, which would be in a cycle
        self._end = lambda storage: ended.append(parts.pop(storage))

    def add(self, storage: torch.UntypedStorage, part: tuple[int, int]) -> None:
        self._parts[weakref.ref(storage, self._end)] = part


class Memory(ABC):
    """Allocates tensors from a persistent part, which is never freed, and from a workspace.

    Workspace is freed when neither the tensor nor a view of it is alive, and all of it when the next step
    starts, so that a step's allocations do not depend on earlier steps. This is safe because all work is in
    the order of one stream: a new owner writes the memory after its last reader. Tensors may die at any
    moment, even during an allocation: their memory is freed before the next one.
    """

    def __init__(self) -> None:
        self.persistent_bytes = 0
        self._most_of_a_step = 0
        self._workspace = Intervals()
        self._lifetimes = _Lifetimes()

    def start_step(self) -> None:
        """Frees the workspace of earlier steps, whose tensors must no longer be read.

        A tensor may outlive its step, for example in the traceback of an error.
        """
        self._most_of_a_step = self.workspace_bytes
        self._workspace = Intervals()
        self._lifetimes = _Lifetimes()

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that were in use at the same time."""
        return max(self._most_of_a_step, self._workspace.size)

    def persistent(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * ELEMENT_BYTES[dtype])
        start = self.persistent_bytes
        self.persistent_bytes += num_bytes
        return _shaped(self._persistent_bytes(start, num_bytes), shape, dtype)

    def workspace(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * ELEMENT_BYTES[dtype])
        ended = self._lifetimes.ended
        while ended:
            self._workspace.give_back(*ended.popleft())
        start = self._workspace.take(num_bytes)
        tensor = self._workspace_part(start, num_bytes, shape, dtype)
        # Views share the storage, which dies with the last of them.
        self._lifetimes.add(tensor.untyped_storage(), (start, num_bytes))
        return tensor

    @abstractmethod
    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """uint8 tensor over a part of the persistent memory."""

    @abstractmethod
    def _workspace_part(self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor at the beginning of a part of the workspace, with its own storage."""


class MemoryPlan(Memory):
    """Counts bytes; its tensors are without memory."""

    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def _workspace_part(self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


class DeviceMemory(Memory):
    """Two blocks of memory on the current CUDA device, of given sizes. MemoryError beyond them."""

    def __init__(self, persistent_bytes: int, workspace_bytes: int) -> None:
        super().__init__()
        self._blocks = tuple(
            torch.empty(max(1, size), dtype=torch.uint8, device="cuda")
            for size in (persistent_bytes, workspace_bytes)
        )

    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._part(self._blocks[0], start, num_bytes, (num_bytes,))

    def _workspace_part(self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        if dtype in DTYPES:
            return self._part(self._blocks[1], start, num_bytes, shape, dtype)
        return _shaped(self._part(self._blocks[1], start, num_bytes, (num_bytes,)), shape, dtype)

    def _part(
        self, block: torch.Tensor, start: int, num_bytes: int, shape: tuple[int, ...], dtype: str = "uint8"
    ) -> torch.Tensor:
        """An array at the beginning of some bytes of a block."""
        if start + num_bytes > block.numel():
            raise MemoryError(f"{start + num_bytes} bytes of a plan for {block.numel()}")
        # A tensor with a storage of its own, unlike a slice of the block.
        return torch.as_tensor(RawArray(block.data_ptr() + start, shape, dtype), device="cuda")


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous device memory without owning it, for the outputs of a captured graph."""
    data = torch.as_tensor(RawArray(tensor.data_ptr(), (tensor.nbytes,), "uint8"), device="cuda")
    return data.view(tensor.dtype).view(tensor.shape)


def _aligned(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT


def _shaped(data: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    element: torch.dtype = getattr(torch, dtype)
    return data[: math.prod(shape) * element.itemsize].view(element).view(shape)
