"""JSON files that are kept beside each other in the user's cache: what was found out about this machine.

Only what is a file is read or replaced. Opening a pipe that somebody left in its place would wait for ever.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from coldstream.errors import StorageError
from coldstream.files import write_file


class NoFileError(OSError):
    """A folder, a pipe, a device, or a link that leads nowhere is where a file should be."""


def read_json(path: Path, most_bytes: int) -> Any:
    """What JSON the file at `path` holds, of whose bytes so many are read.

    Raises NoFileError, OSError, and for what is no JSON ValueError or RecursionError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if is_in_the_way(path):
            raise NoFileError(error.errno, error.strerror) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoFileError(f"{path} is no file")
        with open(descriptor, "rb", closefd=False) as file:
            return json.loads(file.read(most_bytes))
    finally:
        os.close(descriptor)


def store_json(path: Path, document: object) -> None:
    """Writes the file at once: there is the old one or the whole new one. Makes its folder.

    Raises StorageError.
    """
    if is_in_the_way(path):
        raise StorageError(f"{path} is no file: remove it")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: no folder for it: {error.strerror}") from error
    write_file(path, json.dumps(document, indent=1).encode())


def is_in_the_way(path: Path) -> bool:
    """Whether something is at `path` that no file replaces. A link that leads to itself is replaced."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink() and not Path(os.path.realpath(path)).parent.is_dir()
    except OSError:
        return False
