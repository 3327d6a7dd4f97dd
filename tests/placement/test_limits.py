"""Limits of the system, on made-up /proc and /sys trees and in processes with limits of their own."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coldstream.placement.limits import Limits, lock_advice, lock_warnings

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: {GIB // 1024} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/pids.max": "100\n",
    "sys/fs/cgroup/outer/pids.current": "30\n",
    "sys/fs/cgroup/outer/inner/pids.max": "max\n",
    "sys/fs/cgroup/outer/memory.max": f"{GIB // 2}\n",
    "sys/fs/cgroup/outer/inner/cpu.max": "250000 100000\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n3:pids:/box\n0::/\n",
    "sys/fs/cgroup/pids/box/pids.max": "100\n",
    "sys/fs/cgroup/pids/box/pids.current": "30\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB // 2}\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str]) -> None:
    limits = Limits.read(root=tree(tmp_path, files))
    assert limits.threads_left == 70
    assert limits.cgroup_memory_bytes == GIB // 2
    assert limits.cgroup_cpus == 2.5
    assert limits.machine_ram_bytes == GIB


def test_a_machine_without_control_groups_has_no_limits_of_them(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "5:memory:/\n4:cpu:/\n3:pids:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/pids/pids.max": "max\n",
    }
    for name, files in (("a", {}), ("b", unlimited)):
        limits = Limits.read(root=tree(tmp_path / name, files))
        assert (limits.cgroup_memory_bytes, limits.cgroup_cpus) == (None, None)


def test_a_group_that_is_over_its_limit_leaves_no_thread(tmp_path: Path) -> None:
    files = {**V2, "sys/fs/cgroup/outer/pids.current": "130\n"}
    assert Limits.read(root=tree(tmp_path, files)).threads_left == 0


def test_threads_of_this_user_count_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    status = "Name:\tx\nUid:\t{}\t0\t0\t0\nGid:\t0\nThreads:\t{}\n"
    files = {
        f"proc/{n}/status": status.format(*of) for n, of in enumerate([(uid, 5), (uid, 6), (uid + 1, 7)])
    }
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 20))
    assert Limits.read(root=tree(tmp_path, files)).threads_left == 9
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Limits.read(root=tmp_path).threads_left is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-7\n", 8), ("0-3,8,10-11\n", 7), ("0\n", 1), ("", os.cpu_count()), ("a-b", os.cpu_count())],
)
def test_cpus_that_are_switched_on(tmp_path: Path, text: str, count: int) -> None:
    root = tree(tmp_path, {"sys/devices/system/cpu/online": text})
    assert Limits.read(root=root).num_online_cpus == count


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.8.0-45-generic", None),
        ("4.4.0-19041-Microsoft", 1),
        ("5.15.167.4-microsoft-standard-WSL2", 2),
        ("6.6.87-microsoft-custom", 2),
    ],
)
def test_the_kernel_of_windows(tmp_path: Path, release: str, version: int | None) -> None:
    root = tree(tmp_path, {"proc/sys/kernel/osrelease": f"{release}\n"})
    assert Limits.read(root=root).wsl == version


@pytest.mark.parametrize("name", [".dockerenv", "run/.containerenv"])
def test_a_container(tmp_path: Path, name: str) -> None:
    assert not Limits.read(root=tree(tmp_path, {})).in_container
    assert Limits.read(root=tree(tmp_path, {name: ""})).in_container


def test_huge_pages(tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    assert Limits.read(root=tree(tmp_path / "a", {path: "always [madvise] never\n"})).huge_pages == "madvise"
    assert Limits.read(root=tree(tmp_path / "b", {})).huge_pages is None


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("RLIMIT_MEMLOCK", "locked_bytes"),
        ("RLIMIT_AS", "address_space_bytes"),
        ("RLIMIT_NOFILE", "open_files"),
    ],
)
def test_soft_limits_of_this_process(kind: str, field: str) -> None:
    value = {"RLIMIT_AS": 4 * GIB, "RLIMIT_NOFILE": 200}.get(kind, 4096)
    script = (
        "import pathlib, resource\n"
        "from coldstream.placement.limits import Limits\n"
        f"hard = resource.getrlimit(resource.{kind})[1]\n"
        f"resource.setrlimit(resource.{kind}, ({value}, hard))\n"
        f"print(Limits.read(root=pathlib.Path('/proc/none')).{field})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == value


@pytest.mark.parametrize(
    ("capabilities", "is_limited"),
    [("0000000000004000", False), ("000001ffffffffff", False), ("000001ffffffbfff", True), ("0", True)],
)
def test_who_may_lock_all_memory_has_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: str, is_limited: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 4096))
    root = tree(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\nCapBnd:\t0\n"})
    assert Limits.read(root=root).locked_bytes == (4096 if is_limited else None)


def test_what_helps_where_memory_could_not_be_locked_depends_on_where_that_is() -> None:
    """The limit of the system does not bind NVIDIA's driver, so nothing is said of it beforehand."""
    limits = replace(Limits.read(), locked_bytes=None, wsl=None, in_container=False)
    assert lock_warnings(GIB, limits) == lock_warnings(GIB, replace(limits, locked_bytes=0)) == ()
    assert "close programs" in lock_advice(limits)
    assert "ulimit" not in lock_advice(limits)
    assert "`ulimit -l unlimited`" in lock_advice(replace(limits, locked_bytes=0))
    inside = replace(limits, locked_bytes=0, in_container=True)
    assert "`docker run --ulimit memlock=-1`" in lock_advice(inside)
    guest = replace(limits, wsl=2)
    (said,) = lock_warnings(GIB, guest)
    assert said.startswith("WSL may page-lock a part only of the 1.0 GiB")
    assert said.endswith(".wslconfig`, then `wsl --shutdown`")
    assert lock_warnings(0, guest) == ()


def test_this_machine() -> None:
    limits = Limits.read()
    assert limits.machine_ram_bytes > 0
    assert limits.num_online_cpus >= len(os.sched_getaffinity(0))
