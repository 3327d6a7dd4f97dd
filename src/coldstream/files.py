"""Writing a file whole or not at all.

Unit of work: one file, written beside its place under a temporary name, brought to the disk, and renamed. A
reader sees the old file or the new one; a failure leaves the old one, and nothing else behind.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from coldstream.errors import StorageError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: bytes) -> None:
    """Make `content` the file at `path`: the whole new file or, if that fails, what was there before.

    A link stays a link. The file it leads to is replaced, with the old one's mode. A pipe or a device is
    written to as it is. Raises StorageError, which names the file and the next step.
    """
    try:
        target = Path(os.path.realpath(path))
        old_mode = target.stat().st_mode if target.exists() else None
        if old_mode is not None and not stat.S_ISREG(old_mode) and not stat.S_ISDIR(old_mode):
            path.write_bytes(content)
        else:
            with replacing(target, old_mode) as file:
                file.write(content)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise cannot_write(path, error, len(content)) from error


def cannot_write(path: Path, error: OSError | ValueError, num_bytes: int) -> StorageError:
    """What to tell when `num_bytes` could not be written to `path`."""
    number = error.errno if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if number in _NO_SPACE:
        free = free_bytes(path.parent)
        known = "" if free is None else f", {free} are free"
        advice = f"{num_bytes} bytes are needed{known}: free some, or write to another disk"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "choose a place that you may write to"
    else:
        advice = "choose another place, or try again"
    return StorageError(f"{path} cannot be written: {reason}; {advice}")


def free_bytes(folder: Path) -> int | None:
    """What this user may still write to the disk of `folder`; None if the system doesn't say."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def sync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk, where its file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def replacing(target: Path, old_mode: int | None = None) -> Iterator[BinaryIO]:
    """A file that becomes the one at `target`, with the mode `old_mode`, when the context ends.

    After an exception `target` is what it was before, and nothing else is left behind. Raises OSError.
    """
    # A name of its own length, as the target's may be as long as names can be.
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if old_mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(old_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)
