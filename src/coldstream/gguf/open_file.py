"""Detects whether the bytes of an open file may have changed since it was opened.

It asks for the file's status alone as long as this stays the same, and so is cheap enough for every token. It
misses writes that leave no trace in the times: through a mapping that was written to before the file was
opened, or within the same tick of the clock as the last write before that; and changes that a network file
system has not yet reported to this machine.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from coldstream.gguf.write_watch import ATTRIB, CLOSE_WRITE, MODIFY, OVERFLOW, WriteWatch

# Of a file of up to 16 MiB these are all bytes. A disk reads them in some 50 ms, a spinning one in 3 s.
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class FileState:
    """What changes with the bytes (content), without them (others), and with or without them (ctime_ns)."""

    content: tuple[int, int, int, int]  # device, inode, size, mtime_ns
    ctime_ns: int
    others: tuple[int, int, int, int]  # number of names, mode, owner, group

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """From the result of `os.stat` or `os.fstat`."""
        return cls(
            (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns),
            status.st_ctime_ns,
            (status.st_nlink, status.st_mode, status.st_uid, status.st_gid),
        )

    @property
    def size(self) -> int:
        return self.content[2]


class OpenFile:
    """A descriptor, and the state in which its file was when it was opened by the name `path`.

    Another size or time of writing means that bytes may have changed. A change of the inode alone (ctime) may
    be a write after which the time of writing was put back, or a change of attributes. Evidence decides, the
    cheapest first:

    1. What `watch` heard since the file was opened: a write, or a change of attributes and nothing else.
    2. Without such news, the number of names, the mode, the owner, or whether `path` names the file: linking,
       renaming, deleting and chmod explain the change.
    3. Otherwise bytes: samples from all over the file are compared with what they were at the first check.
       This alone misses a write between the samples whose time was put back.
    """

    def __init__(self, path: Path, descriptor: int, status: os.stat_result, watch: WriteWatch) -> None:
        self.path = Path(os.path.abspath(path))
        self.descriptor = descriptor
        self.opened = self._seen = FileState.of(status)
        self._watch = watch
        self._watched = watch.add(descriptor)
        self._samples: bytes | None = None  # a digest
        self._status = status  # the last one that was compared
        self._was_named = True
        self._is_rewritten = False

    def is_rewritten(self) -> bool:
        """Whether bytes may not be those that were opened. Once they may not, they never are again."""
        if not self._is_rewritten:
            status = os.fstat(self.descriptor)
            if status[:-3] != self._status[:-3] or _times(status) != _times(self._status):
                self._status = status
                self._is_rewritten = self._may_differ(FileState.of(status))
            if self._samples is None and not self._is_rewritten:
                self._keep_samples()
        return self._is_rewritten

    def _may_differ(self, now: FileState) -> bool:
        if now.content != self.opened.content:
            return True
        before, was_named = self._seen, self._was_named
        self._seen, self._was_named = now, self._is_named()
        if now.ctime_ns == before.ctime_ns:
            return False
        heard = self._watch.take(self._watched)
        if heard & MODIFY:
            return True
        if heard & ATTRIB and not heard & (CLOSE_WRITE | OVERFLOW):
            return False
        is_explained = now.others != before.others or was_named != self._was_named
        if is_explained and not heard & CLOSE_WRITE:
            return False
        return self._samples is None or self._digest() != self._samples

    def _keep_samples(self) -> None:
        """Takes the samples, unless the file changes meanwhile: then the next check tries again."""
        samples = self._digest()
        status = os.fstat(self.descriptor)
        if FileState.of(status) == self._seen:
            self._samples = samples

    def _digest(self) -> bytes | None:
        """Of samples at equal distances, the first and the last bytes among them. None if reading fails."""
        digest = hashlib.blake2b(digest_size=16)
        last = max(0, self.opened.size - _SAMPLE_BYTES)
        step = max(_SAMPLE_BYTES, -(-last // (_NUM_SAMPLES - 1)))
        try:
            for offset in (*range(0, last, step), last):
                digest.update(os.pread(self.descriptor, _SAMPLE_BYTES, offset))
        except OSError:
            return None
        return digest.digest()

    def _is_named(self) -> bool:
        """Whether `path` names this file."""
        state = state_at(self.path)
        return state is not None and state.content[:2] == self.opened.content[:2]


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_ctime_ns


def state_at(path: Path) -> FileState | None:
    """The state of the file that `path` names now; None if it cannot be determined."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None
