"""Looks at the machine and the installation once. Measures nothing, makes nothing, asks no network."""

import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from coldstream.errors import StorageError
from coldstream.files import free_bytes
from coldstream.gguf.hub import Hub
from coldstream.kept_files import MACHINE_CODE, MEMORY_COUNTS, Kept, KeptFiles, directory_of, unsafe
from coldstream.kernels import _csrc
from coldstream.kernels.cuda import device
from coldstream.kernels.cuda.driver import driver_version, find_driver
from coldstream.models.dflash.convert import default_cache
from coldstream.placement.hardware import GpuHardware, Hardware, read_number, read_text
from coldstream.placement.hardware_file import age_days, default_path, describe_rates
from coldstream.placement.limits import Limits
from coldstream.placement.lock_file import last_refusal, lock_path
from coldstream.planning.diagnosis.machine_facts import (
    Card,
    Cpu,
    Folder,
    FolderName,
    Gpu,
    Library,
    MachineFacts,
    MeasuredRates,
    Program,
    Ram,
    Rates,
    RefusedLock,
)
from coldstream.planning.diagnosis.privacy import without_names

_PACKAGE: Final = "coldstream"
_EXTRAS: Final = (None, "cuda")  # None: what every installation has
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302")  # cards with and without a connector


def gather_facts(version: str, *, root: Path = Path("/")) -> MachineFacts:
    """What there is. version: of this package; root: where proc/ and sys/ are."""
    hardware, now = Hardware.measure(root=root), datetime.now(UTC)
    gpu = gpu_of(root)
    hardware = with_card(hardware, gpu)
    return without_names(
        MachineFacts(
            program=Program(
                version,
                platform.python_version(),
                f"{platform.system()} {platform.release()} {platform.machine()}",
                tuple(installed()),
                tuple(commands(os.environ.get("PATH", ""))),
            ),
            cpu=Cpu(
                hardware.cpu_name,
                tuple(_csrc.supported_tiers()),
                hardware.num_physical_cores,
                hardware.num_logical_cpus,
            ),
            ram=Ram(hardware.ram_total_bytes, hardware.ram_available_bytes),
            gpu=gpu,
            libraries=tuple(libraries()),
            limits=Limits.read(root=root),
            folders=tuple(folders()),
            rates=rates_of(hardware, now),
            refused_lock=refused_lock(hardware, now),
        )
    )


def installed() -> Iterator[str]:
    """Versions of this package by folder in which Python looks for packages, each folder once."""
    found = importlib.metadata.distributions(name=_PACKAGE)
    by_folder = {os.path.realpath(str(each.locate_file(""))): each.version for each in found}
    yield from by_folder.values()


def commands(search_path: str) -> Iterator[str]:
    """Programs called as this package in the folders of a PATH, each file once."""
    seen = set()
    for folder in filter(None, search_path.split(os.pathsep)):
        path = os.path.join(folder, _PACKAGE)
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            yield path


def gpu_of(root: Path) -> Gpu:
    """Cards, the driver, and the packages for it."""
    driver = find_driver()
    return Gpu(
        cards=tuple(cards(root)),
        driver=driver,
        driver_version=driver_version() if driver.cuda_version else None,
        missing_packages=device.missing_packages(),
        nvrtc=device.nvrtc_version(),
        is_restricted="CUDA_VISIBLE_DEVICES" in os.environ,
    )


def cards(root: Path) -> Iterator[Card]:
    """NVIDIA's cards on the PCI bus, also those that have no driver."""
    for path in sorted(root.glob("sys/bus/pci/devices/*")):
        is_display = read_text(path / "class").startswith(_DISPLAY_CLASSES)
        if is_display and read_text(path / "vendor").strip() == _NVIDIA:
            lanes, most = (
                int(read_number(path / name, 0)) or None for name in ("current_link_width", "max_link_width")
            )
            yield Card(path.name, lanes, most)


def libraries() -> Iterator[Library]:
    """The packages of this one's own list; none where the package is not installed but only imported."""
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        name = _found(r"^([\w.-]+)", requirement)
        extra = _found(r"extra == [\"'](\w+)", requirement)
        if name and extra in _EXTRAS:
            yield Library(name, extra, _version_of(name), _found(r">=\s*([\d.]+)", requirement))


def _found(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def folders() -> Iterator[Folder]:
    """What is kept between runs, and where."""
    rates = default_path()
    yield _folder("rates", rates.parent if rates else None)
    yield _checked_folder("kernels", MACHINE_CODE)
    yield _checked_folder("counts", MEMORY_COUNTS)
    try:
        drafters = default_cache()
    except StorageError:
        drafters = None
    yield _folder("drafters", drafters)
    yield _folder("models", Hub().folder())


def _checked_folder(name: FolderName, kept: Kept) -> Folder:
    """One that is used only where nobody else may write to it, and whose files are checked."""
    path = directory_of(kept)
    if path is None:
        return _folder(name, None)
    problem = next(filter(None, map(_unsafe, (path.parent, path))), None)
    return _folder(name, path, problem, KeptFiles(kept, path).damaged() if problem is None else ())


def _folder(
    name: FolderName, path: Path | None, problem: str | None = None, damaged: tuple[str, ...] = ()
) -> Folder:
    if path is None:
        return Folder(name, None, exists=False, is_writable=False, free_bytes=None)
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        problem = problem or f"{there} is no folder; remove it"
    return Folder(name, str(path), there == path, _takes_a_file(there), free_bytes(there), problem, damaged)


def _takes_a_file(folder: Path) -> bool:
    """Tries it with a file that has no name, or loses it at once: permissions do not bind root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _unsafe(path: Path) -> str | None:
    try:
        return unsafe(path, path.lstat())
    except OSError:
        return None


def with_card(hardware: Hardware, gpu: Gpu) -> Hardware:
    """`hardware` with the GPU, where there is one that this version can use."""
    if not gpu.driver.is_usable or gpu.missing_packages:
        return hardware
    card = gpu.driver.devices[0]
    on = GpuHardware(card.name, gpu.driver_version or "", card.total_bytes, card.total_bytes)
    return replace(hardware, gpu=on)


def refused_lock(hardware: Hardware, now: datetime) -> RefusedLock | None:
    """What was refused last on this machine, and when."""
    last = last_refusal(hardware, lock_path())
    if last is None:
        return None
    return RefusedLock(last.refused_at, age_days(last.refused_at, now), last.wanted_bytes, last.locked_bytes)


def rates_of(hardware: Hardware, now: datetime) -> Rates:
    """The kept rates of `hardware`."""
    found = describe_rates(hardware, default_path())
    measured = tuple(
        MeasuredRates(entry.name, entry.measured_at, age_days(entry.measured_at, now), entry.problems)
        for entry in found.entries
    )
    return Rates(found.state, measured)
