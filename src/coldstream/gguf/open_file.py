"""Detects by the file system whether the bytes of an open file may have changed since it was opened.

It reads nothing, and so is cheap enough to check for every token. It misses writes that leave no trace in the
times: through a mapping that was written to before the file was opened, or within the same tick of the clock
as the last write before that; changes that a network file system has not yet reported to this machine; and
writes whose time was reset if the file was also renamed before the next check.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


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

    Another size or time of writing means that bytes may have changed. So does an unexplained change of the
    inode (ctime): a write after which the time of writing was reset. It is explained, and does not matter, if
    the number of names, the mode or the owner changed too, or if `path` now names the file or no longer does:
    linking, renaming, deleting and chmod do not change the bytes.
    """

    def __init__(self, path: Path, descriptor: int, status: os.stat_result) -> None:
        self.path = Path(os.path.abspath(path))
        self.descriptor = descriptor
        self.opened = self._seen = FileState.of(status)
        self._status = status  # the last one that was compared
        self._was_named = True
        self._is_rewritten = False

    def is_rewritten(self) -> bool:
        """Whether bytes may not be those that were opened. Once they may not, they never are again."""
        if not self._is_rewritten:
            status = os.fstat(self.descriptor)
            if status[:-3] != self._status[:-3] or _times(status) != _times(self._status):
                self._status = status
                self._compare(FileState.of(status))
        return self._is_rewritten

    def _compare(self, now: FileState) -> None:
        if now.content != self.opened.content:
            self._is_rewritten = True
        elif now != self._seen:
            self._look_closer(now)

    def _look_closer(self, now: FileState) -> None:
        is_named = self._is_named()
        is_explained = now.others != self._seen.others or is_named != self._was_named
        self._is_rewritten = now.ctime_ns != self._seen.ctime_ns and not is_explained
        self._seen, self._was_named = now, is_named

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
