"""Host memory that is locked for the device: on which threads, and what counts as the system's refusal."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import DeviceError
from coldstream.kernels.cuda import host_memory
from coldstream.kernels.cuda.host_memory import PIECE_BYTES, SPARE_PIECES, RegisteredMemory, parts_of

SUCCESS = driver.CUresult.CUDA_SUCCESS


class Device:
    """A driver that knows which threads have its context."""

    def __init__(self) -> None:
        self.with_context: set[int] = set()
        self.registered: list[int] = []
        self.sizes: list[int] = []
        self.answer = SUCCESS
        self.refuses_after = 1000  # registrations
        self.shift = 0  # of the device's address from one registration to the next

    def attach(self) -> None:
        self.with_context.add(threading.get_ident())

    def register(self, address: int, num_bytes: int, flags: int) -> tuple[driver.CUresult]:
        if threading.get_ident() not in self.with_context:
            return (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if len(self.registered) >= self.refuses_after:
            return (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        if self.answer == SUCCESS:
            self.registered.append(address)
            self.sizes.append(num_bytes)
        return (self.answer,)

    def pointer(self, address: int, _: int) -> tuple[driver.CUresult, int]:
        return SUCCESS, address + 4096 + self.shift * (len(self.registered) - 1)

    def unregister(self, address: int) -> tuple[driver.CUresult]:
        place = self.registered.index(address)
        del self.registered[place], self.sizes[place]
        return (SUCCESS,)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    _replace(monkeypatch, device)
    return device


def _replace(patch: pytest.MonkeyPatch, device: Device) -> None:
    patch.setattr(host_memory.calls, "attach", device.attach)
    patch.setattr(driver, "cuMemHostRegister", device.register)
    patch.setattr(driver, "cuMemHostUnregister", device.unregister)
    patch.setattr(driver, "cuMemHostGetDevicePointer", device.pointer)


def test_a_thread_that_has_not_used_the_device_locks_memory(device: Device) -> None:
    """Without the device's context the driver refuses, and experts would be left to the CPU for good."""
    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(RegisteredMemory.register, 8192, 100).result()
    assert memory is not None
    assert memory.offset == 4096
    assert device.registered == [8192]


def test_what_the_system_refuses_is_none(device: Device) -> None:
    device.answer = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert RegisteredMemory.register(8192, 100) is None
    assert device.registered == []


def test_a_call_that_cannot_succeed_is_no_refusal(device: Device) -> None:
    device.answer = driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    with pytest.raises(DeviceError, match="HOST_MEMORY_ALREADY_REGISTERED; open the model again"):
        RegisteredMemory.register(8192, 100)


def test_large_memory_is_locked_in_pieces(device: Device) -> None:
    """Other calls of the driver go on between two of them."""
    address, num_bytes = 3 * PIECE_BYTES - 8192 + 100, 2 * PIECE_BYTES + 5000
    memory = RegisteredMemory.register(address, num_bytes)
    assert memory is not None
    assert memory.offset == 4096
    assert device.registered == [3 * PIECE_BYTES - 8192, 3 * PIECE_BYTES, 4 * PIECE_BYTES]
    assert device.registered[-1] + device.sizes[-1] == 5 * PIECE_BYTES
    assert [start + size for start, size in zip(device.registered, device.sizes, strict=True)][:2] == (
        device.registered[1:]
    )
    memory.close()
    assert device.registered == []


def test_a_refusal_half_way_leaves_nothing_locked(device: Device) -> None:
    device.refuses_after = 2
    assert RegisteredMemory.register(0, 3 * PIECE_BYTES) is None
    assert device.registered == []


@given(st.integers(0, 40), st.integers(1, 30), st.integers(0, 2 * PIECE_BYTES))
def test_what_the_system_locks_before_it_refuses_is_kept_but_for_a_rest(
    refuses_after: int, num_pieces: int, address: int
) -> None:
    """The rest is for what is locked later."""
    device = Device()
    device.refuses_after = refuses_after
    num_bytes = num_pieces * PIECE_BYTES - 5
    with pytest.MonkeyPatch.context() as patch:
        _replace(patch, device)
        memory = RegisteredMemory.register(address, num_bytes)
        locked = dict(zip(device.registered, device.sizes, strict=True))
        if refuses_after <= SPARE_PIECES and memory is not None:
            assert memory.is_whole
        if memory is None:
            assert not locked
            return
        end = sum(max(locked.items()))
        assert memory.is_whole == (end >= address + num_bytes)
        assert memory.is_whole or len(locked) == refuses_after - SPARE_PIECES
        assert memory.covers(address, num_bytes) == memory.is_whole
        for offset in (0, 1, PIECE_BYTES - 5, num_bytes // 2, num_bytes - 1):
            is_locked = any(start <= address + offset < start + size for start, size in locked.items())
            assert memory.covers(address + offset, 1) == is_locked
        memory.close()
        assert not device.registered


def test_what_is_given_up_half_way_is_unlocked(device: Device) -> None:
    """At the next piece."""
    memory = RegisteredMemory.register(0, 9 * PIECE_BYTES, is_given_up=lambda: len(device.registered) == 2)
    assert memory is None
    assert device.registered == []
    assert RegisteredMemory.register(0, 2 * PIECE_BYTES, is_given_up=lambda: False) is not None


def test_pieces_that_the_device_sees_apart_are_locked_as_one(device: Device) -> None:
    device.shift = 4096
    memory = RegisteredMemory.register(0, 3 * PIECE_BYTES)
    assert memory is not None
    assert (device.registered, device.sizes) == ([0], [3 * PIECE_BYTES])


@given(address=st.integers(0, 5 * PIECE_BYTES), num_bytes=st.integers(0, 3 * PIECE_BYTES))
def test_parts_of_a_copy_are_of_one_piece_each(address: int, num_bytes: int) -> None:
    parts = list(parts_of(address, num_bytes))
    assert sum(size for _, size in parts) == num_bytes
    end = 0
    for offset, size in parts:
        assert offset == end
        assert (address + offset) // PIECE_BYTES == (address + offset + size - 1) // PIECE_BYTES
        end = offset + size
    assert len(parts) <= num_bytes // PIECE_BYTES + 2, "no more than there are pieces"
