"""Copies of arrays on the device, and the memory that they lie in: on the host's driver and on a GPU's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import DeviceError, OutOfMemoryError
from coldstream.kernels.cuda.array import ALIGNMENT, ArrayError, HostArray, PlannedArray, as_type, unowned
from coldstream.kernels.cuda.contents import CudaArray, copy_parts, joined, new, read, take_rows, write
from coldstream.kernels.cuda.memory import DeviceMemory, MemoryPlan, own_bytes
from coldstream.kernels.cuda.runtime import calls
from device_arrays import array_of, tensor_of
from host_driver import TOTAL_BYTES, HostDriver


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    dtype=st.sampled_from(["float32", "int8", "int16"]),
    data=st.data(),
)
def test_rows_are_taken_in_any_order(shape: tuple[int, int], dtype: str, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=8)))
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with HostDriver().installed():
        array = array_of(torch.from_numpy(values))
        taken = take_rows(array, rows)
        assert taken.data_ptr() != array.data_ptr()
        np.testing.assert_array_equal(read(taken), values[rows])


def test_copies_of_a_gpu_are_those_of_the_host(driver: HostDriver | None) -> None:
    values = torch.arange(24.0).reshape(6, 4)
    array = array_of(values)
    rows = np.array([5, 0, 1, 1])
    assert torch.equal(tensor_of(take_rows(array, rows)), values[rows])
    assert torch.equal(tensor_of(joined([array[4:], array[:3]])), values[[4, 5, 0, 1, 2]])
    bits = array_of(values.bfloat16())
    assert torch.equal(tensor_of(joined([bits[1:3]])), values[1:3].bfloat16())


def test_parts_side_by_side_may_be_of_two_allocations() -> None:
    """The driver refuses a copy that begins in one and ends in the other."""
    values = torch.arange(16.0).reshape(4, 4)
    with HostDriver().installed() as driver:
        array = array_of(values)
        driver.split(array.data_ptr(), array.nbytes // 2)
        assert torch.equal(tensor_of(joined([array[:2], array[2:]])), values)
        with pytest.raises(DeviceError):
            joined([array])


def test_parts_that_do_not_fill_their_target_are_refused() -> None:
    with HostDriver().installed():
        target = new((4, 4), "float32")
        for parts in ([new((3, 4), "float32")], [new((4, 4), "int32")], [new((4, 8), "float32")[:, :4]]):
            with pytest.raises(ArrayError):
                copy_parts(parts, target)
        with pytest.raises(ArrayError, match="with gaps"):
            copy_parts([new((2, 4), "float32")], target[:, :2])


def test_assignments_fill_copy_and_write(driver: HostDriver | None) -> None:
    array = array_of(torch.ones(3, 2))
    array[0] = 0
    array[1] = array_of(torch.tensor([4.0, 5.0]))
    array[2, :1] = np.array([7], np.float32)
    assert np.asarray(array).tolist() == [[0, 0], [4, 5], [7, 1]]
    array[1:, 1] = 0
    assert np.asarray(array).tolist() == [[0, 0], [4, 0], [7, 0]]
    with pytest.raises(ArrayError, match="with gaps"):
        np.asarray(array[:, 1])


def test_views_of_planned_arrays_are_planned_and_nothing_is_copied() -> None:
    planned = MemoryPlan().persistent((4, 6), "float32")
    for view in (planned[1:, :2], planned.reshape(-1), as_type(planned, "uint8"), unowned(planned)):
        assert isinstance(view, PlannedArray)
        assert view.is_meta
    copy_parts([planned[:2]], planned[2:])
    write(planned, np.zeros((4, 6), np.float32))


def test_views_are_of_the_kind_of_their_array() -> None:
    assert isinstance(as_type(CudaArray(256, (2, 4), "int32"), "float32"), CudaArray)
    assert isinstance(unowned(HostArray.of(np.zeros(3))), HostArray)


def test_memory_lies_in_two_blocks_of_the_planned_sizes(driver: HostDriver | None) -> None:
    before = calls.free_memory()[0]
    memory = DeviceMemory(3 * ALIGNMENT, 2 * ALIGNMENT)
    arrays = [memory.persistent((3,), "float32") for _ in range(3)]
    assert {(array.data_ptr() - arrays[0].data_ptr()) for array in arrays} == {0, 256, 512}
    first, second = memory.workspace((5,), "int8"), memory.workspace((2, 3), "bfloat16")
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    with pytest.raises(MemoryError, match="of a plan for"):
        memory.persistent((1,), "int8")
    place = first.data_ptr()
    del first
    assert memory.workspace((1,), "int64").data_ptr() == place
    view = second[1]
    del second
    held = memory.workspace((1,), "int8")
    with pytest.raises(MemoryError, match="of a plan for"):  # the view keeps its part
        memory.workspace((1,), "int8")
    del view, held, arrays, memory
    if driver is not None:  # a GPU's driver keeps parts of what small blocks lie in
        assert calls.free_memory()[0] == before


def test_mm01_memory_that_is_not_there_is_an_error_of_ours_and_leaves_none_behind() -> None:
    with HostDriver().installed() as driver:
        with pytest.raises(OutOfMemoryError, match="memory ran out"):
            DeviceMemory(2**20, TOTAL_BYTES)
        with pytest.raises(OutOfMemoryError, match="memory ran out"):
            own_bytes(TOTAL_BYTES + 1)
        with pytest.raises(OutOfMemoryError, match="memory ran out"):
            new((TOTAL_BYTES,), "float32")
        assert driver.taken_bytes == 0
