"""Arrays in the device's memory, as launchers see them: an address, a shape, strides and a type of elements.

Launchers ask no more of an array than `DeviceArray` says, so that they do not depend on what has made it. The
package's own arrays are `RawArray`s; tests also pass tensors of PyTorch.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, Self, overload

import numpy as np

from coldstream.errors import ColdstreamError

ALIGNMENT: Final = 256  # bytes, of every array in planned memory; enough for any vector load
# Bytes of an element, and its name in the CUDA array interface.
DTYPES = {
    "float64": (8, "<f8"),
    "float32": (4, "<f4"),
    "float16": (2, "<f2"),
    "int64": (8, "<i8"),
    "int32": (4, "<i4"),
    "int16": (2, "<i2"),
    "int8": (1, "|i1"),
    "uint8": (1, "|u1"),
}
ELEMENT_BYTES = {**{name: size for name, (size, _) in DTYPES.items()}, "bfloat16": 2}


class ArrayError(ColdstreamError, ValueError):
    """An array that a kernel cannot take; the message names the argument."""


class DeviceArray(Protocol):
    """What launchers need of an array. Memory is valid while the array, or its owner, is alive."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int:
        """The address of the first element."""

    @overload
    def stride(self, dim: None = None) -> tuple[int, ...]: ...
    @overload
    def stride(self, dim: int) -> int:
        """Elements from one index of a dimension to the next; without one, of all dimensions."""

    def __getitem__(self, index: Any, /) -> "DeviceArray":
        """A view, for slices and indices."""

    def __iter__(self) -> "Iterator[DeviceArray]": ...

    def reshape(self, *shape: int) -> "DeviceArray":
        """A view of adjacent elements in another shape."""

    @property
    def is_meta(self) -> bool:
        """Whether it is only planned, without memory."""

    def dim(self) -> int: ...

    def numel(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    def __len__(self) -> int: ...


@dataclass(unsafe_hash=True)
class RawArray:
    """A `DeviceArray` at an address; `owner` keeps the memory, and None says that somebody else does. It does
    not change, but is not frozen: making some is part of the time of every token.

    dtype: a name of ELEMENT_BYTES. strides: in elements, by default those of adjacent rows. An index or
    slices give a view with the same owner. Other libraries read it by the CUDA array interface (version 3).
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: object = field(default=None, repr=False, compare=False)
    strides: tuple[int, ...] | None = None

    def data_ptr(self) -> int:
        return self.address

    @overload
    def stride(self, dim: None = None) -> tuple[int, ...]: ...
    @overload
    def stride(self, dim: int) -> int: ...
    def stride(self, dim: int | None = None) -> int | tuple[int, ...]:
        return self._strides if dim is None else self._strides[dim]

    @property
    def is_meta(self) -> bool:
        return False

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def is_contiguous(self) -> bool:
        """Whether elements are adjacent and in order; strides of single elements do not matter."""
        if self.strides is None:
            return True
        pairs = zip(self.strides, _adjacent(self.shape), self.shape, strict=True)
        return self.numel() == 0 or all(own == other for own, other, size in pairs if size > 1)

    def reshape(self, *shape: int) -> Self:
        """A view of adjacent elements in another shape; one size may be −1. ArrayError for others."""
        known = math.prod(size for size in shape if size >= 0)
        sizes = tuple(self.numel() // max(1, known) if size < 0 else size for size in shape)
        if not self.is_contiguous() or math.prod(sizes) != self.numel():
            raise ArrayError(f"{self.shape} with strides {self._strides} is not seen as {shape}")
        return type(self)(self.address, sizes, self.dtype, self.owner)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Self]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> Self:
        """A view. IndexError for what does not exist, and for a slice that goes backwards."""
        if self.strides is None and isinstance(index, slice) and self.shape:
            first, end, step = index.indices(self.shape[0])
            if step == 1:
                return self._rows(first, max(0, end - first))
        return self._view(index)

    def _rows(self, first: int, count: int) -> Self:
        """Rows of an array without gaps. Steps make most of their views so."""
        rest = self.shape[1:]
        skipped = first * math.prod(rest) * ELEMENT_BYTES[self.dtype] if count else 0
        return type(self)(self.address + skipped, (count, *rest), self.dtype, self.owner)

    def _view(self, index: int | slice | tuple[int | slice, ...]) -> Self:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise IndexError(f"{len(parts)} indices of an array with {len(self.shape)} dimensions")
        first, shape, strides = 0, list[int](), list[int]()
        for size, stride, part in zip(self.shape, self._strides, parts, strict=False):
            if isinstance(part, slice):
                taken = range(*part.indices(size))
                if taken.step < 0:
                    raise IndexError(f"a slice with the step {taken.step}: views go forwards")
                shape.append(len(taken))
                strides.append(stride * taken.step)
                first += taken.start * stride if taken else 0
            else:
                first += range(size)[part] * stride
        rest = len(parts)
        return type(self)(
            self.address + first * ELEMENT_BYTES[self.dtype],
            (*shape, *self.shape[rest:]),
            self.dtype,
            self.owner,
            (*strides, *self._strides[rest:]),
        )

    @property
    def _strides(self) -> tuple[int, ...]:
        return _adjacent(self.shape) if self.strides is None else self.strides

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        num_bytes, name = DTYPES[self.dtype]
        interface = {"shape": self.shape, "typestr": name, "data": (self.address, False), "version": 3}
        if self.strides is not None:
            interface["strides"] = tuple(stride * num_bytes for stride in self.strides)
        return interface


class PlannedArray(RawArray):
    """A `RawArray` without memory, of a step that is only counted or noted. Addresses are offsets in it."""

    @property
    def is_meta(self) -> bool:
        return True


class HostArray(RawArray):
    """A `RawArray` in memory of the host that the device reads too; its owner is an array of NumPy's."""

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Self:
        """Over contiguous values, which it keeps."""
        return cls(values.ctypes.data, values.shape, values.dtype.name, values)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The same memory, of adjacent elements, which the result keeps."""
        assert self.is_contiguous()
        element = np.dtype(self.dtype)
        size = self.numel() * element.itemsize
        memory = (ctypes.c_uint8 * size).from_address(self.address)
        memory.owner = self.owner  # type: ignore[attr-defined]
        values: np.ndarray[Any, Any] = np.ctypeslib.as_array(memory).view(element).reshape(self.shape)
        return values


def check_array(name: str, array: DeviceArray, dtype: str, *, is_contiguous: bool = True) -> None:
    """ArrayError, with the argument's `name`, for elements of another type or, if asked, with gaps."""
    if name_of(array.dtype) != dtype:
        raise ArrayError(f"{name}: {name_of(array.dtype)} where the kernel reads {dtype}")
    if is_contiguous and not array.is_contiguous():
        raise ArrayError(f"{name}: an array {tuple(array.shape)} with gaps where the kernel reads none")


def element_bytes(array: DeviceArray) -> int:
    """Of one element."""
    return ELEMENT_BYTES[name_of(array.dtype)]


def as_type(array: DeviceArray, dtype: str) -> RawArray:
    """A view of adjacent elements [..., n] as those of another type, [..., m]; it keeps the array.

    ArrayError for gaps, and for rows that are no whole number of elements.
    """
    row_bytes, size = array.shape[-1] * element_bytes(array), ELEMENT_BYTES[dtype]
    if not array.is_contiguous() or row_bytes % size:
        raise ArrayError(f"rows of {row_bytes} bytes in {tuple(array.shape)} are not seen as {dtype}")
    return _kind_of(array)(array.data_ptr(), (*array.shape[:-1], row_bytes // size), dtype, array)


def unowned(array: DeviceArray) -> RawArray:
    """The same contiguous memory without owning it, for the outputs of a captured graph."""
    assert array.is_contiguous()
    return _kind_of(array)(array.data_ptr(), tuple(array.shape), name_of(array.dtype))


def num_bytes_of(array: DeviceArray) -> int:
    """Of its elements."""
    return array.numel() * element_bytes(array)


@cache
def name_of(dtype: Any) -> str:
    """`float32` of "float32" and of PyTorch's dtype."""
    return str(dtype).removeprefix("torch.")


def _kind_of(array: DeviceArray) -> type[RawArray]:
    return type(array) if isinstance(array, RawArray) else RawArray


def _adjacent(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))
