"""What the machine has, as this process may use it.

Container limits (cgroups, CPU affinity) count: a machine with 64 cores of which two are ours has two. Nothing
here knows models or tensors. Sources: Linux sysfs, procfs and cgroup v1/v2 files; elsewhere the standard
library's answers.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstream.kernels.experts.cpu_rates import written_codes
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.memory_readers import MemoryReaders
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.conditions import Conditions

_BUFFER_BYTES = 2**30  # servers have caches of hundreds of megabytes
_LEAST_BYTES = 2**25  # for sixteen experts
_FALLBACK_RAM_BYTES = 4 * 2**30


@dataclass(frozen=True)
class GpuHardware:
    """A GPU and its link to RAM. A rate is None if it was not measured."""

    name: str
    driver: str
    total_bytes: int
    free_bytes: int
    copy_bytes_per_s: float | None = None  # within its memory, read and written together
    product_ops_per_s: float | None = None  # int8 multiplications and additions in large matrices
    link_bytes_per_s: float | None = None  # copies from page-locked RAM, alone
    link_beside_read: float | None = None  # copies from page-locked RAM while all cores read RAM
    read_beside_link: float | None = None  # what the cores read during copies
    handshake_s: float | None = None  # the GPU raises a flag, a CPU thread answers, the GPU goes on
    # Weights of experts that all cores multiply, for experts of EXPERT_ROWS rows each.
    expert_bytes_per_s: tuple[float, ...] | None = None
    measured_at: str | None = None  # when its rates were, in UTC
    conditions: Conditions | None = None  # under which they were
    steps: StepRates | None = None


@dataclass(frozen=True)
class Hardware:
    """A machine. Only plain values, so `dataclasses.asdict` gives JSON."""

    cpu_name: str
    cpu_flags: tuple[str, ...]  # as the kernel names them, sorted
    num_logical_cpus: int  # that this process may run on
    num_physical_cores: int  # distinct cores of those CPUs, at most the CPU quota
    ram_total_bytes: int  # of the machine or the container, whichever is less
    ram_available_bytes: int
    read_bytes_per_s: float | None = None  # memory read bandwidth; None: not measured
    gpu: GpuHardware | None = None
    measured_at: str | None = None  # when its rates were, in UTC; a GPU's have a time of their own
    # Weights times rows that all cores multiply, by type (in the order of QuantType) and PRODUCT_ROWS.
    product_values_per_s: tuple[tuple[float, ...], ...] | None = None
    row_bytes_per_s: float | None = None  # weights in RAM that all cores multiply by one row
    mixers: MixerRates | None = None  # what all cores do between products
    conditions: Conditions | None = None  # under which its rates were measured

    @classmethod
    def measure(cls, *, root: Path = Path("/"), cpu_ids: Iterable[int] | None = None) -> "Hardware":
        """Look at the machine; a few milliseconds, no bandwidth.

        `root` is where proc/ and sys/ are, `cpu_ids` the logical CPUs to count (default: this process's
        affinity).
        """
        cpus = sorted(cpu_ids) if cpu_ids is not None else affinity()
        groups = cgroup_directories(root)
        name, flags = _cpu_name_and_flags(root)
        cores = _count_cores(root, cpus)
        quota = min((cpu_quota(group) for group in groups), default=math.inf)
        total, available = system_ram(root)
        for group in groups:
            limit, used = memory_limit(group)
            total = min(total, limit)
            available = min(available, max(0, limit - used))
        return cls(
            cpu_name=name,
            cpu_flags=flags,
            num_logical_cpus=len(cpus),
            num_physical_cores=max(1, min(cores, math.floor(quota) if quota != math.inf else cores)),
            ram_total_bytes=total,
            ram_available_bytes=available,
        )

    def with_bandwidth(self, num_threads: int) -> "Hardware":
        """The same machine with `read_bytes_per_s` measured by `num_threads` threads, in a second or two."""
        return replace(self, read_bytes_per_s=measure_read_bandwidth(num_threads, self.measured_bytes))

    @property
    def is_disturbed(self) -> bool:
        """Whether something disturbed a measurement of its rates, which are to be measured again."""
        return any(part.conditions is not None and part.conditions.is_due for part in self._measured_parts)

    @property
    def has_doubtful_rates(self) -> bool:
        """Whether something disturbed a measurement of its rates, or they were not measured at all."""
        return any(
            part.measured_at is None or (part.conditions is not None and bool(part.conditions.problems))
            for part in self._measured_parts
        )

    @property
    def _measured_parts(self) -> "tuple[Hardware | GpuHardware, ...]":
        return (self, self.gpu) if self.gpu else (self,)

    @property
    def measured_bytes(self) -> int:
        """Memory to read for measurements: beyond any cache, and a modest part of what is free."""
        return max(_LEAST_BYTES, min(_BUFFER_BYTES, self.ram_available_bytes // 8)) // 8 * 8


def measure_read_bandwidth(num_threads: int, num_bytes: int = _BUFFER_BYTES) -> float:
    """Bytes per second that `num_threads` threads read from memory together: the best of several windows."""
    return max(read_windows(num_threads, written_codes(num_threads, num_bytes)))


def read_windows(num_threads: int, memory: Any) -> list[float]:
    """`MemoryReaders.windows` of so many threads that read an array of bytes."""
    with MemoryReaders.running(num_threads, memory) as readers:
        return readers.windows()


def affinity() -> list[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cpus(root: Path = Path("/")) -> int:
    """How many logical CPUs this process may keep busy at once: by its affinity and its control groups."""
    quota = min((cpu_quota(group) for group in cgroup_directories(root)), default=math.inf)
    return max(1, math.floor(min(len(affinity()), quota)))


def read_text(path: Path) -> str:
    """The text of a kernel file, or nothing where it doesn't exist or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_number(path: Path, otherwise: float) -> float:
    """The number in a kernel file; `otherwise` where there is none, or another word."""
    text = read_text(path).strip()
    return float(text) if text.isdecimal() else otherwise


