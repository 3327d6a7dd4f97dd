"""Failures of a GPU are reported as errors of coldstream; simulated, so that no GPU is needed."""

import ctypes
import threading
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

from coldstream.errors import ColdstreamError, DeviceError, OutOfMemoryError
from coldstream.kernels.cuda import ahead, device, program
from coldstream.kernels.cuda.device import device_errors, find_gpu
from coldstream.kernels.cuda.runtime import calls


@pytest.fixture(autouse=True)
def _half_a_gibibyte_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "free_memory", lambda: (2**29, 2**33))


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), OutOfMemoryError, "0.5 GiB are free"),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), OutOfMemoryError, "--ctx-size"),
        (torch.AcceleratorError("CUDA error: misaligned address"), DeviceError, "misaligned.*start it again"),
    ],
)
def test_errors_of_the_device_become_ours(
    error: Exception, expected: type[ColdstreamError], message: str
) -> None:
    with pytest.raises(expected, match=message) as caught, device_errors():
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), device_errors():
        raise RuntimeError("shapes differ")


def test_a_kernel_that_finds_no_memory_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    monkeypatch.setattr(calls, "attach", lambda: None)
    monkeypatch.setattr(program.driver, "cuModuleLoadData", lambda cubin: (status, None))
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        program.Kernel(program.MachineCode(b"", "kernel"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), DeviceError("broken")])
def test_an_error_that_is_kept_keeps_no_tensors(error: Exception) -> None:
    class Tensor:
        alive = True

        def __del__(self) -> None:
            Tensor.alive = False

    def step() -> None:
        tensor = Tensor()
        assert tensor.alive
        raise error

    with pytest.raises(ColdstreamError) as caught, device_errors():
        step()
    assert not Tensor.alive, caught


@pytest.mark.parametrize("found", [0, 100])
def test_the_context_is_made_beside_the_import_of_pytorch(
    found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another thread, which has ended before PyTorch is asked; without a device there is none."""
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
    monkeypatch.setattr(ahead, "_load_libraries", lambda: None)
    monkeypatch.setattr(ahead, "_begun", cache(ahead._begun.__wrapped__))
    monkeypatch.setattr(device, "missing_packages", lambda: ())
    monkeypatch.setattr(device, "gpu_is_visible", lambda: True)

    def is_available() -> bool:
        calls.append(("PyTorch", True))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(DeviceError, match="has no CUDA"):
        find_gpu()
    made = [(name, False) for name in names if name != "cuDevicePrimaryCtxRetain" or not found]
    assert calls == [*made, ("PyTorch", True)]


def test_a_driver_that_makes_no_context_is_found_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    monkeypatch.setattr(device, "missing_packages", lambda: ())
    monkeypatch.setattr(device, "gpu_is_visible", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="the driver shows none"):
        find_gpu()
