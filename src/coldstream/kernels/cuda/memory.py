"""Device memory, planned to the byte: everything that a model takes is counted before any of it is taken.

The same code runs twice. Over a `MemoryPlan` it gets tensors without memory and leaves behind how much it
needs; over a `DeviceMemory` of that size it gets the real ones. *Persistent* memory holds weights and caches;
the *workspace* holds what lives between the operations of one step, and serves all steps in turn.
"""

import math
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

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

    Workspace comes back when neither the tensor nor a view of it is alive. That is safe because everything
    runs in the order of one stream: whoever gets the memory next writes it after its last reader.
    """

    def __init__(self) -> None:
        self.persistent_bytes = 0
        self._workspace = Intervals()

    @property
    def workspace_bytes(self) -> int:
        """The most that was ever in use at once."""
        return self._workspace.size

    def persistent(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * dtype.itemsize)
        start = self.persistent_bytes
        self.persistent_bytes += num_bytes
        return _shaped(self._persistent_bytes(start, num_bytes), shape, dtype)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, contents undefined."""
        num_bytes = _aligned(math.prod(shape) * dtype.itemsize)
        start = self._workspace.take(num_bytes)
        data = self._workspace_bytes(start, num_bytes)
        # Views share the storage, so its end is the end of the last of them.
        weakref.finalize(data.untyped_storage(), self._workspace.give_back, start, num_bytes).atexit = False
        return _shaped(data, shape, dtype)

    @abstractmethod
    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """That part of the persistent memory."""

    @abstractmethod
    def _workspace_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """That part of the workspace, with a storage of its own."""


class MemoryPlan(Memory):
    """Counts; its tensors have shapes and no memory."""

    def _persistent_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    _workspace_bytes = _persistent_bytes


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

    def _workspace_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._part(self._blocks[1], start, num_bytes)

    def _part(self, block: torch.Tensor, start: int, num_bytes: int) -> torch.Tensor:
        if start + num_bytes > block.numel():
            raise MemoryError(f"{start + num_bytes} bytes of a plan for {block.numel()}")
        # A tensor with a storage of its own, unlike a slice of the block.
        return torch.as_tensor(_Bytes(block.data_ptr() + start, num_bytes), device="cuda")


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous device memory, without keeping it: what a captured graph writes at each replay."""
    data = torch.as_tensor(_Bytes(tensor.data_ptr(), tensor.nbytes), device="cuda")
    return data.view(tensor.dtype).view(tensor.shape)


class _Bytes:
    """Device memory at an address, in the CUDA array interface (version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _aligned(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT


def _shaped(data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
