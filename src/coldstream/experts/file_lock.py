"""A model's file, mapped, and locked for the GPU by a thread.

Locking 20 GB takes a second, in which no other call of the driver goes on. A start that waits for it has it
begin before a plan is made, where the GPU is sure to lack a part of the file. A start that is to give a first
token early has it begin behind that: the CPU reads the file without a lock.
"""

import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
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
    """Locks parts of a file, which stays open: at once or, if it `is_late`, from `begin` on."""

    def __init__(self, file: GGUFFile, shards: Collection[int], *, is_late: bool = False) -> None:
        self._parts: dict[int, LockedPart] = {}
        self._to_lock: list[tuple[int, LockedPart]] = []  # with the descriptor, until there is a thread
        self._is_given_up = threading.Event()
        for shard in sorted(shards):
            descriptor, size = file.descriptor(shard), file.shard_bytes[shard]
            mapped = _csrc.MappedFile(descriptor, size, file.shown_paths[shard])
            part = self._parts[shard] = LockedPart(mapped, Future())
            self._to_lock.append((descriptor, part))
        if not is_late:
            self.begin()

    def begin(self) -> None:
        """Starts the thread, which ends with its work. Calling twice is harmless."""
        if self._to_lock:
            arguments = tuple(self._to_lock), self._is_given_up.is_set
            threading.Thread(target=_lock_parts, args=arguments, name="lock of the file").start()
            self._to_lock.clear()

    def take(self, shard: int) -> LockedPart:
        """A part, which is the caller's to unlock from now on. KeyError for one that is taken."""
        return self._parts.pop(shard)

    def give_up(self) -> None:
        """Locks no further memory: all parts are about to be unlocked."""
        self._is_given_up.set()
        self._to_lock.clear()

    def close(self) -> None:
        """Gives up, waits for the parts that nobody took, and unlocks them."""
        self.give_up()
        while self._parts:
            _, (_, begun) = self._parts.popitem()
            unlock(begun)


def unlock(begun: "Future[RegisteredMemory | None]") -> None:
    """Ends a registration, as it locks memory that is about to be unmapped: waits for one that has begun."""
    if begun.cancel():
        return
    if begun.exception() is None and (registered := begun.result()) is not None:
        registered.close()


def _lock_parts(parts: Sequence[tuple[int, LockedPart]], is_given_up: Callable[[], bool]) -> None:
    for descriptor, (mapped, begun) in parts:
        if not begun.set_running_or_notify_cancel():
            continue
        try:
            registered = register(descriptor, mapped, is_given_up)
        except BaseException as error:
            begun.set_exception(error)  # who waits for the part raises it
        else:
            begun.set_result(registered)


def register(
    descriptor: int, mapped: _csrc.MappedFile, is_given_up: Callable[[], bool] | None = None
) -> RegisteredMemory | None:
    """Locks a mapped file for the device; None if the system refuses, or if it is given up meanwhile."""
    if mapped.size < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE and not is_cached(descriptor, mapped.size):
        # Registering locks the pages, and would read them from the disk one by one.
        mapped.read_ahead(0, mapped.size)
    return RegisteredMemory.register(mapped.address, mapped.size, is_given_up=is_given_up)


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
