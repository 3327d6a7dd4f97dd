"""Calls of the driver: what their failures mean, and the context that a thread needs for them.

Work is on the first device that the driver shows, in the device's primary context, which other libraries
share. It is made once and kept until the process ends: what is in flight then is dropped with it.
A thread gets it with its first call. A forked child cannot use it: the driver's threads do not exist there.
Inside `on_device`, and on threads that have called `use_device`, work is on another device.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from cuda.bindings import driver
from cuda.core import Device
from cuda.core._utils.cuda_utils import CUDAError  # cuda.core 1.2 has no public name for its error

from coldstream.errors import ColdstreamError, DeviceError, OutOfMemoryError
from coldstream.forks import OwnProcess

DEVICE: Final = 0  # the first one that the driver shows
SUCCESS: Final = driver.CUresult.CUDA_SUCCESS
# After these nothing in the context works any more.
_LOST: Final = frozenset(
    getattr(driver.CUresult, f"CUDA_ERROR_{name}")
    for name in (
        "ECC_UNCORRECTABLE",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
    )
)


def checked(result: tuple[Any, ...]) -> Any:
    """What a call returned beside its status. Raises as `failure_of` has it."""
    if result[0] != SUCCESS:
        raise failure_of(result[0])
    return result[1] if len(result) > 1 else None


def failure_of(status: "driver.CUresult") -> ColdstreamError:
    """The error for a status that is none of success: OutOfMemoryError or DeviceError."""
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return out_of_memory()
    reason = reason_of(status)
    if status in _LOST:
        return DeviceError(
            f"the GPU failed: {reason}; the state of this process's GPU work is lost, start it again"
        )
    return DeviceError(f"the GPU driver refused: {reason}")


class core_errors:
    """Inside, errors of cuda.core become ours. A class and not a generator, as steps enter it often."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, CUDAError):
            name = str(error).partition(":")[0]  # of the driver's status, with its explanation behind
            raise failure_of(getattr(driver.CUresult, name, driver.CUresult.CUDA_ERROR_UNKNOWN)) from error


def reason_of(status: "driver.CUresult") -> str:
    """The driver's own words."""
    text = driver.cuGetErrorString(status)[1]
    return str(text.decode() if text else status.name)


def out_of_memory() -> OutOfMemoryError:
    """The error for an allocation that the device refused."""
    free = free_memory()[0] / 2**30
    return OutOfMemoryError(
        f"the GPU's memory ran out, {free:.1f} GiB are free: another program took some, or the context "
        "is too long; close it, or choose a smaller --ctx-size"
    )


def free_memory() -> tuple[int, int]:
    """Bytes of the device that are free, and all of them."""
    attach()
    status, free, total = driver.cuMemGetInfo()
    checked((status,))
    return int(free), int(total)


class _Attached(threading.local):
    """The device of the thread's calls, and whether its context is the thread's; and frees that wait for the
    end of its capture.
    """

    index = DEVICE
    here = False
    deferred: list[Callable[[], object]] | None = None


_attached = _Attached()


def attach() -> None:
    """Makes the context that of the calling thread. DeviceError where there is none.

    GenerationFault in a forked child of a process that has used the device.
    """
    if not _attached.here or not is_usable_here():
        _process().check()
        with core_errors():
            device().set_current()
        _attached.here = True


def device_index() -> int:
    """The number of the device that the thread's work is on."""
    return _attached.index


def use_device(index: int) -> None:
    """From now on the thread's work is on this device. Raises DeviceError if it cannot be used."""
    _attached.index, _attached.here = index, False
    attach()


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Inside, the thread's work is on this device. Raises as `use_device`."""
    before = device_index()
    try:
        use_device(index)
        yield
    finally:
        use_device(before)


def device() -> Device:
    """The device that the thread's work is on."""
    with core_errors():
        return Device(device_index())


@functools.cache
def _process() -> OwnProcess:
    """The process that first asked for the context."""
    return OwnProcess()


def is_usable_here() -> bool:
    """Whether this is not a forked child of the process that made the context."""
    return _process().is_here()


def attribute(name: str) -> int:
    """A property of the device, by the name of its `CU_DEVICE_ATTRIBUTE_…`."""
    checked(driver.cuInit(0))
    key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked(driver.cuDeviceGetAttribute(key, device_index())))


def capability() -> tuple[int, int]:
    """The device's compute capability."""
    with core_errors():
        major, minor = device().compute_capability
    return int(major), int(minor)


def synchronize() -> None:
    """Returns when all work of the device has ended. Raises DeviceError if some failed."""
    attach()
    with core_errors():
        device().sync()


def begin_deferring() -> None:
    """From now on this thread's frees wait, as a capture allows none."""
    _attached.deferred = []


def end_deferring() -> None:
    """Frees what has waited."""
    waiting, _attached.deferred = _attached.deferred or [], None
    for free in waiting:
        free()


def is_capturing() -> bool:
    """Whether this thread records a graph."""
    return _attached.deferred is not None


def free_later(free: Callable[[], object]) -> None:
    """Calls `free`, which calls the driver: at once, or behind a capture; never in a forked child.

    For finalizers, which run on any thread and at any moment. Failures are ignored: there is nobody to tell.
    """
    if not is_usable_here():
        return
    if _attached.deferred is not None:
        _attached.deferred.append(free)
        return
    try:
        attach()
        free()
    except (ColdstreamError, CUDAError, RuntimeError):  # the last one is for a library that has gone
        return
