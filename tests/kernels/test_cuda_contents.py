"""Arrays of the device are cleared, written and read, on the host's driver and on a GPU's."""

import numpy as np
import pytest

from coldstream.kernels.cuda.array import DTYPES, ArrayError, RawArray
from coldstream.kernels.cuda.contents import CudaArray, clear, read, write
from coldstream.kernels.cuda.runtime import allocations, copies
from host_driver import HostDriver

pytestmark = pytest.mark.usefixtures("driver")

RUBBISH, GUARD = 0xA5, 64  # bytes before an array and behind it


class Planned(RawArray):
    """An array of a plan, with memory that would show what is done to it."""

    @property
    def is_meta(self) -> bool:
        return True


def guarded(shape: tuple[int, ...], dtype: str) -> tuple[RawArray, RawArray]:
    """An array, and all bytes of its memory: GUARD more on both sides, of RUBBISH."""
    num_bytes = int(np.prod(shape)) * DTYPES[dtype][0] + 2 * GUARD
    memory = allocations.block(num_bytes)
    copies.fill_bytes(memory.address, RUBBISH, num_bytes)
    whole = RawArray(memory.address, (num_bytes,), "uint8", memory)
    return RawArray(memory.address + GUARD, shape, dtype, memory), whole


def bytes_around(whole: RawArray) -> set[int]:
    """The different bytes of both guards."""
    found = read(whole)
    return {*found[:GUARD].tolist(), *found[-GUARD:].tolist()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (0, 4)], ids=str)
def test_values_are_written_and_read(shape: tuple[int, ...], dtype: str) -> None:
    array, whole = guarded(shape, dtype)
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    write(array, values)
    values_there = read(array)
    assert values_there.dtype == values.dtype
    np.testing.assert_array_equal(values_there, values)
    assert bytes_around(whole) == {RUBBISH}
    clear(array)
    np.testing.assert_array_equal(read(array), np.zeros(shape))
    assert bytes_around(whole) == {RUBBISH}


def test_values_with_gaps_are_written_in_their_order() -> None:
    array, _ = guarded((5, 3), "int32")
    values = np.arange(30, dtype=np.int32).reshape(6, 5)[::2].T
    write(array, values)
    np.testing.assert_array_equal(read(array), values)


@pytest.mark.parametrize("values", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.int32)], ids=str)
def test_values_of_another_kind_are_no_values_of_an_array(values: np.ndarray) -> None:
    array, _ = guarded((2, 3), "int32")
    with pytest.raises(AssertionError):
        write(array, values)


def test_nothing_is_done_to_what_is_only_planned() -> None:
    array, whole = guarded((2, 3), "float32")
    planned = Planned(array.address, array.shape, array.dtype, array.owner)
    clear(planned)
    write(planned, np.ones((2, 3), np.float32))
    assert {*read(whole).tolist()} == {RUBBISH}


def test_reading_waits_for_what_is_queued(driver: HostDriver | None) -> None:
    array, _ = guarded((4,), "int32")
    if driver is not None:  # a GPU's copy is late; the host's driver counts
        before = driver.current.num_waits
        read(array)
        assert driver.current.num_waits == before + 1
        return
    for value in range(50):
        copies.fill_words(array.data_ptr(), value, 4)
        assert read(array).tolist() == [value] * 4


def spaced(dtype: str = "float32") -> tuple[CudaArray, np.ndarray]:
    """An array [4, 5, 3, 2] and its values, none of which is zero."""
    values = np.arange(1, 121).reshape(4, 5, 3, 2).astype(dtype)
    memory = allocations.block(values.nbytes)
    array = CudaArray(memory.address, values.shape, dtype, memory)
    write(array, values)
    return array, values


@pytest.mark.parametrize("widest", [copies.MAX_PITCH, 0])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(2, 2)], ids=str)
def test_rows_that_lie_apart_are_cleared(rows: slice, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_PITCH", widest)
    array, values = spaced()
    array[rows, 3] = 0
    values[rows, 3] = 0
    np.testing.assert_array_equal(read(array), values)


@pytest.mark.parametrize("widest", [copies.MAX_PITCH, 0])
@pytest.mark.parametrize("target", [0, 4])
def test_rows_that_lie_apart_are_copied(target: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_PITCH", widest)
    array, values = spaced()
    array[:, target] = array[:, 2]
    values[:, target] = values[:, 2]
    np.testing.assert_array_equal(read(array), values)


def test_elements_of_a_row_must_be_adjacent() -> None:
    array, values = spaced()
    with pytest.raises(ArrayError, match="gaps"):
        array[:, :, 1] = 0
    with pytest.raises(ArrayError, match="gaps"):
        array[:, :, 1] = array[:, :, 2]
    np.testing.assert_array_equal(read(array), values)
