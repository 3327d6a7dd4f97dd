"""A memory cgroup of our own, below the one we are in, for processes that a benchmark starts. Linux, root."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


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
