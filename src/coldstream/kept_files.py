"""What is kept from start to start in folders of the user's cache: machine code of kernels, counts of memory.

Write access to them is control of what the GPU runs, since an attacker could write a matching digest too. So
a folder and its parent are created for the user alone, and used only if they belong to the user, are no
links, and are not writable for others; the same holds for entries. Otherwise nothing is read or stored, and
`problem` says why.

The digest at the start of an entry detects damage: a disk that was full, bits that have changed, an entry
under the name of another one. A damaged entry counts as absent, and is replaced.

The unit of work is an entry. Threads and processes may use one folder at the same time.
"""

import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

MAX_BYTES = 2**26  # of an entry; a kernel takes less than a thousandth
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Kept:
    """A kind of entries. loss: what follows where they cannot be kept."""

    folder: str  # its name in the user's cache
    loss: str


MACHINE_CODE: Final = Kept("cuda", "compiled kernels are not kept, and will be compiled again at every start")
MEMORY_COUNTS: Final = Kept(
    "counts", "counts of a GPU's memory are not kept, and will be made again at every start"
)


def directory_of(kept: Kept) -> Path | None:
    """The user's folder of such entries; None for a user without a home directory."""
    try:
        return Path.home() / ".cache" / "coldstream" / kept.folder
    except RuntimeError:
        return None


class KeptFiles:
    """Bytes by name in `directory`, an absolute path that need not exist yet; None: nothing is kept.

    problem: why something was not read or not stored, as text; None without such a problem.
    """

    def __init__(self, kept: Kept, directory: Path | None) -> None:
        self._loss, self._path = kept.loss, directory
        self._is_clean = False
        self.problem: str | None = None

    def get(self, name: str) -> bytes | None:
        """The bytes stored under `name`; None if there are none, or none that are safe to load."""
        try:
            with self._opened() as directory:
                data = _read(name, directory)
        except OSError as error:
            self._note(error)
            return None
        payload = data[hashlib.sha256().digest_size :]
        return payload if data == _digest(name, payload) + payload else None

    def put(self, name: str, payload: bytes) -> None:
        """Store `payload` under `name`, atomically. A failure is no error."""
        try:
            with self._opened() as directory:
                _write(name, _digest(name, payload) + payload, directory)
        except OSError as error:
            self._note(error)

    def damaged(self) -> tuple[str, ...]:
        """Names of entries that `get` refuses, in order. Makes no directory."""
        if self._path is None:
            return ()
        try:
            names = sorted(os.listdir(self._path))
        except OSError:
            return ()
        return tuple(name for name in names if not name.startswith(".") and self.get(name) is None)

    def _note(self, error: OSError) -> None:
        reason = f"{self._path}: {error.strerror}" if error.strerror else str(error)
        self.problem = f"{self._loss}: {reason}"

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the directory, created if needed. Raises OSError if it may not be used."""
        if self._path is None:
            raise FileNotFoundError("this user has no home directory")
        above = self._path.parent
        above.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _open_own(above) as parent, _open_own(self._path, parent) as directory:
            if not self._is_clean:
                _remove_leftovers(directory)
                self._is_clean = True
            yield directory


def unsafe(path: Path, status: os.stat_result) -> str | None:
    """Why the directory at `path` may not be used, and the next step; None: it may.

    status: its own, or that of the link.
    """
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link; remove it"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user; remove it"
    if status.st_mode & OTHERS_MAY_WRITE:
        return f"others may write to {path}; remove it, or chmod go-w it if its files are yours"
    return None


@contextmanager
def _open_own(path: Path, parent: int | None = None) -> Iterator[int]:
    """A descriptor of the directory `path`, which lies in the open one `parent`."""
    name = path if parent is None else path.name
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    if problem := unsafe(path, os.stat(name, dir_fd=parent, follow_symlinks=False)):
        raise PermissionError(problem)
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if problem := unsafe(path, os.fstat(descriptor)):
            raise PermissionError(problem)
        yield descriptor
    finally:
        os.close(descriptor)


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _read(name: str, directory: int) -> bytes:
    """The bytes of an entry; none if it is absent, damaged beyond reading, or not the user's own."""
    with suppress(OSError), _opened_entry(name, directory) as descriptor:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_MAY_WRITE
        if stat.S_ISREG(status.st_mode) and is_own:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(MAX_BYTES)
    return b""


@contextmanager
def _opened_entry(name: str, directory: int) -> Iterator[int]:
    """A descriptor to read from. Raises OSError, for a link too."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(name: str, data: bytes, directory: int) -> None:
    """Creates or replaces the entry once all bytes are written."""
    with _temporary(name, directory) as (file, temporary):
        done = 0
        while done < len(data):
            done += file.write(data[done:])
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


@contextmanager
def _temporary(name: str, directory: int) -> Iterator[tuple[FileIO, str]]:
    """A new locked file and its name; the lock ends with its process. Removed after an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = f".{name}.{secrets.token_hex(8)}{TEMPORARY}"
        with FileIO(os.open(temporary, flags, 0o600, dir_fd=directory), "w") as file:
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:
                continue  # another process removed it as a leftover before it was locked
            try:
                yield file, temporary
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            return


def _remove_leftovers(directory: int) -> None:
    """Removes files that are not locked, whose writers were killed."""
    for name in os.listdir(directory):
        if not (name.startswith(".") and name.endswith(TEMPORARY)):
            continue
        with suppress(OSError), _opened_entry(name, directory) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=directory)
