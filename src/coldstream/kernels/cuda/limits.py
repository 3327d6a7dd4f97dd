"""What launches are fitted to."""

import functools
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError

MAX_OVERLAP_ROWS = 64


def overlaps(num_rows: int) -> bool:
    """Whether a kernel over so many rows starts while the one in front of it ends.

    That hides the start of short kernels. Behind long ones the blocks that wait hold the registers and the
    shared memory of blocks that would compute (docs/log.md).
    """
    return num_rows <= MAX_OVERLAP_ROWS


@dataclass(frozen=True)
class DeviceLimits:
    """What a device has for the blocks of a kernel; shared memory in bytes."""

    num_processors: int
    shared_per_block: int
    shared_per_processor: int
    has_warpgroups: bool = False  # products of four warps, which only sm_90 has


def device_limits() -> DeviceLimits:
    """Of the device that PyTorch uses now. Raises DeviceError if the driver does not say."""
    return _limits_of(torch.cuda.current_device())


@functools.cache
def _limits_of(index: int) -> DeviceLimits:
    names = driver.CUdevice_attribute
    return DeviceLimits(
        _attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, index),
        _attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, index),
        _attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, index),
        torch.cuda.get_device_capability(index) == (9, 0),
    )


def _attribute(name: "driver.CUdevice_attribute", index: int) -> int:
    status, value = driver.cuDeviceGetAttribute(name, index)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the GPU driver does not say {name.name} of device {index}")
    return int(value)
