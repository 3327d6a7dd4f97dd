"""Puts a `ModelDevice` where the package meets streams, the driver's copies and its own kernels."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from hypothesis import Phase, settings
from hypothesis import strategies as st

from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.array import HostArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, calls, copies, graphs, streams
from coldstream.kernels.experts.mailbox import WORDS_PER_LINE
from device_model import ModelDevice, ModelEvent, ModelStream, Operation
from host_device import LIMITS

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
    for module in (calls, streams, graphs, allocations, copies):
        patch.setattr(module, "attach", lambda: None)
    patch.setattr(streams, "Stream", lambda: ModelStream(device))
    patch.setattr(streams, "Event", partial(ModelEvent, device))
    patch.setattr(streams, "current_stream", lambda: device.current)
    patch.setattr(streams, "default_stream", lambda: device.default)
    patch.setattr(streams, "on_stream", device.on)
    patch.setattr(calls, "synchronize", device.synchronize)
    patch.setattr(limits, "_limits_of", lambda index: LIMITS)
    patch.setattr(calls, "free_memory", lambda: (device.free_bytes, 2**41))
    patch.setattr(allocations, "block", device.allocate)
    patch.setattr(allocations, "page_locked", np.zeros)
    patch.setattr(driver, "cuMemcpyHtoDAsync", partial(_copy, device))
    patch.setattr(driver, "cuMemsetD8Async", partial(_fill, device))
    patch.setattr(driver, "cuMemsetD2D8Async", partial(_fill_rows, device))
    patch.setattr(driver, "cuMemcpyHtoD", partial(_copy_at_once, device))
    patch.setattr(driver, "cuMemcpyDtoHAsync", partial(_copy_back, device))
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


def _copy(device: ModelDevice, target: int, source: int, size: int, handle: int) -> tuple[object]:
    return (DONE if device.copy_to_device([(target, source, size)], handle) else REFUSED,)


def _copy_at_once(device: ModelDevice, target: int, source: int, size: int) -> tuple[object]:
    device.copy_to_device([(target, source, size)], device.default.handle)
    device.default.synchronize()
    return (DONE,)


def _fill(device: ModelDevice, address: int, byte: int, size: int, handle: int) -> tuple[object]:
    device.fill(address, byte, size, handle)
    return (DONE,)


def _fill_rows(
    device: ModelDevice, address: int, pitch: int, byte: int, width: int, height: int, handle: int
) -> tuple[object]:
    for row in range(height):
        device.fill(address + row * pitch, byte, width, handle)
    return (DONE,)


def _copy_back(device: ModelDevice, target: int, source: int, size: int, handle: int) -> tuple[object]:
    device.bring_to_host(target, source, size, handle)
    return (DONE,)


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


def _write_addresses(device: ModelDevice, entries: HostArray, count: int) -> None:
    """Like write_addresses.cu: values to addresses, both read from host memory when it is executed."""
    pairs, place = entries.numpy()[:count], (entries.data_ptr(), 16 * count)

    def write(operation: Operation) -> None:
        for address, value in pairs.tolist():
            ctypes.c_int64.from_address(address).value = value

    device.written_by_host(place)
    device.queue(
        "write_addresses",
        host_reads=[place],
        writes=[(address, 8) for address in pairs[:, 0].tolist()],
        effect=write,
    )


def _wait_answer(device: ModelDevice, answer: ctypes.Structure) -> None:
    """Like wait_answer.cu: later operations run when the CPU has answered."""
    address: int = answer.done  # type: ignore[attr-defined]
    late: int = answer.late  # type: ignore[attr-defined]
    assert late == address + 4
    done = np.ctypeslib.as_array((ctypes.c_uint32 * WORDS_PER_LINE).from_address(address))
    device.queue("wait_answer", is_ready=lambda: done[0] != 0)
