"""Limits of memory for processes that a benchmark starts, page cache included. Linux.

A memory cgroup of our own, below the one we are in, as root; or, where none may be made, a machine whose
other memory is taken.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ROOT = Path("/sys/fs/cgroup")
_PIECE_BYTES = 2**30
# What the kernel keeps free by itself, and small processes that start meanwhile.
SLACK_BYTES = 3 * 2**28


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a process in `directory`, page cache and mapped files included."""

    directory: Path
    num_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that all processes inside had at once so far."""
        return int(self._read("memory.max_usage_in_bytes", "memory.peak"))

    @property
    def num_kills(self) -> int:
        """Processes inside that the system ended because they wanted more."""
        lines = self._read("memory.oom_control", "memory.events").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def _read(self, v1: str, v2: str) -> str:
        first = self.directory / v1
        return (first if first.exists() else self.directory / v2).read_text()

    def command(self, *command: str) -> Sequence[str]:
        """`command`, started inside the limit."""
        join = f'echo $$ > "{self.directory}/cgroup.procs" && exec "$@"'
        return ("sh", "-c", join, "sh", *command)


@contextmanager
def memory_limit(name: str, num_bytes: int) -> Iterator[MemoryLimit]:
    """A cgroup of v1 or v2; it must be empty again at the end. Raises OSError where we may make none."""
    parent, file = _own_cgroup()
    directory = parent / f"coldstream-{name}-{os.getpid()}"
    directory.mkdir()
    try:
        (directory / file).write_text(str(num_bytes))
        yield MemoryLimit(directory, num_bytes)
    finally:
        directory.rmdir()


def _own_cgroup() -> tuple[Path, str]:
    """The directory of the cgroup that this process is in, and the file with its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return _ROOT / path.lstrip("/"), "memory.max"


@contextmanager
def filled_memory(num_bytes: int) -> Iterator[None]:
    """Takes all memory of the machine but `num_bytes` and SLACK_BYTES, and pages of files out of it.

    There is no swap, or it would be used. Raises ValueError if less is available.
    """
    taken = available_bytes() - num_bytes - SLACK_BYTES
    if taken < 0:
        raise ValueError(f"{num_bytes} bytes are to be left, and {num_bytes + taken} are available")
    sizes = [min(_PIECE_BYTES, taken - begin) for begin in range(0, taken, _PIECE_BYTES)]
    with ThreadPoolExecutor() as threads:
        pieces = list(threads.map(lambda size: np.full(size, 1, np.uint8), sizes))
    try:
        yield
    finally:
        pieces.clear()


def available_bytes() -> int:
    """Memory that programs can get, as the kernel estimates it."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
