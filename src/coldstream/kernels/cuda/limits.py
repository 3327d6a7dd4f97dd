"""Properties of the device that launches depend on."""

import functools
from dataclasses import dataclass

from cuda.bindings import driver
from cuda.pathfinder import DynamicLibNotFoundError

from coldstream.errors import DeviceError
from coldstream.kernels.cuda.features import Features
from coldstream.kernels.cuda.runtime import calls

MAX_OVERLAP_ROWS = 128


def overlaps(num_rows: int) -> bool:
    """Whether a kernel over `num_rows` rows starts while the one before it ends.

    This hides the start of short kernels. After long ones, waiting blocks would occupy registers and shared
    memory that computing blocks need (docs/notes/gpu-prefill.md).
    """
    return num_rows <= MAX_OVERLAP_ROWS


@dataclass(frozen=True)
class DeviceLimits:
    """Resources for the blocks of a kernel; shared memory in bytes."""

    num_processors: int
    shared_per_block: int
    shared_per_processor: int
    has_warpgroups: bool = False  # see `Features`
    reserved_per_block: int = 1024  # shared memory that the system takes; none before Ampere


def device_limits() -> DeviceLimits:
    """The limits of the device. Raises DeviceError if the driver does not report them."""
    return _limits_of(calls.device_index())


def shared_per_block(without_gpu: int) -> int:
    """Bytes of shared memory for a block of the device.

    Memory is planned on machines without a GPU too: `without_gpu` is what a block is taken to have there.
    """
    try:
        return device_limits().shared_per_block
    except (DynamicLibNotFoundError, DeviceError):
        return without_gpu


@functools.cache
def _limits_of(index: int) -> DeviceLimits:
    names = driver.CUdevice_attribute
    return DeviceLimits(
        _attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, index),
        _attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, index),
        _attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, index),
        Features.of(calls.capability()).has_warpgroups,
        _attribute(names.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, index),
    )


def _attribute(name: "driver.CUdevice_attribute", index: int) -> int:
    status, value = driver.cuDeviceGetAttribute(name, index)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the GPU driver does not say {name.name} of device {index}")
    return int(value)
