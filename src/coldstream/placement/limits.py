"""What the system allows this process: memory, CPUs, threads and files, and what it is a guest of.

Sources are resource limits and Linux's procfs, sysfs and cgroup files. None stands for no limit, and for
what a system does not say. Unit of work: one look, of some milliseconds.
"""

import math
import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstream.placement.hardware import (
    cgroup_directories,
    cpu_quota,
    memory_limit,
    read_number,
    read_text,
    system_ram,
)

WSL_MEMORY: Final = "in Windows: `memory=` below `[wsl2]` in `.wslconfig`, then `wsl --shutdown`"
_NO_MEMORY_LIMIT: Final = 2**62  # cgroup v1 writes the largest number of whole pages
_IPC_LOCK: Final = 1 << 14  # CAP_IPC_LOCK among the effective capabilities
_CONTAINER_FILES: Final = (".dockerenv", "run/.containerenv")


@dataclass(frozen=True)
class Limits:
    """Soft limits of the process, and those of its control groups."""

    locked_bytes: int | None  # of memory that may be page-locked
    address_space_bytes: int | None
    open_files: int | None
    threads_left: int | None  # that may still be started
    machine_ram_bytes: int  # without the control groups' limits
    cgroup_memory_bytes: int | None
    cgroup_cpus: float | None  # CPUs' worth of time
    num_online_cpus: int
    huge_pages: str | None  # transparent ones: always, madvise or never
    wsl: int | None  # version of the Windows Subsystem for Linux
    in_container: bool

    @classmethod
    def read(cls, *, root: Path = Path("/")) -> "Limits":
        """Those of this process. root: where proc/ and sys/ are."""
        groups = cgroup_directories(root)
        memory = min((memory_limit(group)[0] for group in groups), default=_NO_MEMORY_LIMIT)
        cpus = min(map(cpu_quota, groups), default=math.inf)
        return cls(
            locked_bytes=None if _may_lock_all(root) else _soft(resource.RLIMIT_MEMLOCK),
            address_space_bytes=_soft(resource.RLIMIT_AS),
            open_files=_soft(resource.RLIMIT_NOFILE),
            threads_left=min(_threads_left(root, groups), default=None),
            machine_ram_bytes=system_ram(root)[0],
            cgroup_memory_bytes=memory if memory < _NO_MEMORY_LIMIT else None,
            cgroup_cpus=cpus if cpus < math.inf else None,
            num_online_cpus=_num_online(root),
            huge_pages=_chosen(read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
            wsl=_wsl_version(read_text(root / "proc/sys/kernel/osrelease")),
            in_container=any((root / name).exists() for name in _CONTAINER_FILES),
        )


def lock_warnings(num_bytes: int, limits: Limits) -> tuple[str, ...]:
    """What may become of a plan that wants so many bytes page-locked. Only trying it says how many can be."""
    if not num_bytes or limits.wsl is None:
        return ()
    return (
        f"WSL may page-lock a part only of the {num_bytes / 2**30:.1f} GiB that this plan has the GPU read; "
        f"`run` and `serve` say how much it was: {lock_advice(limits)}",
    )


def lock_advice(limits: Limits) -> str:
    """What may help where memory could not be page-locked, for people."""
    if limits.wsl is not None:
        return WSL_MEMORY
    others = "close programs that hold RAM, or give the GPU more with --vram"
    if limits.locked_bytes is None:
        return others
    command = "docker run --ulimit memlock=-1" if limits.in_container else "ulimit -l unlimited"
    return f"{others}; NVIDIA's driver does not need `{command}`, other systems may"


def _soft(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def _may_lock_all(root: Path) -> bool:
    """Whether the process has the capability that lifts the limit of locked memory, as root often has."""
    found = re.search(r"^CapEff:\s+([0-9a-f]+)$", read_text(root / "proc/self/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) & _IPC_LOCK)


def _threads_left(root: Path, groups: Iterable[Path]) -> Iterator[int]:
    """What each limit leaves: those of control groups, and this user's."""
    for group in groups:
        limit = read_number(group / "pids.max", math.inf)
        if limit < math.inf:
            yield max(0, int(limit - read_number(group / "pids.current", 0)))
    own = _soft(resource.RLIMIT_NPROC)
    if own is not None and os.geteuid() != 0:  # the limit does not bind root
        yield max(0, own - _num_threads_of(os.getuid(), root))


def _num_threads_of(uid: int, root: Path) -> int:
    pattern = re.compile(rf"^Uid:\s+{uid}\s.*^Threads:\s+(\d+)", re.MULTILINE | re.DOTALL)
    found = (pattern.search(read_text(path)) for path in root.glob("proc/[0-9]*/status"))
    return sum(int(each[1]) for each in found if each)


def _num_online(root: Path) -> int:
    """CPUs of the machine that are switched on, by the kernel's list of ranges: 0-7,9."""
    text = read_text(root / "sys/devices/system/cpu/online").strip()
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return os.cpu_count() or 1
    ranges = [(part.split("-")[0], part.split("-")[-1]) for part in text.split(",")]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def _chosen(text: str) -> str | None:
    """The word in brackets, which is the one that holds."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def _wsl_version(release: str) -> int | None:
    """By the name of Microsoft's kernel: 4.4.0-19041-Microsoft is of version 1, all others are of 2."""
    if "microsoft" not in release.lower():
        return None
    return 1 if release.strip().endswith("-Microsoft") else 2
