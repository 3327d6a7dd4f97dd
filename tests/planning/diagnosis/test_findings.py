"""Each finding by made-up facts: what brings it, what does not, and what mends it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels.cuda.driver import MIN_CAPABILITY, MIN_CUDA, TRIED_CAPABILITY, Driver
from coldstream.planning.diagnosis import findings
from coldstream.planning.diagnosis.findings import (
    FILES_OF_A_SERVER,
    LEAST_FREE_BYTES,
    LEAST_RAM_BYTES,
    OTHER_THREADS,
    RATES_LAST_DAYS,
    exit_code_of,
    find,
)
from coldstream.planning.diagnosis.machine_facts import MachineFacts, MeasuredRates, Rates, RefusedLock
from machine_facts import CARD, DEVICE, GIB, NO_GPU, SOUND

Change = Callable[[MachineFacts], MachineFacts]


def part(name: str, **values: Any) -> Change:
    """Changes fields of one part of the facts."""
    return lambda facts: replace(facts, **{name: replace(getattr(facts, name), **values)})


def gpu(**values: Any) -> Change:
    return part("gpu", **values)


def driver(**values: Any) -> Change:
    return lambda facts: gpu(driver=replace(facts.gpu.driver, **values))(facts)


def folder(name: str, **values: Any) -> Change:
    return lambda facts: replace(
        facts,
        folders=tuple(replace(each, **values) if each.name == name else each for each in facts.folders),
    )


def library(name: str, **values: Any) -> Change:
    return lambda facts: replace(
        facts,
        libraries=tuple(replace(each, **values) if each.name == name else each for each in facts.libraries),
    )


def refused(**limits: Any) -> Change:
    """A GPU got 8 of 20 GiB, under these limits."""
    last = RefusedLock("2026-01-02 03:04 UTC", 7, 20 * GIB, 8 * GIB)
    return lambda facts: replace(part("limits", **limits)(facts), refused_lock=last)


def rates(state: Any, age_days: int | None = None, problems: tuple[str, ...] = ()) -> Change:
    known = age_days is not None
    measured = (MeasuredRates("cpu", "2026-01-02 03:04 UTC", age_days or 0, problems),) if known else ()
    return lambda facts: replace(facts, rates=Rates(state, measured))


# What changes a sound machine · the only finding then · its level · what it names, and what mends it.
CASES: list[tuple[Change, str, str, str]] = [
    (part("program", installed=("0.2", "0.1")), "two-versions", "warning", "0.2 and 0.1.*`pip uninstall"),
    (part("program", commands=("/a/c", "~/c")), "two-commands", "warning", "PATH: /a/c, ~/c; .*`rm ~/c`"),
    (part("ram", available_bytes=LEAST_RAM_BYTES - 1), "ram-full", "error", "128 MiB of RAM.*`ps aux"),
    (part("limits", threads_left=7 + OTHER_THREADS), "threads", "error", "23 further threads.*ulimit -u"),
    (library("numpy", version=None), "library-missing", "error", "lacks numpy.*`pip install coldstream`"),
    (library("fastapi", version=None), "library-missing", "error", "lacks fastapi.*install coldstream`"),
    (
        library("numpy", version="2.4.0"),
        "library-old",
        "warning",
        "numpy 2.4.0 is older than 2.4.1.*install -U",
    ),
    (library("numpy", version="2.4rc1"), "library-old", "warning", "numpy 2.4rc1"),
    (part("cpu", tiers=("generic",)), "cpu-tier", "advice", "plain C.*qemu -cpu host"),
    (part("cpu", num_logical_cpus=2), "cpu-affinity", "advice", "2 of 16 CPUs.*taskset -c 0-15 coldstream"),
    (part("limits", cgroup_cpus=2.5), "cpu-quota", "advice", "2.5 of 16 CPUs.*CPUQuota=1600%"),
    (
        part("limits", cgroup_memory_bytes=8 * GIB),
        "cgroup-memory",
        "advice",
        "8.0 GiB.*64.0 GiB.*MemoryMax=64G",
    ),
    (part("limits", address_space_bytes=GIB), "address-space", "warning", "1.0 GiB.*`ulimit -v unlimited`"),
    (
        part("limits", huge_pages="never"),
        "huge-pages",
        "advice",
        "switched off.*transparent_hugepage/enabled",
    ),
    (part("limits", open_files=FILES_OF_A_SERVER - 1), "open-files", "warning", "255 files.*`ulimit -n"),
    (part("limits", wsl=1), "wsl-1", "warning", "WSL 1.*wsl --set-version"),
    (part("limits", wsl=2), "wsl-memory", "advice", "64.0 GiB.*page-locked.*`.wslconfig`.*wsl --shutdown"),
    (refused(wsl=2), "locked-memory", "warning", "8.0 GiB of 20.0 GiB.*the rest: .*`.wslconfig`"),
    (refused(locked_bytes=2**23), "locked-memory", "warning", "may lock 8 MiB: `ulimit -l unlimited`"),
    (
        refused(locked_bytes=2**23, in_container=True),
        "locked-memory",
        "warning",
        "8.0 GiB of 20.0 GiB.*`docker run --ulimit memlock=-1`; the next model that is opened",
    ),
    (refused(), "locked-memory", "warning", "compute the rest: close programs that hold RAM: `ps aux"),
    (gpu(driver=Driver()), "driver-missing", "warning", "no driver for it.*apt install nvidia-open"),
    (driver(cuda_version=(MIN_CUDA[0] - 1, 9)), "driver-old", "warning", "CUDA 12.9.*needs 13.0.*driver 580"),
    (driver(status=100, devices=()), "driver-shows-none", "warning", "status 100.*`nvidia-smi`"),
    (
        driver(devices=(replace(DEVICE, capability=(MIN_CAPABILITY[0], MIN_CAPABILITY[1] - 1)),)),
        "card-old",
        "warning",
        "Example GPU has compute capability 7.4.*7.5.*Turing.*--device cpu",
    ),
    (
        driver(devices=(replace(DEVICE, capability=MIN_CAPABILITY),)),
        "card-untried",
        "advice",
        "Example GPU has compute capability 7.5.*emulated.*coldstream verify.*--report",
    ),
    (
        gpu(missing_packages=("cuda-bindings",), nvrtc=None),
        "gpu-packages",
        "warning",
        "cuda-bindings.*stream.cuda",
    ),
    (
        gpu(nvrtc=None),
        "nvrtc-missing",
        "warning",
        "compiler cannot be loaded.*`pip install nvidia-cuda-nvrtc`",
    ),
    (gpu(nvrtc=(14, 0)), "nvrtc-new", "warning", "CUDA 14.0.*serves 13.1.*nvrtc<14'"),
    (gpu(cards=(replace(CARD, lanes=4),)), "gpu-lanes", "advice", "4 of 16 PCIe lanes.*lspci -vv -s 0000:01"),
    (folder("rates", path=None), "folder-no-home", "warning", "no home.*measured again.*export HOME="),
    (
        folder("drafters", is_writable=False),
        "folder-read-only",
        "warning",
        "no drafter.*chmod u.rwx ~/.cache",
    ),
    (
        folder("models", free_bytes=LEAST_FREE_BYTES - 1),
        "folder-full",
        "warning",
        "/data/hub is full.*du -sh",
    ),
    (
        folder("kernels", problem="others may write to ~/.cache/coldstream; remove it, or chmod go-w it"),
        "folder-refused",
        "warning",
        "others may write to ~/.cache/coldstream: .*compiled again.*chmod go-w it .`ls -ld",
    ),
    (
        folder("kernels", damaged=("a.cubin", "b.cubin")),
        "folder-damaged",
        "warning",
        "2 of the files in ~.*`rm -r ~/.cac",
    ),
    (
        folder("counts", is_writable=False),
        "folder-read-only",
        "warning",
        "~/.cache/coldstream/counts cannot be written to: counts .* made again.*chmod u.rwx ~/.cache",
    ),
    (
        folder("counts", free_bytes=LEAST_FREE_BYTES - 1),
        "folder-full",
        "warning",
        "counts is full: counts .* made again.*du -sh ~/.cache/coldstream/counts",
    ),
    (
        folder("counts", problem="~/.cache/coldstream/counts is a link; remove it"),
        "folder-refused",
        "warning",
        "counts is a link: counts .* made again.*remove it .`ls -ld ~/.cache/coldstream/counts",
    ),
    (
        folder("counts", damaged=("a",)),
        "folder-damaged",
        "warning",
        "1 of the files in ~/.cache/coldstream/counts.*`rm -r ~/.cache/coldstream/counts`",
    ),
    (rates("of another machine"), "rates-unusable", "advice", "of another machine.*plan --measure"),
    (rates("of another version"), "rates-unusable", "advice", "of another version.*plan --measure"),
    (rates("damaged"), "rates-unusable", "advice", "damaged.*plan --measure"),
    (rates("unreadable"), "rates-unusable", "advice", "unreadable.*plan --measure"),
    (rates("no file"), "rates-not-kept", "warning", "hardware.json is no file.*`rm -r ~/.cache/coldstream/h"),
    (rates("current", RATES_LAST_DAYS + 1), "rates-old", "advice", "181 days ago.*plan --measure"),
    (rates("current", 1, ("it stormed",)), "rates-disturbed", "advice", "it stormed: close .*plan --measure"),
]
NAMES = [f"{name}-{number}" for number, (_, name, _, _) in enumerate(CASES)]


def test_a_sound_machine_has_nothing_to_mend() -> None:
    assert find(SOUND) == ()
    assert exit_code_of(()) == 0


@pytest.mark.parametrize(("change", "name", "level", "said"), CASES, ids=NAMES)
def test_a_change_brings_its_finding_alone(change: Change, name: str, level: str, said: str) -> None:
    (found,) = find(change(SOUND))
    assert (found.name, found.level) == (name, level)
    assert re.search(said, f"{found.text}: {found.mend}"), found
    assert bool(exit_code_of([found])) == (level == "error")


LIMITS: dict[str, Change] = {
    "one version in two folders": part("program", installed=("0.1", "0.1")),
    "no command on the PATH": part("program", commands=()),
    "threads that just suffice": part("limits", threads_left=8 + OTHER_THREADS),
    "memory that just suffices": part("ram", available_bytes=LEAST_RAM_BYTES),
    "files that just suffice": part("limits", open_files=FILES_OF_A_SERVER),
    "a disk with just enough": folder("models", free_bytes=LEAST_FREE_BYTES),
    "a file system that does not say": folder("models", free_bytes=None),
    "the oldest CUDA": driver(cuda_version=MIN_CUDA),
    "the oldest card that kernels have run on": driver(
        devices=(replace(DEVICE, capability=TRIED_CAPABILITY),)
    ),
    "a newer library": library("numpy", version="2.10"),
    "a library with zeros less": library("numpy", version="2.4.1.0"),
    "a library without a bound": library("numpy", least=None),
    "all of the memory": part("limits", cgroup_memory_bytes=64 * GIB),
    "all of the time": part("limits", cgroup_cpus=16.0),
    "a limit of locked memory, which binds no GPU": part("limits", locked_bytes=0),
    "rates of that age": rates("current", RATES_LAST_DAYS),
    "rates to come": rates("absent"),
    "rates of a GPU to come": rates("incomplete"),
    "lanes that are unknown": gpu(cards=(replace(CARD, lanes=None),)),
    "no GPU": lambda facts: replace(facts, gpu=NO_GPU),
    "a driver for no card": gpu(cards=(), driver=Driver((13, 0), 100, ())),
    "no GPU and counts of another": lambda facts: folder("counts", damaged=("a",))(
        replace(facts, gpu=NO_GPU)
    ),
    "no GPU and kernels of another": lambda facts: folder("kernels", damaged=("a",))(
        replace(facts, gpu=NO_GPU)
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_just_suffices_is_no_finding(name: str) -> None:
    assert find(LIMITS[name](SOUND)) == ()


def test_what_mends_a_limit_depends_on_where_it_is() -> None:
    inside = part("limits", in_container=True)(SOUND)
    for change, said in (
        (part("limits", threads_left=0), "docker run --pids-limit -1"),
        (part("limits", open_files=8), "docker run --ulimit nofile="),
        (part("limits", cgroup_memory_bytes=GIB), "docker run --memory 64g"),
        (part("limits", cgroup_cpus=1.0), "docker run --cpus 16"),
        (part("cpu", num_logical_cpus=1), "docker run --cpuset-cpus 0-15"),
        (driver(status=100, devices=()), "docker run --gpus all"),
        (gpu(driver=Driver()), "on the host, and `docker run --gpus all`"),
    ):
        (found,) = find(change(inside))
        assert said in found.mend


def test_a_gpu_that_a_variable_hides_is_said_to_be_hidden() -> None:
    (found,) = find(gpu(is_restricted=True)(driver(devices=())(SOUND)))
    assert "CUDA_VISIBLE_DEVICES is set" in found.text
    assert found.mend == "`unset CUDA_VISIBLE_DEVICES`"


def test_wsl_has_its_driver_from_windows_and_slow_disks_of_it() -> None:
    inside = part("limits", wsl=2)(SOUND)
    driver_, memory = find(gpu(driver=Driver())(inside))
    assert (driver_.name, memory.name) == ("driver-missing", "wsl-memory")
    assert "in Windows" in driver_.mend
    disk = find(folder("models", path="/mnt/c/hub")(inside))[0]
    assert (disk.name, "export HF_HOME=" in disk.mend) == ("wsl-windows-disk", True)


def test_errors_come_first_and_give_the_exit_code() -> None:
    changed = SOUND
    for change in (rates("damaged"), part("limits", open_files=8), part("ram", available_bytes=0)):
        changed = change(changed)
    found = find(changed)
    assert [each.level for each in found] == ["error", "warning", "advice"]
    assert exit_code_of(found) == 71
    assert exit_code_of(found[1:]) == 0


@given(st.lists(st.sampled_from(CASES), max_size=8), st.booleans(), st.sampled_from([None, 1, 2]))
def test_any_findings_say_what_is_wrong_and_what_mends_it(
    cases: list[tuple[Change, str, str, str]], in_container: bool, wsl: int | None
) -> None:
    facts = part("limits", in_container=in_container, wsl=wsl)(SOUND)
    for change, *_ in cases:
        facts = change(facts)
    for each in find(facts):
        assert re.search(r"`[^`]+`", each.mend), "no command and no file"
        assert each.mend.count("`") % 2 == 0
        text = f"{each.text}: {each.mend}"
        assert "\n" not in text
        assert len(text) < 300
        assert (each.level == "error") == bool(each.exit_code)


def test_every_finding_has_a_case() -> None:
    """By the names in the module itself."""
    source = Path(findings.__file__).read_text()
    named = set(re.findall(r"Finding\(\s*\"([\w-]+)\"", source))
    assert named == {name for _, name, _, _ in CASES} | {"wsl-windows-disk"}
