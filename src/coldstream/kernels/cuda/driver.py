"""The CUDA driver as it answers without a context: its version, and the devices that it shows.

Needs no package and loads nothing but the driver's own libraries. Unit of work: one look.
"""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coldstream.kernels.cuda.ahead import DRIVER
from coldstream.kernels.cuda.features import AMPERE, TURING

MANAGEMENT: Final = "libnvidia-ml.so.1"  # NVIDIA's library for management
MODULE_VERSION: Final = Path("/sys/module/nvidia/version")  # as Linux shows it, where it loads the driver
UNKNOWN: Final = "unknown"
MIN_CAPABILITY: Final = TURING  # the first with products of bytes on tensor cores
TRIED_CAPABILITY: Final = AMPERE  # before it kernels have run on the host's model of a GPU alone
MIN_CUDA: Final = (13, 0)  # whose bindings and compiler the extra `cuda` installs
MIN_VERSION: Final = "580"  # the first driver that serves it
_NAME_CHARS: Final = 256
_CAPABILITY: Final = (75, 76)  # numbers of the attributes with major and minor


@dataclass(frozen=True)
class DriverDevice:
    """A device that the driver shows."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True)
class Driver:
    """The driver's library; without one there is no version, and no device."""

    cuda_version: tuple[int, int] | None = None  # the newest CUDA that it serves
    status: int | None = None  # of its start; 0: it can be asked for devices
    devices: tuple[DriverDevice, ...] = ()

    @property
    def is_usable(self) -> bool:
        """Whether the driver and its first device are new enough."""
        if not self.devices or old_driver(self.cuda_version):
            return False
        return old_card(self.devices[0].name, self.devices[0].capability) is None


def find_driver() -> Driver:
    """What the driver says. A library that lacks a function counts as no driver."""
    try:
        library = ctypes.CDLL(DRIVER)
        cuda_version = _cuda_version(library)
        status = int(library.cuInit(0))
        devices = _devices(library) if status == 0 else ()
    except (OSError, AttributeError):
        return Driver()
    return Driver(cuda_version, status, devices)


def served_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves; None without a driver. Does not start the driver."""
    try:
        return _cuda_version(ctypes.CDLL(DRIVER))
    except (OSError, AttributeError):
        return None


def driver_version(module: Path = MODULE_VERSION) -> str:
    """The driver's version as nvidia-smi shows it; "unknown" where nothing says it.

    From the kernel's module, or the library for management, which takes some tenths of a second to begin.
    """
    with suppress(OSError, UnicodeDecodeError):
        if version := module.read_text().strip():
            return version
    text = ctypes.create_string_buffer(80)
    try:
        library = ctypes.CDLL(MANAGEMENT)
    except OSError:
        return UNKNOWN
    if library.nvmlInit_v2() != 0:
        return UNKNOWN
    known = library.nvmlSystemGetDriverVersion(text, len(text)) == 0
    library.nvmlShutdown()
    return text.value.decode() if known else UNKNOWN


def old_driver(cuda_version: tuple[int, int] | None) -> str | None:
    """Why a driver that serves CUDA up to `cuda_version` is too old; None: it is not, or nothing is known."""
    if cuda_version is None or cuda_version >= MIN_CUDA:
        return None
    return (
        f"the driver serves CUDA {_dotted(cuda_version)}, this version needs {_dotted(MIN_CUDA)}: "
        f"install driver {MIN_VERSION} or later"
    )


def old_card(name: str, capability: tuple[int, int]) -> str | None:
    """Why a card of this compute capability cannot be used; None: it can."""
    if capability >= MIN_CAPABILITY:
        return None
    return (
        f"{name} has compute capability {_dotted(capability)}, this version needs "
        f"{_dotted(MIN_CAPABILITY)} (Turing) or later"
    )


def untried_card(name: str, capability: tuple[int, int]) -> str | None:
    """What is not known of a card of this compute capability; None: nothing."""
    if capability >= TRIED_CAPABILITY:
        return None
    return (
        f"{name} has compute capability {_dotted(capability)}: the kernels for it are compiled and emulated "
        "in tests, and have not run on a card yet"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _cuda_version(library: Any) -> tuple[int, int] | None:
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _devices(library: Any) -> tuple[DriverDevice, ...]:
    count = ctypes.c_int(0)
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_device(library, ordinal) for ordinal in range(count.value))


def _device(library: Any, ordinal: int) -> DriverDevice:
    device, number = ctypes.c_int(0), ctypes.c_int(0)
    name, num_bytes = ctypes.create_string_buffer(_NAME_CHARS), ctypes.c_size_t(0)
    library.cuDeviceGet(ctypes.byref(device), ordinal)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(num_bytes), device)
    capability = []
    for attribute in _CAPABILITY:
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    major, minor = capability
    return DriverDevice(name.value.decode(errors="replace"), (major, minor), num_bytes.value)
