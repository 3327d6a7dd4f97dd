"""A model's file, mapped, and locked for the GPU by a thread.

Locking 20 GB takes a second, in which no other call of the driver goes on. So it begins before a plan is made
where the GPU is sure to lack a part of the file, and who reads the file takes over.
"""

import mmap
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.host_memory import RegisteredMemory

_NUM_SAMPLES: Final = 2048  # pages of a part


class LockedPart(NamedTuple):
    """A part of a file where it is mapped, and its registration; None if the system refuses."""

    mapped: _csrc.MappedFile
    registered: "Future[RegisteredMemory | None]"


class FileLock:
    """Begins to lock parts of a file, which stays open."""

    def __init__(self, file: GGUFFile, shards: Collection[int]) -> None:
        pool = ThreadPoolExecutor(1)
        self._parts: dict[int, LockedPart] = {}
        for shard in sorted(shards):
            descriptor, size = file.descriptor(shard), file.shard_bytes[shard]
            mapped = _csrc.MappedFile(descriptor, size, file.shown_paths[shard])
            self._parts[shard] = LockedPart(mapped, pool.submit(register, descriptor, mapped))
        pool.shutdown(wait=False)  # the thread ends with its work

    def take(self, shard: int) -> LockedPart:
        """A part, which is the caller's to unlock from now on. KeyError for one that is taken."""
        return self._parts.pop(shard)

    def close(self) -> None:
        """Waits for the parts that nobody took, and unlocks them."""
        while self._parts:
            _, (_, begun) = self._parts.popitem()
            unlock(begun)


def unlock(begun: "Future[RegisteredMemory | None]") -> None:
    """Waits for a registration and ends it, as it locks memory that is about to be unmapped."""
    if begun.exception() is None and (registered := begun.result()) is not None:
        registered.close()


def register(descriptor: int, mapped: _csrc.MappedFile) -> RegisteredMemory | None:
    """Locks a mapped file for the device; None if the system refuses."""
    if mapped.size < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE and not is_cached(descriptor, mapped.size):
        # Registering locks the pages, and would read them from the disk one by one.
        mapped.read_ahead(0, mapped.size)
    return RegisteredMemory.register(mapped.address, mapped.size)


def is_cached(descriptor: int, num_bytes: int) -> bool:
    """Whether samples of a file's first `num_bytes` are all in memory; False where the system does not say.

    To ask the system to read what is there already takes half a second for 20 GB.
    """
    byte = bytearray(1)
    try:
        for sample in range(_NUM_SAMPLES):
            os.preadv(descriptor, [byte], sample * num_bytes // _NUM_SAMPLES, os.RWF_NOWAIT)
    except (OSError, AttributeError):  # not in memory, or a file system or a platform that cannot tell
        return False
    return True
