"""Host memory that the device reads over the bus."""

import mmap
from typing import Self

from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.kernels.cuda.runtime import calls

# Of a process or thread that has no context, and of memory that is locked already: no refusal by the system.
_OWN_FAULTS = (
    driver.CUresult.CUDA_ERROR_NOT_INITIALIZED,
    driver.CUresult.CUDA_ERROR_DEINITIALIZED,
    driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,
    driver.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
)


class RegisteredMemory:
    """A mapping of host memory that the device may read until `close`.

    offset: the device's address minus the host's.
    """

    def __init__(self, address: int, device_address: int) -> None:
        self._address = address
        self.offset = device_address - address

    @classmethod
    def register(cls, address: int, num_bytes: int, *, is_read_only: bool = True) -> Self | None:
        """Locks the pages from `address` on and lets the device read them; None if the system refuses.

        is_read_only: whether the host cannot write them, as those of a mapped file. Reasons are the limit of
        memory that a process may lock, platforms that do not share file mappings with devices, and drivers
        without read-only registration. Raises DeviceError for a call that says nothing of the system.
        """
        calls.attach()
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP
        if is_read_only:
            flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
        (status,) = driver.cuMemHostRegister(begin, end - begin, flags)
        if status in _OWN_FAULTS:
            raise DeviceError(
                f"host memory cannot be locked for the GPU: {status.name}; open the model again"
            )
        if status != driver.CUresult.CUDA_SUCCESS:
            return None
        status, pointer = driver.cuMemHostGetDevicePointer(begin, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            driver.cuMemHostUnregister(begin)
            return None
        return cls(begin, int(pointer))

    def close(self) -> None:
        """Unlocks the pages, which the device must no longer read."""
        driver.cuMemHostUnregister(self._address)
