"""Host memory that the device reads over the bus."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Self

from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.kernels.cuda.runtime import calls, streams

# Of a process or thread that has no context, and of memory that is locked already: no refusal by the system.
_OWN_FAULTS = (
    driver.CUresult.CUDA_ERROR_NOT_INITIALIZED,
    driver.CUresult.CUDA_ERROR_DEINITIALIZED,
    driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,
    driver.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    driver.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
)


PIECE_BYTES: Final = 64 * 2**20  # of addresses, from one multiple to the next
# What is unlocked again behind a refusal, so that the rings and answers that are locked later find room.
SPARE_PIECES: Final = 8


def parts_of(address: int, num_bytes: int) -> Iterable[tuple[int, int]]:
    """Offsets and sizes of the parts of registered memory that one copy may have: those within a piece.

    The driver refuses a copy across two registrations.
    """
    if 0 < num_bytes <= PIECE_BYTES - address % PIECE_BYTES:
        return ((0, num_bytes),)
    return _parts_within(address, num_bytes)


def _parts_within(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Likewise, of more than one piece."""
    done = 0
    while done < num_bytes:
        size = min(num_bytes - done, PIECE_BYTES - (address + done) % PIECE_BYTES)
        yield done, size
        done += size


def from_host(target: int, source: int, num_bytes: int, stream: streams.Stream) -> "driver.CUresult":
    """Queues a copy of registered or page-locked memory to the device; the driver's status."""
    return _queued(driver.cuMemcpyHtoDAsync, target, source, parts_of(source, num_bytes), stream)


def all_from_host(copies: Iterable[tuple[int, int, int]], stream: streams.Stream) -> "driver.CUresult":
    """Queues copies (target, source, bytes) of such memory to the device with one call, in any order; the
    driver's status. If it refuses some, others may be queued.
    """
    parts = [
        (target + offset, source + offset, size)
        for target, source, num_bytes in copies
        for offset, size in parts_of(source, num_bytes)
    ]
    targets, sources = ([driver.CUdeviceptr(part[side]) for part in parts] for side in (0, 1))
    sizes = [size for _, _, size in parts]
    (status,) = driver.cuMemcpyBatchAsync(
        targets, sources, sizes, len(sizes), [_in_order()], [0], 1, stream.handle
    )
    return status


@cache
def _in_order() -> "driver.CUmemcpyAttributes":
    """Sources are read when the stream comes to the copies."""
    access = driver.CUmemcpyAttributes()
    access.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return access


def to_host(target: int, source: int, num_bytes: int, stream: streams.Stream) -> "driver.CUresult":
    """Queues a copy of the device's memory to registered or page-locked memory; the driver's status."""
    return _queued(driver.cuMemcpyDtoHAsync, target, source, parts_of(target, num_bytes), stream)


def _queued(
    copy: Callable[..., Any],
    target: int,
    source: int,
    parts: Iterable[tuple[int, int]],
    stream: streams.Stream,
) -> "driver.CUresult":
    """The status of the first call of the driver that fails, behind which none follows."""
    status = driver.CUresult.CUDA_SUCCESS
    for offset, size in parts:
        (status,) = copy(target + offset, source + offset, size, stream.handle)
        if status != driver.CUresult.CUDA_SUCCESS:
            break
    return status


class RegisteredMemory:
    """A mapping of host memory that the device may read until `close`, or its beginning.

    It is registered piece by piece. While a piece is locked, the driver takes no other call, and the system
    gives the process no memory: for 20 GB at once both waited a second and more. The system may lock a part
    only. The device reads that, and knows nothing of what lies behind it.

    offset: the device's address minus the host's.
    """

    def __init__(
        self, address: int, device_address: int, pieces: Sequence[int] = (), end: int | None = None
    ) -> None:
        """pieces: addresses of all registrations; by default there is one, at `address`. end: the address
        from which on nothing is locked; None: all is.
        """
        self._pieces = list(pieces) or [address]
        self._end = end
        self.offset = device_address - address

    @property
    def is_whole(self) -> bool:
        """Whether all of it is locked."""
        return self._end is None

    @property
    def part_bytes(self) -> int:
        """Bytes that are locked of one that is not whole."""
        assert self._end is not None, "all of it is locked"
        return self._end - self._pieces[0]

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether these bytes of the mapping are locked."""
        return self._end is None or address + num_bytes <= self._end

    @classmethod
    def register(
        cls,
        address: int,
        num_bytes: int,
        *,
        is_read_only: bool = True,
        is_given_up: Callable[[], bool] | None = None,
    ) -> Self | None:
        """Locks the pages from `address` on and lets the device read them; None if the system refuses, or
        would lock little more than `SPARE_PIECES`. Otherwise what it locks is kept.

        is_read_only: whether the host cannot write them, as those of a mapped file. is_given_up: asked before
        each piece; once it says so, all is unlocked again, and the result is None. Reasons of a refusal are
        the limit of memory that a process may lock, platforms that do not share file mappings with devices,
        and drivers without read-only registration. Raises DeviceError for a call that says nothing of the
        system.
        """
        calls.attach()
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        pieces = [(begin + offset, size) for offset, size in parts_of(begin, end - begin)]
        found = _registered_first(pieces, is_read_only=is_read_only, is_given_up=is_given_up)
        if len({pointer - start for pointer, (start, _) in zip(found, pieces, strict=False)}) > 1:
            # The device sees the pieces apart from each other, and could not read across them.
            _unregister(pieces[: len(found)])
            pieces = [(begin, end - begin)]
            found = _registered_first(pieces, is_read_only=is_read_only, is_given_up=is_given_up)
        if not found:
            return None
        locked = pieces[: len(found)]
        is_whole = len(locked) == len(pieces)
        return cls(begin, found[0], [start for start, _ in locked], None if is_whole else sum(locked[-1]))

    def close(self) -> None:
        """Unlocks the pages, which the device must no longer read."""
        for start in self._pieces:
            driver.cuMemHostUnregister(start)


def _registered_first(
    pieces: Sequence[tuple[int, int]], *, is_read_only: bool, is_given_up: Callable[[], bool] | None
) -> list[int]:
    """The device's addresses of the first pieces, which are locked now: all, or as many as the system allows
    without `SPARE_PIECES`. None is locked if it is given up, or a call fails.
    """
    found: list[int] = []
    kept = 0
    try:
        for start, size in pieces:
            if is_given_up is not None and is_given_up():
                return []
            pointer = _registered(start, size, is_read_only=is_read_only)
            if pointer is None:
                kept = max(0, len(found) - SPARE_PIECES)
                return found[:kept]
            found.append(pointer)
        kept = len(found)
        return found
    finally:
        _unregister(pieces[kept : len(found)])


def _registered(address: int, num_bytes: int, *, is_read_only: bool) -> int | None:
    """The device's address of pages that are locked now; None if the system refuses. Raises DeviceError."""
    flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP
    if is_read_only:
        flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
    (status,) = driver.cuMemHostRegister(address, num_bytes, flags)
    if status in _OWN_FAULTS:
        raise DeviceError(f"host memory cannot be locked for the GPU: {status.name}; open the model again")
    if status != driver.CUresult.CUDA_SUCCESS:
        return None
    status, pointer = driver.cuMemHostGetDevicePointer(address, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        driver.cuMemHostUnregister(address)
        return None
    return int(pointer)


def _unregister(pieces: Iterable[tuple[int, int]]) -> None:
    for start, _ in pieces:
        driver.cuMemHostUnregister(start)
