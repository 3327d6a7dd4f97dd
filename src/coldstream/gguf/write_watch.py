"""Hears from the kernel what happens to open files: whether bytes are written, or attributes change.

It uses inotify, which Linux has. It hears nothing on other systems, where the user has no instance left, and
of what other machines do on network file systems. Its users must find out by other means.
"""

import ctypes
import os
import struct
from contextlib import suppress
from typing import Final

MODIFY: Final = 0x2  # written, truncated or allocated by a system call
ATTRIB: Final = 0x4  # mode, owner, times, extended attributes, number of names
CLOSE_WRITE: Final = 0x8  # someone who could write has closed it, as after writes through a mapping
OVERFLOW: Final = 0x4000  # there was more than the queue could hold

_WATCHED: Final = MODIFY | ATTRIB | CLOSE_WRITE
_EVENT: Final = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_READ_BYTES: Final = 1 << 16


class WriteWatch:
    """Watches any number of open files. Not for several threads at once."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._heard: dict[int, int] = {}  # by watch: the events since the last question
        self._descriptor = -1
        with suppress(AttributeError):  # a system without inotify
            self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, descriptor: int) -> int | None:
        """Watches the file of an open descriptor. None if it cannot be watched."""
        if self._descriptor < 0:
            return None
        path = f"/proc/self/fd/{descriptor}".encode()
        watch: int = self._libc.inotify_add_watch(self._descriptor, path, _WATCHED)
        if watch < 0:
            return None
        self._heard[watch] = 0
        return watch

    def take(self, watch: int | None) -> int:
        """What happened to the file of a watch since the last call, as bits; 0 if nothing was heard."""
        self._listen()
        if watch is None:
            return 0
        heard, self._heard[watch] = self._heard[watch], 0
        return heard

    def close(self) -> None:
        """Ends all watches. Closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _listen(self) -> None:
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            position = 0
            while position < len(data):
                watch, mask, _, name_bytes = _EVENT.unpack_from(data, position)
                position += _EVENT.size + name_bytes
                for each in self._heard if mask & OVERFLOW else (watch,):
                    self._heard[each] = self._heard.get(each, 0) | mask
