"""Arrays that launchers take: views as PyTorch's, checks that name the argument, launches without tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels.cuda.array import (
    DTYPES,
    ArrayError,
    DeviceArray,
    RawArray,
    as_type,
    check_array,
    element_bytes,
)
from coldstream.kernels.rms_norm.cuda import rms_norm_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda
from host_device import HostDevice

indices = st.one_of(
    st.integers(-2, 1),
    st.slices(4).filter(lambda part: part.step is None or part.step > 0),
)


@pytest.fixture(autouse=True, scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostDevice]:
    with HostDevice(tmp_path_factory.mktemp("kernels")).installed() as device:
        yield device


def raw(values: np.ndarray[Any, Any]) -> RawArray:
    """The memory of an array of NumPy's, which it keeps."""
    strides = tuple(stride // values.itemsize for stride in values.strides)
    return RawArray(values.ctypes.data, values.shape, values.dtype.name, values, strides)


def seen(array: DeviceArray) -> tuple[object, ...]:
    """What a launcher can ask of an array."""
    sizes = array.dim(), array.numel(), array.shape, array.is_contiguous(), element_bytes(array)
    strides = [stride for stride, size in zip(array.stride(), array.shape, strict=True) if size > 1]
    return *sizes, strides, array.data_ptr() if array.numel() else None


@given(
    shape=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    parts=st.lists(indices, max_size=3),
    dtype=st.sampled_from([*DTYPES]),
)
def test_views_are_those_of_tensors(shape: list[int], parts: list[int | slice], dtype: str) -> None:
    values = torch.zeros(shape, dtype=getattr(torch, dtype))
    own = RawArray(values.data_ptr(), tuple(shape), dtype, values)
    index = tuple(parts[: len(shape)])
    view = own[index]
    assert seen(view) == seen(values[index])
    assert view.owner is values
    assert [seen(row) for row in own] == [seen(row) for row in values]
    for part in parts:
        assert seen(own[part]) == seen(values[part])
        assert own[part].owner is values


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    dtypes=st.tuples(st.sampled_from([*DTYPES]), st.sampled_from([*DTYPES])),
)
def test_elements_are_seen_as_those_of_another_type(shape: list[int], dtypes: tuple[str, str]) -> None:
    """As tensors are, or, where rows are no whole number of such elements, not at all."""
    dtype, other = dtypes
    values = torch.zeros(shape, dtype=getattr(torch, dtype))
    own = RawArray(values.data_ptr(), tuple(shape), dtype, values)
    if shape[-1] * DTYPES[dtype][0] % DTYPES[other][0]:
        with pytest.raises(ArrayError, match=f"are not seen as {other}"):
            as_type(own, other)
        return
    view = as_type(own, other)
    assert seen(view) == seen(values.view(getattr(torch, other)))
    assert (view.dtype, view.owner) == (other, own)


def test_elements_with_gaps_are_not_seen_as_others() -> None:
    array = RawArray(4096, (4, 8), "int32")
    with pytest.raises(ArrayError, match=r"rows of 16 bytes in \(4, 4\)"):
        as_type(array[:, 2:6], "uint8")


def test_views_that_tensors_do_not_have_are_refused() -> None:
    array = RawArray(4096, (3, 2), "int32")
    for index in ((0, 0, 0), slice(None, None, -1), 3):
        with pytest.raises(IndexError):
            array[index]


def test_pytorch_reads_the_cuda_array_interface() -> None:
    """What `torch.as_tensor` asks on a device."""
    array = RawArray(4096, (4, 6), "int16")
    assert array.__cuda_array_interface__ == {
        "shape": (4, 6), "typestr": "<i2", "data": (4096, False), "version": 3,
    }  # fmt: skip
    part = array[1:3, 2:4].__cuda_array_interface__
    assert (part["shape"], part["strides"], part["data"]) == ((2, 2), (12, 2), (4096 + 12 + 4, False))


@pytest.mark.parametrize("kind", ["tensor", "raw"])
def test_an_argument_of_another_kind_is_named(kind: str) -> None:
    values = np.zeros((4, 6), np.int32)
    array = torch.from_numpy(values) if kind == "tensor" else raw(values)
    check_array("ids", array, "int32")
    check_array("ids", array[:, ::2], "int32", is_contiguous=False)
    with pytest.raises(ArrayError, match="ids: int32 where the kernel reads float32"):
        check_array("ids", array, "float32")
    with pytest.raises(ArrayError, match=r"ids: an array \(4, 3\) with gaps"):
        check_array("ids", array[:, ::2], "int32")


def test_launchers_take_arrays_that_are_no_tensors() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((5, 256), np.float32), rng.standard_normal(256, np.float32)
    normed, gated = np.full((2, 5, 256), np.nan, np.float32), np.full((2, 5, 256), np.nan, np.float32)
    rms_norm_cuda(raw(x), raw(weight), 1e-6, raw(normed[0]), None)
    rms_norm_cuda(*map(torch.from_numpy, (x, weight)), 1e-6, torch.from_numpy(normed[1]), None)
    swiglu_cuda(raw(x), raw(normed[0]), raw(gated[0]), None)
    swiglu_cuda(*map(torch.from_numpy, (x, normed[1], gated[1])), None)
    assert np.isfinite(normed).all()
    assert np.isfinite(gated).all()
    assert (normed[0] == normed[1]).all()
    assert (gated[0] == gated[1]).all()
