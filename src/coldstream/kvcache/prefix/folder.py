"""A folder of files that one process uses, and that only its user may write to."""

import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldstream.errors import StorageError
from coldstream.files import cannot_write
from coldstream.kvcache.prefix.file import DamagedFileError, ReadAt

LOCK = "lock"
SUFFIX = ".prefix"
NAME = re.compile(r"[0-9a-f]{32}")  # of a folder, and of a file before its suffix
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")  # what `write_file` leaves if the machine goes down


def locked(folder: Path) -> int:
    """A descriptor that keeps other processes from using the folder, which is made if there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_ours(folder.lstat(), folder, stat.S_ISDIR)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder / LOCK, flags, 0o600)
    except DamagedFileError as error:
        raise StorageError(f"{error}: choose a folder that only you may write to") from error
    except OSError as error:
        raise cannot_write(folder, error, 0) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{folder} is in use by another process: give each server a folder of its own"
        ) from error
    return descriptor


def limit_others(own: Path, num_bytes: int) -> None:
    """Removes files in the folders beside `own` until they have at most so many bytes.

    The folder used longest ago goes first; one that another process uses stays. What cannot be removed stays.
    """
    folders = [each for each in own.parent.iterdir() if each != own and NAME.fullmatch(each.name)]
    found: list[tuple[int, Path, list[tuple[Path, int]]]] = []
    for folder in folders:
        with suppress(OSError):
            files = [(file, file.lstat().st_size) for file in folder.glob("*" + SUFFIX)]
            found.append(((folder / LOCK).lstat().st_mtime_ns, folder, files))
    total = sum(size for _, _, files in found for _, size in files)
    for _, folder, files in sorted(found, key=lambda each: each[:2]):
        if total <= num_bytes:
            return
        try:
            lock = locked(folder)
        except StorageError:
            continue
        try:
            for file, size in files:
                with suppress(OSError):
                    file.unlink()
                    total -= size
        finally:
            os.close(lock)


def _check_is_ours(status: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DamagedFileError(f"{path} is a link, another user's, or may be written to by others")


@contextmanager
def opened(path: Path) -> Iterator[tuple[ReadAt, os.stat_result]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _check_is_ours(status, path, stat.S_ISREG)
        yield lambda offset, count: os.pread(descriptor, count, offset), status
    finally:
        os.close(descriptor)
