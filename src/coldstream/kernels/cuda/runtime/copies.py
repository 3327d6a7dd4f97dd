"""Copies and fills of contiguous memory, in the order of the calling thread's current stream."""

from typing import Any

import numpy as np
from cuda.bindings import driver

from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.cuda.runtime.calls import attach, checked

Array = np.ndarray[Any, Any]


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
