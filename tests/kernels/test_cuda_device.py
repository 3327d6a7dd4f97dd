"""Failures of a GPU are reported as errors of coldstream; simulated, so that no GPU is needed."""

import ctypes
import threading
from functools import cache
from types import SimpleNamespace

import pytest
from cuda.bindings import driver
from cuda.pathfinder import DynamicLibNotFoundError

from coldstream.errors import ColdstreamError, DeviceError, OutOfMemoryError
from coldstream.kernels.cuda import ahead, device, limits, program
from coldstream.kernels.cuda.device import device_errors, find_gpu
from coldstream.kernels.cuda.driver import Driver, DriverDevice
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.runtime import calls
from host_driver import CAPABILITY


@pytest.fixture(autouse=True)
def _half_a_gibibyte_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "free_memory", lambda: (2**29, 2**33))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), device_errors():
        raise RuntimeError("shapes differ")


def test_a_kernel_that_finds_no_memory_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    monkeypatch.setattr(calls, "attach", lambda: None)
    monkeypatch.setattr(program.driver, "cuModuleLoadData", lambda cubin: (status, None))
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        program._loaded(["kernel"], [program.MachineCode(b"", "kernel")])


def test_an_error_that_is_kept_keeps_no_arrays() -> None:
    class Array:
        alive = True

        def __del__(self) -> None:
            Array.alive = False

    def step() -> None:
        array = Array()
        assert array.alive
        raise DeviceError("broken")

    with pytest.raises(ColdstreamError) as caught, device_errors():
        step()
    assert not Array.alive, caught


@pytest.mark.parametrize("found", [0, 100])
def test_the_context_is_made_beside_imports(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another thread, which has ended before devices are asked for; without a device there is none."""
    calls: list[tuple[str, bool]] = []

    def noted(name: str, status: int = 0) -> object:
        def call(*args: object) -> int:
            calls.append((name, threading.current_thread() is threading.main_thread()))
            return status

        return call

    names = {"cuInit": 0, "cuDeviceGet": found, "cuDevicePrimaryCtxRetain": 0}
    driver = SimpleNamespace(**{name: noted(name, status) for name, status in names.items()})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(ahead, "_load", lambda path, mode: True)
    monkeypatch.setattr(ahead, "_begun", cache(ahead._begun.__wrapped__))
    monkeypatch.setattr(device, "missing_packages", lambda: ())

    def find_driver() -> Driver:
        calls.append(("devices", True))
        return Driver()

    monkeypatch.setattr(device, "find_driver", find_driver)
    with pytest.raises(DeviceError, match="the driver shows none"):
        find_gpu()
    made = [(name, False) for name in names if name != "cuDevicePrimaryCtxRetain" or not found]
    assert calls == [*made, ("devices", True)]


def test_a_driver_that_makes_no_context_is_found_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    monkeypatch.setattr(device, "missing_packages", lambda: ())
    with pytest.raises(DeviceError, match="the driver shows none"):
        find_gpu()


def test_a_card_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Driver((13, 0), 0, (DriverDevice("Old GPU", (7, 0), 2**33),))
    monkeypatch.setattr(device, "missing_packages", lambda: ())
    monkeypatch.setattr(device, "find_driver", lambda: old)
    with pytest.raises(DeviceError, match=r"Old GPU has compute capability 7\.0.*use device cpu"):
        find_gpu()


@pytest.mark.parametrize("error", [DeviceError("no device"), DynamicLibNotFoundError("no driver")])
def test_without_a_gpu_a_block_has_the_shared_memory_that_is_assumed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory is planned on a machine without a GPU."""

    def refuse(index: int) -> DeviceLimits:
        raise error

    monkeypatch.setattr(limits, "_limits_of", refuse)
    assert limits.shared_per_block(1000) == 1000
    monkeypatch.setattr(limits, "_limits_of", lambda index: DeviceLimits(1, 2000, 3000))
    assert limits.shared_per_block(1000) == 2000


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_what_the_driver_shows() -> None:
    gpu = find_gpu()
    assert (gpu.name, gpu.capability, gpu.num_multiprocessors) == ("the host", CAPABILITY, 3)
    assert gpu.free_bytes == 2**29
    assert gpu.total_bytes == 2**33
