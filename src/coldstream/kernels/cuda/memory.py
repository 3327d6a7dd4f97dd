"""Device memory, planned to the byte: everything that a model takes is counted before any of it is taken.

The same code runs twice. Over a `MemoryPlan` it gets tensors without memory and leaves behind how much it
needs; over a `DeviceMemory` of that size it gets the real ones. *Persistent* memory holds weights and caches;
the *workspace* holds what lives between the operations of one step, and serves all steps in turn.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

# As the CUDA array interface names them; a tensor of another type takes two views more.
_TYPES = {
    torch.float32: "<f4",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
}
ALIGNMENT = 256  # of every tensor: what cudaMalloc gives, and enough for any vector load


@dataclass
class Intervals:
    """Best-fit allocation over offsets; neighbouring free intervals are one. Grows at its end."""

    size: int = 0  # the highest end that was ever in use
    _free: dict[int, int] = field(default_factory=dict)  # start → end

    def take(self, num_bytes: int) -> int:
        """The start of `num_bytes` that nobody else has."""
        fitting = [(end - start, start) for start, end in self._free.items() if end - start >= num_bytes]
        if fitting:
            length, start = min(fitting)
            end = self._free.pop(start)
            if length > num_bytes:
                self._free[start + num_bytes] = end
            return start
        # An interval that reaches the end only needs to be made longer.
        start = next((start for start, end in self._free.items() if end == self.size), self.size)
        self._free.pop(start, None)
        self.size = start + num_bytes
        return start

    def give_back(self, start: int, num_bytes: int) -> None:
        """Undoes `take`."""
        end = start + num_bytes
        end = self._free.pop(end, end)
        before = next((other for other, other_end in self._free.items() if other_end == start), start)
        self._free[before] = end


class Memory(ABC):
    """Hands out tensors of a persistent part, which stay, and of a workspace, which come back.

    Workspace comes back when neither the tensor nor a view of it is alive, and all of it when the next step
    starts, so that what a step takes does not depend on the steps before. That is safe because everything
    runs in the order of one stream: whoever gets the memory next writes it after its last reader. Tensors may
    die at any moment, in the middle of a search for memory too: what they had is given back before the next.
    """

    def __init__(self) -> None:
        self.persistent_bytes = 0
        self._most_of_a_step = 0
        self._workspace = Intervals()
        self._returned: deque[tuple[int, int]] = deque()

    def start_step(self) -> None:
        """Takes back what the tensors of earlier steps have, whose contents nobody may want any more.

        A tensor may outlive its step, in the traceback of an error for example.
        """
        self._most_of_a_step = self.workspace_bytes
        self._workspace = Intervals()
        self._returned = deque()

    @property
    def workspace_bytes(self) -> int:
        """The most that was ever in use at once."""
        return max(self._most_of_a_step, self._workspace.size)

    def persistent(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * dtype.itemsize)
        start = self.persistent_bytes
        self.persistent_bytes += num_bytes
        return _shaped(self._persistent_bytes(start, num_bytes), shape, dtype)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * dtype.itemsize)
        while self._returned:
            self._workspace.give_back(*self._returned.popleft())
        start = self._workspace.take(num_bytes)
        tensor = self._workspace_part(start, num_bytes, shape, dtype)
        # Views share the storage, so its end is the end of the last of them.
        weakref.finalize(tensor.untyped_storage(), self._returned.append, (start, num_bytes)).atexit = False
        return tensor

    @abstractmethod
    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """That part of the persistent memory."""

    @abstractmethod
    def _workspace_part(
        self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor at the beginning of that part of the workspace, with a storage of its own."""


class MemoryPlan(Memory):
    """Counts; its tensors have shapes and no memory."""

    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def _workspace_part(
        self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return _shaped(self._persistent_bytes(start, num_bytes), shape, dtype)


class DeviceMemory(Memory):
    """Two blocks of the current CUDA device, of the sizes that a plan says. MemoryError beyond them."""

    def __init__(self, persistent_bytes: int, workspace_bytes: int) -> None:
        super().__init__()
        self._blocks = tuple(
            torch.empty(max(1, size), dtype=torch.uint8, device="cuda")
            for size in (persistent_bytes, workspace_bytes)
        )

    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._part(self._blocks[0], start, num_bytes)

    def _workspace_part(
        self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        part = self._part(self._blocks[1], start, num_bytes, _TYPES.get(dtype), shape)
        return part if dtype in _TYPES else _shaped(part, shape, dtype)

    def _part(
        self,
        block: torch.Tensor,
        start: int,
        num_bytes: int,
        type_name: str | None = None,
        shape: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """All bytes of it, or a tensor of a type and shape at its beginning."""
        if start + num_bytes > block.numel():
            raise MemoryError(f"{start + num_bytes} bytes of a plan for {block.numel()}")
        # A tensor with a storage of its own, unlike a slice of the block.
        address = block.data_ptr() + start
        array = _Array(address, shape, type_name) if type_name else _Array(address, (num_bytes,), "|u1")
        return torch.as_tensor(array, device="cuda")


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous device memory, without keeping it: what a captured graph writes at each replay."""
    data = torch.as_tensor(_Array(tensor.data_ptr(), (tensor.nbytes,), "|u1"), device="cuda")
    return data.view(tensor.dtype).view(tensor.shape)


class _Array:
    """Device memory at an address, in the CUDA array interface (version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...], type_name: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": type_name,
            "data": (address, False),
            "version": 3,
        }


def _aligned(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT


def _shaped(data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
