"""Puts a `ModelDevice` where the package meets PyTorch's streams, the driver's copies and its own kernels."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver
from hypothesis import Phase, settings
from hypothesis import strategies as st

from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.experts.mailbox import WORDS_PER_LINE
from device_model import ModelDevice, ModelEvent, ModelStream, Operation, range_of

# Without shrinking: no seed of a schedule is simpler than another.
seeds = st.integers(0, 2**32 - 1)
any_schedule = settings(max_examples=30, phases=(Phase.explicit, Phase.generate))
DEVICE_OFFSET = 2**46  # from where the host sees registered memory to where the device does
DONE, REFUSED = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY


@contextmanager
def model_device(seed: int) -> Iterator[ModelDevice]:
    """A device that all code inside uses; at the end everything runs, and violations are raised."""
    device = ModelDevice(seed)
    device.kernels["write_addresses"] = partial(_write_addresses, device)
    device.kernels["wait_answer"] = partial(_wait_answer, device)
    with pytest.MonkeyPatch.context() as patch:
        _replace(patch, device)
        yield device
        device.synchronize()
        device.check()


def _replace(patch: pytest.MonkeyPatch, device: ModelDevice) -> None:
    patch.setattr(torch.cuda, "Stream", lambda: ModelStream(device))
    patch.setattr(torch.cuda, "Event", partial(ModelEvent, device))
    patch.setattr(torch.cuda, "current_stream", lambda: device.current)
    patch.setattr(torch.cuda, "stream", device.on)
    patch.setattr(torch.cuda, "synchronize", device.synchronize)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (device.free_bytes, 2**41))
    patch.setattr(torch, "empty", _without_gpu(torch.empty, device))
    patch.setattr(torch, "zeros", _without_gpu(torch.zeros, device))
    patch.setattr(torch.Tensor, "copy_", _copying(torch.Tensor.copy_, device))
    patch.setattr(driver, "cuMemcpyHtoDAsync", partial(_copy, device))
    patch.setattr(driver, "cuMemcpyBatchAsync", partial(_copy_batch, device))
    patch.setattr(driver, "cuMemHostRegister", lambda *_: (DONE if device.registers else REFUSED,))
    patch.setattr(driver, "cuMemHostGetDevicePointer", lambda address, _: (DONE, address + DEVICE_OFFSET))
    patch.setattr(driver, "cuMemHostUnregister", lambda *_: (DONE,))
    patch.setattr(driver, "cuGetErrorString", lambda status: (DONE, b"refused"))
    patch.setattr(CudaProgram, "kernel", lambda program, instance: _Kernel(device, instance))


class _Kernel:
    """In place of a loaded one."""

    def __init__(self, device: ModelDevice, instance: str) -> None:
        self._queue = device.kernels[instance.partition("<")[0]]

    def launch(self, grid: object, block: int, args: Any, **options: object) -> None:
        self._queue(*args)


def _without_gpu(make: Callable[..., torch.Tensor], device: ModelDevice) -> Callable[..., torch.Tensor]:
    def made(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if options.get("device") != "cuda":
            return make(*size, **options)
        assert options == {"device": "cuda", "dtype": torch.uint8}
        return device.allocate(*size)

    return made


def _copying(copy: Callable[..., torch.Tensor], device: ModelDevice) -> Callable[..., torch.Tensor]:
    def copying(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy(target, source)
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        device.copy_to_host(target, source)
        return target

    return copying


def _copy(device: ModelDevice, target: int, source: int, size: int, handle: int) -> tuple[object]:
    return (DONE if device.copy_to_device([(target, source, size)], handle) else REFUSED,)


def _copy_batch(
    device: ModelDevice,
    targets: list[Any],
    sources: list[Any],
    sizes: list[int],
    count: int,
    attributes: list[Any],
    first: list[int],
    num_attributes: int,
    handle: int,
) -> tuple[object]:
    assert len(targets) == len(sources) == len(sizes) == count
    assert (len(attributes), first, num_attributes) == (1, [0], 1)
    in_order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert attributes[0].srcAccessOrder == in_order, "the source may be reused before its turn otherwise"
    pieces = list(zip(map(int, targets), map(int, sources), sizes, strict=True))
    return (DONE if device.copy_to_device(pieces, handle) else REFUSED,)


def _write_addresses(device: ModelDevice, entries: torch.Tensor, count: int) -> None:
    """Like write_addresses.cu: values to addresses, both read from host memory when it is executed."""

    def write(operation: Operation) -> None:
        for address, value in entries[:count].tolist():
            ctypes.c_int64.from_address(address).value = value

    device.written_by_host(range_of(entries[:count]))
    device.queue(
        "write_addresses",
        host_reads=[range_of(entries[:count])],
        writes=[(address, 8) for address in entries[:count, 0].tolist()],
        effect=write,
    )


def _wait_answer(device: ModelDevice, answer: ctypes.Structure) -> None:
    """Like wait_answer.cu: later operations run when the CPU has answered."""
    address: int = answer.done  # type: ignore[attr-defined]
    late: int = answer.late  # type: ignore[attr-defined]
    assert late == address + 4
    done = np.ctypeslib.as_array((ctypes.c_uint32 * WORDS_PER_LINE).from_address(address))
    device.queue("wait_answer", is_ready=lambda: done[0] != 0)
