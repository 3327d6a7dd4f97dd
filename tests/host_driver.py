# ruff: noqa: N802 — functions have the driver's names
"""What the runtime calls, on the host: memory is the host's, and queued work runs at once.

Streams and events order nothing here; `device_model.py` is for that. A recorded graph keeps its calls and
makes them again when it is launched.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from cuda.bindings import driver

from coldstream.kernels.cuda.runtime import allocations, calls, copies, graphs, streams

ALIGNMENT = 256
DONE = driver.CUresult.CUDA_SUCCESS
REFUSED = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
INVALID = driver.CUresult.CUDA_ERROR_INVALID_VALUE
TOTAL_BYTES = 2**36
RUBBISH = 0xA5
CAPABILITY = (8, 0)


Place = Literal["block", "pool", "host"]


class HostStream:
    """A stream without pending work, which counts calls. Queued work has run when a call returns."""

    handle = 0
    core = None

    def __init__(self, core: object = None) -> None:
        self.num_waits = self.num_uploads = self.num_downloads = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def wait_event(self, event: "HostEvent") -> None: ...

    def wait_stream(self, other: "HostStream") -> None: ...


class HostEvent:
    """An event that has happened."""

    def __init__(self, *, has_time: bool = False) -> None: ...

    def record(self, stream: HostStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def milliseconds_since(self, begin: "HostEvent") -> float:
        return 1.0


@dataclass
class _Buffer:
    """Memory of a resource."""

    driver: "HostDriver"
    handle: int

    def close(self, stream: object = None) -> None:
        self.driver.cuMemFree(self.handle)


@dataclass
class _Resource:
    """In place of a memory resource of cuda.core."""

    driver: "HostDriver"
    place: Place
    handle: int = 0

    def allocate(self, size: int, *, stream: object = None) -> _Buffer:
        status, address = self.driver.allocate(size, self.place)
        if status != DONE:
            raise calls.CUDAError(f"{REFUSED.name}: as cuda.core has it")
        return _Buffer(self.driver, address)


@dataclass
class _Recorded:
    """In place of a graph of cuda.core: calls that are made again."""

    calls: list[Callable[[], object]]

    def launch(self, stream: object) -> None:
        for call in self.calls:
            call()


class HostDriver:
    """Replaces what the runtime has of cuda.core, and functions of `cuda.bindings.driver`.

    current: the default stream. recording: the calls of the capture that is going on, else None. taken_bytes:
    of the device's `total_bytes`, with those that the pool keeps of freed memory until it is trimmed.
    registered: bytes of locked memory, by address.
    """

    def __init__(self) -> None:
        self.current = HostStream()
        self.recording: list[Callable[[], object]] | None = None
        self.taken_bytes, self.total_bytes, self._kept_bytes = 0, TOTAL_BYTES, 0
        self.registered: dict[int, int] = {}
        self.most_registered = 2**62  # bytes
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._elsewhere: dict[int, Place] = {}  # those that are no blocks of the device

    @contextmanager
    def installed(self) -> Iterator["HostDriver"]:
        """Inside, the runtime finds this driver, on every thread."""
        with pytest.MonkeyPatch.context() as patch:
            for name in dir(self):
                if name.startswith("cu") and name[2].isupper():
                    patch.setattr(driver, name, getattr(self, name))
            for module in (calls, streams, graphs, allocations, copies):
                patch.setattr(module, "attach", lambda: None)
            for module in (calls, allocations):
                patch.setattr(module, "synchronize", lambda: None)
            patch.setattr(calls, "is_usable_here", lambda: True)
            patch.setattr(calls, "capability", lambda: CAPABILITY)
            patch.setattr(streams, "Stream", HostStream)
            patch.setattr(streams, "Event", HostEvent)
            patch.setattr(streams, "_DEFAULT", self.current)
            patch.setattr(streams, "_current", streams._Current())
            patch.setattr(graphs, "_begun", self.begun)
            patch.setattr(graphs, "_ended", self.ended)
            patch.setattr(graphs, "_dropped", self.ended)
            patch.setattr(allocations, "_pool", lambda: _Resource(self, "pool"))
            patch.setattr(allocations, "_page_locked", lambda: _Resource(self, "host"))
            yield self

    def queue(self, work: Callable[[], object]) -> None:
        """Does it, or records it."""
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    def begun(self, stream: HostStream) -> list[Callable[[], object]]:
        """In place of `graphs._begun`."""
        assert self.recording is None
        self.recording = []
        return self.recording

    def ended(self, recording: list[Callable[[], object]]) -> _Recorded:
        """In place of `graphs._ended`."""
        assert self.recording is recording
        self.recording = None
        return _Recorded(recording)

    def allocate(self, size: int, place: Place) -> tuple[object, int]:
        """A status, and an address if that is DONE."""
        kept = min(size, self._kept_bytes) if place == "pool" else 0
        if place != "host":
            if self.taken_bytes + size - kept > self.total_bytes:
                return REFUSED, 0
            self.taken_bytes += size - kept
            self._kept_bytes -= kept
        memory = self._new_memory(size + ALIGNMENT)
        address = memory.ctypes.data + -memory.ctypes.data % ALIGNMENT
        self._blocks[address] = memory
        if place != "block":
            self._elsewhere[address] = place
        return DONE, address

    def _new_memory(self, num_bytes: int) -> np.ndarray[Any, Any]:
        return np.full(num_bytes, RUBBISH, np.uint8)

    def cuMemAlloc(self, size: int) -> tuple[object, int]:
        return self.allocate(size, "block")

    def split(self, address: int, size: int) -> None:
        """Makes two blocks of the one at `address`, of which the first has `size` bytes."""
        memory = self._blocks[address]
        self._blocks[address], self._blocks[address + size] = memory[: size + ALIGNMENT], memory[size:]

    def cuMemFree(self, address: int) -> tuple[object]:
        assert self.recording is None, "a capture allows no free"
        size, place = len(self._blocks.pop(address)) - ALIGNMENT, self._elsewhere.pop(address, "block")
        if place == "block":
            self.taken_bytes -= size
        elif place == "pool":
            self._kept_bytes += size
        return (DONE,)

    def cuPointerGetAttribute(self, attribute: object, address: int) -> tuple[object, int]:
        assert attribute == driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        types = driver.CUmemorytype
        is_host = self._elsewhere.get(address) == "host"
        return DONE, int(types.CU_MEMORYTYPE_HOST if is_host else types.CU_MEMORYTYPE_DEVICE)

    def cuGetErrorString(self, status: Any) -> tuple[object, bytes]:
        return DONE, status.name.lower().encode()

    def cuMemGetInfo(self) -> tuple[object, int, int]:
        return DONE, self.total_bytes - self.taken_bytes, self.total_bytes

    def cuDeviceGetMemPool(self, device: int) -> tuple[object, int]:
        return DONE, 0

    def cuMemPoolGetAttribute(self, pool: object, attribute: object) -> tuple[object, int]:
        held = [address for address, place in self._elsewhere.items() if place == "pool"]
        used = sum(len(self._blocks[address]) - ALIGNMENT for address in held)
        is_reserved = attribute == driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        return DONE, used + self._kept_bytes if is_reserved else used

    def cuMemPoolTrimTo(self, pool: object, size: int) -> tuple[object]:
        self.taken_bytes, self._kept_bytes = self.taken_bytes - self._kept_bytes, 0
        return (DONE,)

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> tuple[object]:
        return self._copy(target, source, size)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[object]:
        self.current.num_uploads += 1
        if self._is_across(source, size):
            return (INVALID,)
        return self._copy(target, source, size)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[object]:
        self.current.num_downloads += 1
        return self._copy(target, source, size)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[object]:
        if not all(self._is_of_one_block(address, size) for address in (target, source)):
            return (INVALID,)
        return self._copy(target, source, size)

    def _is_of_one_block(self, address: int, size: int) -> bool:
        """False for bytes that begin in a block and end behind it."""
        for start, memory in self._blocks.items():
            room = start + len(memory) - ALIGNMENT - address
            if start <= address and room > 0:
                return size <= room
        return True

    def cuMemcpyBatchAsync(
        self, targets: list[Any], sources: list[Any], sizes: list[int], *_: Any
    ) -> tuple[object]:
        if any(self._is_across(int(source), size) for source, size in zip(sources, sizes, strict=True)):
            return (INVALID,)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self._copy(target, source, size)
        return (DONE,)

    def _is_across(self, source: int, size: int) -> bool:
        """Whether a copy begins in registered memory and ends beyond that registration."""
        return any(begin <= source < begin + of < source + size for begin, of in self.registered.items())

    def _copy(self, target: Any, source: Any, size: int) -> tuple[object]:
        self.queue(lambda: ctypes.memmove(int(target), int(source), size))
        return (DONE,)

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: int) -> tuple[object]:
        self.queue(lambda: ctypes.memset(int(address), byte, size))
        return (DONE,)

    def cuMemsetD2D8Async(
        self, address: int, pitch: int, byte: int, width: int, height: int, stream: int
    ) -> tuple[object]:
        if width > pitch:
            return (INVALID,)
        for row in range(height):
            self.cuMemsetD8Async(int(address) + row * pitch, byte, width, stream)
        return (DONE,)

    def cuMemcpy2DAsync(self, copied: Any, stream: int) -> tuple[object]:
        device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if (copied.srcMemoryType, copied.dstMemoryType) != (device, device):
            return (INVALID,)
        if copied.WidthInBytes > min(copied.srcPitch, copied.dstPitch):
            return (INVALID,)
        for row in range(copied.Height):
            target, source = (
                int(start) + row * pitch
                for start, pitch in ((copied.dstDevice, copied.dstPitch), (copied.srcDevice, copied.srcPitch))
            )
            self._copy(target, source, copied.WidthInBytes)
        return (DONE,)

    def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> tuple[object]:
        def fill() -> None:
            np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(address))).fill(word)

        self.queue(fill)
        return (DONE,)

    def cuMemHostRegister(self, address: int, size: int, _: object) -> tuple[object]:
        if sum(self.registered.values()) + size > self.most_registered:
            return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.registered[address] = size
        return (DONE,)

    def cuMemHostGetDevicePointer(self, address: int, _: int) -> tuple[object, int]:
        return DONE, address

    def cuMemHostUnregister(self, address: int) -> tuple[object]:
        del self.registered[address]
        return (DONE,)
