"""What is wrong with a machine, or slower than it could be, and the command or file that mends it.

A pure function of `MachineFacts`. Each of the functions below looks at one thing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from coldstream.errors import ColdstreamError, OutOfMemoryError
from coldstream.kept_files import MACHINE_CODE, MEMORY_COUNTS
from coldstream.kernels.cuda.device import INSTALL
from coldstream.kernels.cuda.driver import old_card, old_driver, untried_card
from coldstream.placement.hardware_file import RATES_FILE
from coldstream.placement.limits import WSL_MEMORY
from coldstream.planning.diagnosis.machine_facts import Folder, FolderName, Gpu, MachineFacts

# error: no model can run; warning: something is refused or left out; advice: what would make it faster.
Level = Literal["error", "warning", "advice"]
_LEVELS: Final = ("error", "warning", "advice")

LEAST_RAM_BYTES: Final = 128 * 2**20  # the bundled model takes 83 MB (docs/results/memory_demo.json)
LEAST_FREE_BYTES: Final = 64 * 2**20  # on the disk of a folder
OTHER_THREADS: Final = 16  # beside those that compute: signals, loading, the server's
FILES_OF_A_SERVER: Final = 256  # a connection is one
RATES_LAST_DAYS: Final = 180
SLOWEST_TIER: Final = "generic"
_CUDA_SUCCESS: Final = 0

# What follows if a folder cannot be written to.
_CONSEQUENCES: Final[Mapping[FolderName, str]] = MappingProxyType(
    {
        "rates": "the machine is measured again by every run",
        "kernels": MACHINE_CODE.loss,
        "counts": MEMORY_COUNTS.loss,
        "drafters": "no drafter can be converted",
        "models": "no model can be downloaded",
    }
)


@dataclass(frozen=True)
class Finding:
    """name: of the kind, the same in every version; mend: has a command or a file between backticks."""

    name: str
    level: Level
    text: str
    mend: str
    exit_code: int = 0  # of `coldstream doctor`, for an error


def find(facts: MachineFacts) -> tuple[Finding, ...]:
    """All findings, errors first."""
    found = [finding for look in _LOOKS for finding in look(facts)]
    return tuple(sorted(found, key=lambda finding: _LEVELS.index(finding.level)))


def exit_code_of(found: Sequence[Finding]) -> int:
    """0 if nothing prevents running, otherwise that of the first error."""
    return next((finding.exit_code for finding in found if finding.exit_code), 0)


def _versions(facts: MachineFacts) -> Iterator[Finding]:
    program = facts.program
    if len(set(program.installed)) > 1:
        yield Finding(
            "two-versions",
            "warning",
            f"this Python finds coldstream {' and '.join(program.installed)}, and imports the first",
            "`pip uninstall coldstream` until none is left, then install one",
        )
    if len(program.commands) > 1:
        yield Finding(
            "two-commands",
            "warning",
            f"there is more than one coldstream on the PATH: {', '.join(program.commands)}; the first runs",
            f"remove the others: `rm {' '.join(program.commands[1:])}`, or put its folder last in PATH",
        )


def _libraries(facts: MachineFacts) -> Iterator[Finding]:
    required = [each for each in facts.libraries if each.extra is None]
    if missing := [each.name for each in required if each.version is None]:
        yield Finding(
            "library-missing",
            "error",
            f"coldstream lacks {', '.join(missing)}",
            "`pip install coldstream`",
            ColdstreamError.exit_code,
        )
    for each in facts.libraries:
        if each.version and each.least and _numbers(each.version) < _numbers(each.least):
            yield Finding(
                "library-old",
                "warning",
                f"{each.name} {each.version} is older than {each.least}, the oldest that is tested",
                f"`pip install -U {each.name}`",
            )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, without zeros at the end: 13.0.88 of 13.0.88rc1."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _cpu(facts: MachineFacts) -> Iterator[Finding]:
    if facts.cpu.tiers[-1] == SLOWEST_TIER:
        yield Finding(
            "cpu-tier",
            "advice",
            "this CPU shows no instructions that kernels are written for, so plain C++ computes",
            "give a virtual machine the host's CPU: `qemu -cpu host`; `grep avx2 /proc/cpuinfo` shows it",
        )
    limits, cpu = facts.limits, facts.cpu
    if cpu.num_logical_cpus < limits.num_online_cpus:
        command = f"taskset -c 0-{limits.num_online_cpus - 1} coldstream"
        yield Finding(
            "cpu-affinity",
            "advice",
            f"this process may run on {cpu.num_logical_cpus} of {limits.num_online_cpus} CPUs",
            _by_place(facts, f"--cpuset-cpus 0-{limits.num_online_cpus - 1}", command),
        )
    if limits.cgroup_cpus is not None and limits.cgroup_cpus < cpu.num_logical_cpus:
        yield Finding(
            "cpu-quota",
            "advice",
            f"this process gets the time of {limits.cgroup_cpus:g} of {cpu.num_logical_cpus} CPUs",
            _by_place(
                facts,
                f"--cpus {cpu.num_logical_cpus}",
                f"systemd-run --user --scope -p CPUQuota={100 * cpu.num_logical_cpus}% coldstream",
            ),
        )


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    limits, ram = facts.limits, facts.ram
    if ram.available_bytes < LEAST_RAM_BYTES:
        yield Finding(
            "ram-full",
            "error",
            f"{_size(ram.available_bytes)} of RAM are available, and the smallest model takes more",
            "close other programs: `ps aux --sort -rss | head`",
            OutOfMemoryError.exit_code,
        )
    if limits.cgroup_memory_bytes is not None and limits.cgroup_memory_bytes < limits.machine_ram_bytes:
        whole = limits.machine_ram_bytes >> 30
        yield Finding(
            "cgroup-memory",
            "advice",
            f"this process may use {_size(limits.cgroup_memory_bytes)} of the machine's "
            f"{_size(limits.machine_ram_bytes)} of RAM",
            _by_place(
                facts, f"--memory {whole}g", f"systemd-run --user --scope -p MemoryMax={whole}G coldstream"
            ),
        )
    if limits.address_space_bytes is not None:
        yield Finding(
            "address-space",
            "warning",
            f"addresses are limited to {_size(limits.address_space_bytes)}, and a mapped model counts whole",
            "`ulimit -v unlimited`",
        )
    if limits.huge_pages == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(
            "huge-pages",
            "advice",
            "huge pages are switched off, so experts in RAM take more entries of the page table",
            f"`echo madvise | sudo tee {path}`",
        )


def _threads_and_files(facts: MachineFacts) -> Iterator[Finding]:
    left, needed = facts.limits.threads_left, facts.cpu.num_cores + OTHER_THREADS
    if left is not None and left < needed:
        yield Finding(
            "threads",
            "error",
            f"{left} further threads may be started, and a run takes about {needed}",
            _by_place(facts, "--pids-limit -1", "ulimit -u unlimited", "or fewer `--threads`"),
            OutOfMemoryError.exit_code,
        )
    files = facts.limits.open_files
    if files is not None and files < FILES_OF_A_SERVER:
        yield Finding(
            "open-files",
            "warning",
            f"{files} files may be open at once, and each connection of a server is one",
            _by_place(facts, "--ulimit nofile=65536", "ulimit -n 65536"),
        )


def _gpu(facts: MachineFacts) -> Iterator[Finding]:
    gpu = facts.gpu
    problem = _driver_problem(facts)
    if problem is not None:
        yield problem
    elif gpu.driver.devices:
        yield from _packages(gpu)
        if text := untried_card(gpu.driver.devices[0].name, gpu.driver.devices[0].capability):
            mend = (
                "`coldstream verify MODEL --report report.md` compares tokens with the CPU's; the issue form "
                "for numbers from your rig takes the report"
            )
            yield Finding("card-untried", "advice", text, mend)
    for card in gpu.cards:
        if card.lanes and card.max_lanes and card.lanes < card.max_lanes:
            yield Finding(
                "gpu-lanes",
                "advice",
                f"the card at {card.address} has {card.lanes} of {card.max_lanes} PCIe lanes, so experts "
                "come from RAM more slowly",
                f"move it to another slot; `sudo lspci -vv -s {card.address}` shows LnkSta",
            )


def _driver_problem(facts: MachineFacts) -> Finding | None:
    """The first of what keeps the driver from showing a card that this version can use."""
    gpu, driver = facts.gpu, facts.gpu.driver
    if driver.cuda_version is None:
        if gpu.cards:
            return Finding(
                "driver-missing", "warning", "there is an NVIDIA card and no driver for it", _install(facts)
            )
        return None
    if problem := old_driver(driver.cuda_version):
        what, _, step = problem.partition(": ")
        return Finding("driver-old", "warning", what, f"{step}: {_install(facts)}")
    if not driver.devices:
        if not gpu.cards and driver.status != _CUDA_SUCCESS:
            return None  # a driver that was installed for no card
        text = f"the driver shows no GPU (status {driver.status})"
        if gpu.is_restricted:
            text += ", and CUDA_VISIBLE_DEVICES is set"
            mend = "`unset CUDA_VISIBLE_DEVICES`"
        else:
            mend = _by_place(facts, "--gpus all", "nvidia-smi")
        return Finding("driver-shows-none", "warning", text, mend)
    if problem := old_card(driver.devices[0].name, driver.devices[0].capability):
        mend = "the CPU computes: `--device cpu` says so without asking the GPU"
        return Finding("card-old", "warning", problem, mend)
    return None


def _packages(gpu: Gpu) -> Iterator[Finding]:
    if gpu.missing_packages:
        yield Finding(
            "gpu-packages",
            "warning",
            f"there is a GPU, but the CPU computes: packages are missing ({', '.join(gpu.missing_packages)})",
            f"`{INSTALL.partition(' (')[0]}`",
        )
    elif gpu.nvrtc is None:
        yield Finding(
            "nvrtc-missing",
            "warning",
            "NVIDIA's compiler cannot be loaded, so no kernel can be compiled for the GPU",
            "`pip install nvidia-cuda-nvrtc`",
        )
    elif gpu.driver.cuda_version and gpu.nvrtc[0] > gpu.driver.cuda_version[0]:
        yield Finding(
            "nvrtc-new",
            "warning",
            f"the compiler is of CUDA {gpu.nvrtc[0]}.{gpu.nvrtc[1]}, and the driver serves "
            f"{gpu.driver.cuda_version[0]}.{gpu.driver.cuda_version[1]} at most",
            f"`pip install 'nvidia-cuda-nvrtc<{gpu.driver.cuda_version[0] + 1}'`, or a newer driver",
        )


def _folders(facts: MachineFacts) -> Iterator[Finding]:
    for folder in facts.folders:
        if folder.name in ("kernels", "counts") and not facts.gpu.driver.devices:
            continue  # without a GPU nothing is compiled or counted
        yield from _folder(folder)
        if facts.limits.wsl and folder.path and folder.path.startswith("/mnt/"):
            yield Finding(
                "wsl-windows-disk",
                "advice",
                f"{folder.path} is on a disk of Windows, which Linux reads slowly",
                "keep models on Linux's own disk: `export HF_HOME=~/hub`",
            )


def _folder(folder: Folder) -> Iterator[Finding]:
    follows = _CONSEQUENCES[folder.name]
    if folder.path is None:
        text = f"this user has no home directory: {follows}"
        yield Finding("folder-no-home", "warning", text, "`export HOME=/a/folder/of/yours`")
        return
    shown = f"`ls -ld {folder.path}`"
    if folder.problem is not None:
        what, _, step = folder.problem.partition("; ")
        yield Finding("folder-refused", "warning", f"{what}: {follows}", f"{step} ({shown})")
    elif not folder.is_writable:
        text = f"{folder.path} cannot be written to: {follows}"
        yield Finding(
            "folder-read-only", "warning", text, f"`chmod u+rwx {folder.path}`, or mount it for writing"
        )
    elif folder.free_bytes is not None and folder.free_bytes < LEAST_FREE_BYTES:
        text = f"the disk of {folder.path} is full: {follows}"
        yield Finding("folder-full", "warning", text, f"free some: `du -sh {folder.path}`")
    if folder.damaged:
        yield Finding(
            "folder-damaged",
            "warning",
            f"damaged or open to others, so not used: {len(folder.damaged)} of the files in {folder.path}",
            f"`rm -r {folder.path}`; they are made again",
        )


def _rates(facts: MachineFacts) -> Iterator[Finding]:
    rates = facts.rates
    again = "`coldstream plan --measure`"
    if rates.state in ("of another machine", "of another version", "damaged", "unreadable"):
        text = f"the kept rates are {rates.state}, and the next plan that needs rates measures them again"
        yield Finding("rates-unusable", "advice", text, again)
    if rates.state == "no file":
        folder = next(each.path for each in facts.folders if each.name == "rates")
        text = f"{folder}/{RATES_FILE} is no file, so each plan that needs rates measures this machine again"
        yield Finding("rates-not-kept", "warning", text, f"`rm -r {folder}/{RATES_FILE}`")
    if problems := sorted({problem for each in rates.measured for problem in each.problems}):
        text = f"while the rates of this machine were measured, {', '.join(problems)}"
        yield Finding("rates-disturbed", "advice", text, f"close other programs, then {again}")
    elif rates.age_days is not None and rates.age_days > RATES_LAST_DAYS:
        text = f"the rates of this machine were measured {rates.age_days} days ago"
        yield Finding("rates-old", "advice", text, again)


def _locked(facts: MachineFacts) -> Iterator[Finding]:
    last, limits = facts.refused_lock, facts.limits
    if last is None:
        return
    mend, limit = "close programs that hold RAM: `ps aux --sort -rss | head`", ""
    if limits.wsl is not None:
        mend = WSL_MEMORY
    elif limits.locked_bytes is not None:
        mend = _by_place(facts, "--ulimit memlock=-1", "ulimit -l unlimited")
        limit = f"; this process may lock {_size(limits.locked_bytes)}"
    yield Finding(
        "locked-memory",
        "warning",
        f"at {last.refused_at} the system page-locked {_size(last.locked_bytes)} of "
        f"{_size(last.wanted_bytes)} for a GPU, so plans have the CPU compute the rest{limit}",
        f"{mend}; the next model that is opened tries it again",
    )


def _wsl(facts: MachineFacts) -> Iterator[Finding]:
    if facts.limits.wsl == 1:
        text = "this is WSL 1, which has no GPU and reads files slowly"
        yield Finding("wsl-1", "warning", text, "in Windows: `wsl --set-version DISTRIBUTION 2`")
    elif facts.limits.wsl is not None and facts.refused_lock is None:  # which says how much it was
        yield Finding(
            "wsl-memory",
            "advice",
            f"Windows gives WSL {_size(facts.limits.machine_ram_bytes)} of RAM, half of it by default, and "
            "may let a GPU have only a part of that page-locked",
            WSL_MEMORY,
        )


def _by_place(facts: MachineFacts, docker: str, command: str, more: str = "") -> str:
    """How a limit is lifted in a container, or outside of one."""
    text = f"`docker run {docker}`" if facts.limits.in_container else f"`{command}`"
    return f"{text}, {more}" if more else text


def _install(facts: MachineFacts) -> str:
    """How a driver is installed."""
    if facts.limits.wsl:
        return "in Windows, from nvidia.com/drivers, then `wsl --shutdown`"
    if facts.limits.in_container:
        return "on the host, and `docker run --gpus all`"
    return "`sudo apt install nvidia-open`, or from nvidia.com/drivers"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


_LOOKS: Final[tuple[Callable[[MachineFacts], Iterator[Finding]], ...]] = (
    _versions,
    _libraries,
    _memory,
    _threads_and_files,
    _cpu,
    _gpu,
    _folders,
    _rates,
    _locked,
    _wsl,
)
