"""Memory for the activations of a captured graph.

A capture runs the forward pass once in Python. No later op reads an array without references, so that its
memory can be reused in the same graph; otherwise a 40-layer model would hold every layer's activations.
"""

import math
import weakref
from typing import Any

import numpy as np

ALIGNMENT = 64  # a cache line, and the widest vector register


class Arena:
    """Allocates uninitialised arrays, and frees an array once neither it nor a view of it is alive.

    The memory itself lives as long as the arena.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A contiguous array, 64-byte aligned, contents undefined."""
        size = math.prod(shape) * dtype.itemsize
        block = self._take(max(1, size))
        # A view of a numpy array refers to the owner of its memory, not to the array that it was sliced
        # from; so an owner of our own dies with the last view.
        owner = _Owner(block)
        weakref.finalize(owner, self._free.append, block).atexit = False
        return np.asarray(owner)[:size].view(dtype).reshape(shape)

    def _take(self, size: int) -> np.ndarray[Any, Any]:
        fitting = [i for i, block in enumerate(self._free) if block.nbytes >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        raw = np.empty(rounded + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.num_bytes += rounded
        return raw[start : start + rounded]


class _Owner:
    """Owner of a block of memory for numpy; alive while any array over it is."""

    def __init__(self, block: np.ndarray[Any, Any]) -> None:
        self.__array_interface__ = block.__array_interface__
        self.block = block
