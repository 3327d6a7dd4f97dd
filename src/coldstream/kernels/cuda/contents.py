"""What is in a contiguous array of the device. Nothing is done to one that is only planned."""

from typing import Any

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray, name_of, num_bytes_of
from coldstream.kernels.cuda.runtime import copies, streams

Array = np.ndarray[Any, Any]


def clear(array: DeviceArray) -> None:
    """Queues writing zeros."""
    if not array.is_meta:
        copies.fill_bytes(array.data_ptr(), 0, num_bytes_of(array))


def write(array: DeviceArray, values: Array) -> None:
    """Copies values of the same shape and type, and returns when they may change."""
    assert tuple(array.shape) == values.shape
    assert name_of(array.dtype) == values.dtype.name
    if not array.is_meta:
        copies.to_device_at_once(array.data_ptr(), np.ascontiguousarray(values))


def read(array: DeviceArray) -> Array:
    """The values, when all that is queued to the current stream has run."""
    values = np.empty(tuple(array.shape), name_of(array.dtype))
    copies.to_host(values, array.data_ptr())
    streams.current_stream().synchronize()
    return values
