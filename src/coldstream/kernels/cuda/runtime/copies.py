"""Copies and fills of memory, in the order of the calling thread's current stream."""

from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.cuda.runtime.calls import attach, checked

Array = np.ndarray[Any, Any]
MAX_PITCH: Final = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of all cards so far


def to_device(address: int, values: Array, stream: streams.Stream | None = None) -> None:
    """Queues a copy of contiguous values in page-locked memory, which stay until it has run."""
    attach()
    handle = (stream or streams.current_stream()).handle
    checked(driver.cuMemcpyHtoDAsync(address, values.ctypes.data, values.nbytes, handle))


def to_device_at_once(address: int, values: Array) -> None:
    """Copies contiguous values in the order of the default stream, and returns when they may change."""
    attach()
    checked(driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))


def to_host(values: Array, address: int, stream: streams.Stream | None = None) -> None:
    """Queues a copy into contiguous values, which are there when the stream has run it."""
    attach()
    handle = (stream or streams.current_stream()).handle
    checked(driver.cuMemcpyDtoHAsync(values.ctypes.data, address, values.nbytes, handle))


def within_device(target: int, source: int, num_bytes: int) -> None:
    """Queues a copy between places that do not overlap."""
    attach()
    checked(driver.cuMemcpyDtoDAsync(target, source, num_bytes, streams.current_stream().handle))


def fill_bytes(address: int, byte: int, num_bytes: int) -> None:
    """Queues writing the same byte everywhere."""
    attach()
    checked(driver.cuMemsetD8Async(address, byte, num_bytes, streams.current_stream().handle))


def fill_words(address: int, word: int, count: int) -> None:
    """Queues writing the same 32 bits `count` times, from an address that is a multiple of 4."""
    attach()
    checked(driver.cuMemsetD32Async(address, word, count, streams.current_stream().handle))


def fill_spaced_bytes(address: int, byte: int, row_bytes: int, num_rows: int, pitch: int) -> None:
    """Queues writing the same byte to rows, each `pitch` bytes behind the one before."""
    attach()
    stream = streams.current_stream().handle
    if pitch <= MAX_PITCH:
        checked(driver.cuMemsetD2D8Async(address, pitch, byte, row_bytes, num_rows, stream))
        return
    for row in range(num_rows):
        checked(driver.cuMemsetD8Async(address + row * pitch, byte, row_bytes, stream))


def within_device_spaced(
    target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, num_rows: int
) -> None:
    """Queues a copy of rows, each so many bytes behind the one before, between places that do not overlap."""
    attach()
    stream = streams.current_stream().handle
    if max(target_pitch, source_pitch) <= MAX_PITCH:
        device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copied = driver.CUDA_MEMCPY2D()
        copied.srcMemoryType, copied.srcDevice, copied.srcPitch = device, source, source_pitch
        copied.dstMemoryType, copied.dstDevice, copied.dstPitch = device, target, target_pitch
        copied.WidthInBytes, copied.Height = row_bytes, num_rows
        checked(driver.cuMemcpy2DAsync(copied, stream))
        return
    for row in range(num_rows):
        places = target + row * target_pitch, source + row * source_pitch
        checked(driver.cuMemcpyDtoDAsync(*places, row_bytes, stream))
