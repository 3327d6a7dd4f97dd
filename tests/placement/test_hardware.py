"""Measuring the machine, on made-up /proc and /sys trees and on the real one."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from coldstream.placement.hardware import Hardware, measure_read_bandwidth, usable_cpus

GIB = 2**30
CPUINFO = "processor : 0\nmodel name : Example CPU @ 3 GHz\nflags : fpu avx2 avx512f\nprocessor : 1\n"


def _machine(root: Path, files: dict[str, str]) -> Path:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2", 3: "3"}
    tree = {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n",
        **{
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
            for cpu, text in siblings.items()
        },
        **files,
    }
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    root = _machine(tmp_path, {})
    everything = Hardware.measure(root=root, cpu_ids=[0, 1, 2, 3, 4, 5])
    assert (everything.num_physical_cores, everything.num_logical_cpus) == (4, 6)
    assert Hardware.measure(root=root, cpu_ids=[0, 4]).num_physical_cores == 1
    assert Hardware.measure(root=root, cpu_ids=[4, 5]).num_physical_cores == 2
    assert everything.cpu_name == "Example CPU @ 3 GHz"
    assert everything.cpu_flags == ("avx2", "avx512f", "fpu")
    assert (everything.ram_total_bytes, everything.ram_available_bytes) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize(
    ("lines", "available"),
    [("MemFree: 3\nMemAvailable: 9\n", 9), ("MemFree: 3\n", 3), ("", 16)],
    ids=["available", "free", "total"],
)
def test_what_the_kernel_can_drop_is_available(tmp_path: Path, lines: str, available: int) -> None:
    root = _machine(tmp_path, {"proc/meminfo": f"MemTotal: 16\n{lines}"})
    assert Hardware.measure(root=root, cpu_ids=[0]).ram_available_bytes == 1024 * available


V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/outer/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
    "sys/fs/cgroup/outer/cpu.max": "max 100000\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    "sys/fs/cgroup/outer/inner/cpu.max": "250000 100000\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n3:pids:/box\n0::/\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB}\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_limits_of_the_container_count(tmp_path: Path, files: dict[str, str]) -> None:
    machine = Hardware.measure(root=_machine(tmp_path, files), cpu_ids=range(6))
    assert machine.ram_total_bytes == 8 * GIB
    assert machine.ram_available_bytes == 6 * GIB
    assert machine.num_physical_cores == 2


def test_cpus_that_may_be_kept_busy_are_those_of_the_affinity_and_of_all_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (affinity, files, usable) in enumerate(
        (([0, 1, 2, 3], {}, 4), ([0, 1, 2, 3], V2, 2), ([5], V1, 1), ([0, 1, 2, 3], V1, 2))
    ):
        monkeypatch.setattr("coldstream.placement.hardware.affinity", lambda affinity=affinity: affinity)
        assert usable_cpus(_machine(tmp_path / str(number), files)) == usable


def test_a_container_without_limits_changes_nothing(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    }
    with_groups = Hardware.measure(root=_machine(tmp_path / "a", unlimited), cpu_ids=range(4))
    assert with_groups == Hardware.measure(root=_machine(tmp_path / "b", {}), cpu_ids=range(4))


def test_a_cgroup_path_cannot_lead_elsewhere(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../out\n",
        "out/memory.max": "1\n",
        "sys/fs/cgroup/cpu.max": "max 1\n",
    }
    assert Hardware.measure(root=_machine(tmp_path, files), cpu_ids=[0]).ram_total_bytes == 16 * GIB


def test_a_machine_without_these_files_still_has_an_answer(tmp_path: Path) -> None:
    machine = Hardware.measure(root=tmp_path, cpu_ids=[0, 1])
    assert machine.num_physical_cores == 2
    assert machine.ram_total_bytes > machine.ram_available_bytes > 0


def test_this_machine() -> None:
    machine = Hardware.measure()
    assert 1 <= machine.num_physical_cores <= machine.num_logical_cpus
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes
    assert machine.read_bytes_per_s is None
    assert json.loads(json.dumps(asdict(machine)))["cpu_name"] == machine.cpu_name


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bandwidth_is_a_plausible_number(num_threads: int) -> None:
    assert 1e7 < measure_read_bandwidth(num_threads, 2**20) < 1e14
