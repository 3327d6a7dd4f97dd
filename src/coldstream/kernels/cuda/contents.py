"""What is in contiguous arrays of the device. Nothing is done to one that is only planned.

Zeros and copies also reach views of rows that lie apart, such as one state of all layers: see `Spaced`.

Copies and fills are queued to the current stream. Copies of arrays are in memory of their own, which comes
from the device's pool in the order of the default stream: see `runtime.allocations.scratch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from coldstream.kernels.cuda.array import (
    ELEMENT_BYTES,
    ArrayError,
    DeviceArray,
    RawArray,
    element_bytes,
    name_of,
    num_bytes_of,
)
from coldstream.kernels.cuda.runtime import allocations, copies, streams

Array = np.ndarray[Any, Any]


class CudaArray(RawArray):
    """A `RawArray` whose contiguous views are written by assignment, and read by NumPy.

    An assignment takes 0, an array of the device, or one of NumPy's, as `clear`, `copy_parts` and `write` do.
    Of 0 and of an array of the same shape, rows may lie apart.
    """

    def __setitem__(self, index: int | slice | tuple[int | slice, ...], values: Any) -> None:
        part = self[index]
        if isinstance(values, np.ndarray):
            write(part, values)
        elif isinstance(values, RawArray) and part.is_contiguous():
            copy_parts([values], part)
        elif isinstance(values, RawArray):
            copy_spaced(values, part)
        else:
            assert values == 0, "a fill is of zeros"
            clear(part)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(read(self), dtype=dtype)


def host_type(dtype: Any) -> str:
    """The type of elements on the host: NumPy has no bfloat16, whose bits are uint16 there."""
    name = name_of(dtype)
    return "uint16" if name == "bfloat16" else name


@dataclass(frozen=True)
class Spaced:
    """Where an array's bytes lie: rows of so many adjacent ones, each `pitch` behind the one before."""

    address: int
    num_rows: int
    row_bytes: int
    pitch: int

    @classmethod
    def of(cls, array: DeviceArray) -> Self:
        """Rows are the entries of its first dimension. ArrayError where their elements are not adjacent."""
        size = element_bytes(array)
        if array.numel():
            _check_contiguous(array[0])
        row_bytes = array.numel() // max(1, len(array)) * size
        return cls(array.data_ptr(), len(array), row_bytes, array.stride(0) * size)


def clear(array: DeviceArray) -> None:
    """Queues writing zeros. ArrayError where rows are not as `Spaced` has them."""
    if array.is_contiguous():
        if not array.is_meta:
            copies.fill_bytes(array.data_ptr(), 0, num_bytes_of(array))
        return
    rows = Spaced.of(array)
    if not array.is_meta:
        copies.fill_spaced_bytes(rows.address, 0, rows.row_bytes, rows.num_rows, rows.pitch)


def copy_spaced(source: DeviceArray, target: DeviceArray) -> None:
    """Queues a copy between arrays of one shape and type that do not overlap. ArrayError as `clear`."""
    assert tuple(source.shape) == tuple(target.shape)
    assert name_of(source.dtype) == name_of(target.dtype)
    a, b = Spaced.of(source), Spaced.of(target)
    if not target.is_meta:
        copies.within_device_spaced(b.address, b.pitch, a.address, a.pitch, a.row_bytes, a.num_rows)


def write(array: DeviceArray, values: Array) -> None:
    """Copies values of the same shape and type, and returns when they may change."""
    _check_contiguous(array)
    assert tuple(array.shape) == values.shape
    assert host_type(array.dtype) == values.dtype.name
    if not array.is_meta:
        copies.to_device_at_once(array.data_ptr(), np.ascontiguousarray(values))


def read(array: DeviceArray) -> Array:
    """The values, when all that is queued to the current stream has run."""
    _check_contiguous(array)
    values = np.empty(tuple(array.shape), host_type(array.dtype))
    copies.to_host(values, array.data_ptr())
    streams.current_stream().synchronize()
    return values


def new(shape: tuple[int, ...], dtype: str) -> CudaArray:
    """An unwritten array in memory of its own. Raises OutOfMemoryError, DeviceError."""
    num_bytes = int(np.prod(shape)) * ELEMENT_BYTES[dtype]
    allocation = allocations.scratch(num_bytes)
    return CudaArray(allocation.address, shape, dtype, allocation)


def copy_parts(parts: Sequence[DeviceArray], target: DeviceArray) -> None:
    """Queues copies of contiguous parts, one after the other, into a contiguous target that they fill.

    Each part is a copy of its own: parts that lie side by side may be of two allocations, and the driver
    refuses a copy across them. ArrayError for other types or another size.
    """
    for array in (target, *parts):
        _check_contiguous(array)
    dtype = name_of(target.dtype)
    if any(name_of(part.dtype) != dtype for part in parts):
        raise ArrayError(f"{[name_of(part.dtype) for part in parts]} are no parts of {dtype}")
    if sum(part.numel() for part in parts) != target.numel():
        raise ArrayError(
            f"parts of {[tuple(part.shape) for part in parts]} do not fill {tuple(target.shape)}"
        )
    if target.is_meta:
        return
    address = target.data_ptr()
    for part in parts:
        num_bytes = num_bytes_of(part)
        if num_bytes:
            copies.within_device(address, part.data_ptr(), num_bytes)
        address += num_bytes


def joined(parts: Sequence[DeviceArray]) -> CudaArray:
    """A copy of the rows of at least one part, one after the other. Raises as `new` and `copy_parts`."""
    first = parts[0]
    copy = new((sum(map(len, parts)), *first.shape[1:]), name_of(first.dtype))
    copy_parts(parts, copy)
    return copy


def take_rows(array: DeviceArray, rows: Array) -> CudaArray:
    """A copy of rows by their numbers, int64 [n], which must exist. Raises as `new`."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    runs = [run for run in np.split(rows, breaks) if len(run)]
    copy = new((len(rows), *array.shape[1:]), name_of(array.dtype))
    copy_parts([array[int(run[0]) : int(run[-1]) + 1] for run in runs], copy)
    return copy


def _check_contiguous(array: DeviceArray) -> None:
    if not array.is_contiguous():
        raise ArrayError(f"an array {tuple(array.shape)} with gaps cannot be read or written as a whole")
