"""Host memory that is locked for the device: on which threads, and what counts as the system's refusal."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.kernels.cuda import host_memory
from coldstream.kernels.cuda.host_memory import RegisteredMemory

SUCCESS = driver.CUresult.CUDA_SUCCESS


class Device:
    """A driver that knows which threads have its context."""

    def __init__(self) -> None:
        self.with_context: set[int] = set()
        self.registered: list[int] = []
        self.answer = SUCCESS

    def attach(self) -> None:
        self.with_context.add(threading.get_ident())

    def register(self, address: int, num_bytes: int, flags: int) -> tuple[driver.CUresult]:
        if threading.get_ident() not in self.with_context:
            return (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self.answer == SUCCESS:
            self.registered.append(address)
        return (self.answer,)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(host_memory.calls, "attach", device.attach)
    monkeypatch.setattr(driver, "cuMemHostRegister", device.register)
    monkeypatch.setattr(driver, "cuMemHostGetDevicePointer", lambda address, _: (SUCCESS, address + 4096))
    return device


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
