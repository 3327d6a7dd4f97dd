"""Memory of the device and page-locked memory of the host, which live as long as somebody holds them.

- *Blocks* are for weights, caches and slots: the driver's plain allocation, to the byte. Freeing one waits
  for all work of the device, so that no stream still uses it.
- *Scratch* is for results of unknown size between two steps. It comes from the device's pool in the order of
  the default stream. It goes back in that order: other streams must have been joined by then. The pool keeps
  at most KEPT_BYTES that nobody uses; `trim` gives those back as well.
- Neither is taken within a capture. What a captured graph uses belongs to its caller.
- *Page-locked* memory is read and written by the device at the host's address. Freeing it waits for all work
  of the device.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from cuda.bindings import driver
from cuda.core import DeviceMemoryResource, LegacyPinnedMemoryResource

from coldstream.kernels.cuda.runtime.calls import (
    DEVICE,
    attach,
    checked,
    core_errors,
    device_index,
    free_later,
    is_capturing,
    synchronize,
)
from coldstream.kernels.cuda.runtime.streams import default_stream

KEPT_BYTES: Final = 16 * 2**20
_OUT_OF_MEMORY: Final = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


class Allocation:
    """Bytes from `address` on, freed by `free` when the last owner has gone, or by `close`.

    At the interpreter's end nothing is freed: the context goes as a whole.
    """

    __slots__ = ("_free", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int, free: Callable[[], object]) -> None:
        self.address, self.num_bytes, self._free = address, num_bytes, free

    def close(self) -> None:
        """Frees the memory, whoever still holds this object. Calling twice is harmless."""
        free, self._free = self._free, _nothing
        free_later(free)

    # The defaults are still there when the module's names have gone.
    def __del__(
        self,
        is_ending: Callable[[], bool] = sys.is_finalizing,
        free_later: Callable[[Callable[[], object]], None] = free_later,
    ) -> None:
        if not is_ending():
            free_later(self._free)


def _nothing() -> None:
    """What is left to do for memory that is freed."""


def block(num_bytes: int) -> Allocation:
    """Unwritten memory; at least a byte. Raises OutOfMemoryError, DeviceError."""
    _check_outside_captures()
    size = max(1, num_bytes)
    result = driver.cuMemAlloc(size)
    if result[0] == _OUT_OF_MEMORY:
        trim()
        result = driver.cuMemAlloc(size)
    address = int(checked(result))
    return Allocation(address, num_bytes, functools.partial(driver.cuMemFree, address))


def scratch(num_bytes: int) -> Allocation:
    """Unwritten memory, for work on the default stream. Raises OutOfMemoryError, DeviceError."""
    _check_outside_captures()
    assert device_index() == DEVICE, "the pool is that of the first device"
    stream = default_stream().core
    with core_errors():
        buffer = _pool().allocate(max(1, num_bytes), stream=stream)
    return Allocation(int(buffer.handle), num_bytes, lambda: buffer.close(stream))


def trim() -> None:
    """Gives unused memory of the pool back to the driver. Waits for the device."""
    synchronize()
    checked(driver.cuMemPoolTrimTo(_pool().handle, 0))


def page_locked(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Zeros in page-locked memory. Raises OutOfMemoryError, DeviceError."""
    _check_outside_captures()
    element = np.dtype(dtype)
    num_bytes = math.prod(shape) * element.itemsize
    with core_errors():
        buffer = _page_locked().allocate(max(1, num_bytes))
    allocation = Allocation(int(buffer.handle), num_bytes, buffer.close)
    memory = (ctypes.c_uint8 * max(1, num_bytes)).from_address(allocation.address)
    memory.owner = allocation  # type: ignore[attr-defined]
    raw = np.ctypeslib.as_array(memory)[:num_bytes]  # keeps `memory`
    raw.fill(0)
    values: np.ndarray[Any, Any] = raw.view(element).reshape(shape)
    return values


@functools.cache
def _pool() -> Any:
    """The device's own pool."""
    with core_errors():
        pool = DeviceMemoryResource(DEVICE)
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    checked(driver.cuMemPoolSetAttribute(pool.handle, threshold, driver.cuuint64_t(KEPT_BYTES)))
    return pool


@functools.cache
def _page_locked() -> Any:
    return LegacyPinnedMemoryResource()


def _check_outside_captures() -> None:
    attach()
    assert not is_capturing(), "memory of a graph belongs to who captures it"