def _cpu_name_and_flags(root: Path) -> tuple[str, tuple[str, ...]]:
    fields: dict[str, str] = {}
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", "unknown CPU"), tuple(sorted(set(flags.split())))


def _count_cores(root: Path, cpu_ids: list[int]) -> int:
    """Cores, telling apart hyper-threads of one core by the kernel's list of siblings."""
    topology = root / "sys/devices/system/cpu"
    siblings = {
        read_text(topology / f"cpu{cpu_id}/topology/thread_siblings_list").strip() or str(cpu_id)
        for cpu_id in cpu_ids
    }
    return len(siblings)


def cgroup_directories(root: Path) -> list[Path]:
    """The directories whose limits bind this process: its own control groups and all above them."""
    directories: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for mount in controllers.split(",") if controllers else [""]:
            if mount not in ("", "memory", "cpu", "pids"):
                continue
            base = root / "sys/fs/cgroup" / mount
            group = Path(path.lstrip("/"))
            directories += [base / part for part in (group, *group.parents) if ".." not in part.parts]
    return [directory for directory in dict.fromkeys(directories) if directory.is_dir()]


def cpu_quota(group: Path) -> float:
    """CPUs' worth of time this group may use, by cgroup v2 or v1."""
    quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return max(1.0, int(quota) / int(period))
    quota_us = read_number(group / "cpu.cfs_quota_us", math.inf)
    return max(1.0, quota_us / read_number(group / "cpu.cfs_period_us", 100_000))


def memory_limit(group: Path) -> tuple[int, int]:
    """(limit, bytes in use without what the kernel can drop), by cgroup v2 or v1; a huge limit where there is
    none.
    """
    no_limit = float(2**63 - 1)
    limit = read_number(group / "memory.max", read_number(group / "memory.limit_in_bytes", no_limit))
    used = read_number(group / "memory.current", read_number(group / "memory.usage_in_bytes", 0))
    statistics = dict(
        line.split(" ", 1) for line in read_text(group / "memory.stat").splitlines() if " " in line
    )
    droppable = statistics.get("inactive_file", statistics.get("total_inactive_file", "0"))
    return int(limit), max(0, int(used) - (int(droppable) if droppable.isdecimal() else 0))


def system_ram(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    fields = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        amount = value.split()
        if amount and amount[0].isdecimal():
            fields[key] = int(amount[0]) * 1024
    if "MemTotal" in fields:
        return fields["MemTotal"], fields.get("MemAvailable", fields.get("MemFree", fields["MemTotal"]))
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        total = _FALLBACK_RAM_BYTES
    return total, total // 2
