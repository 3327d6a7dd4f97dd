"""The GPU: whether this package can use one, its properties, and its copy bandwidth."""

import ctypes
import importlib.util
import traceback
from dataclasses import dataclass
from types import TracebackType

from coldstream.errors import ColdstreamError, DeviceError
from coldstream.kernels.cuda import ahead
from coldstream.kernels.cuda.driver import find_driver, old_card, old_driver, served_cuda

# As imported, and as installed.
REQUIRED_PACKAGES = {"cuda.core": "cuda-core", "cuda.bindings": "cuda-bindings"}
INSTALL = "pip install 'coldstream[cuda]' (in a checkout, on a machine with a GPU: make demo)"
COPY_BYTES = 2 * 2**30  # far beyond any cache
NUM_COPIES = 10


@dataclass(frozen=True)
class Gpu:
    """The current CUDA device."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    total_bytes: int
    free_bytes: int


def gpu_is_visible() -> bool:
    """Whether the driver sees a device. Cheap: loads nothing but the driver."""
    try:
        driver = ctypes.CDLL(ahead.DRIVER)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def missing_packages() -> tuple[str, ...]:
    """The packages of the extra `cuda` that are not installed. Imports none of them."""
    return tuple(name for module, name in REQUIRED_PACKAGES.items() if not _is_installed(module))


def nvrtc_version() -> tuple[int, int] | None:
    """The version of NVIDIA's compiler; None if it, or its bindings, are missing or cannot be loaded."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError):  # RuntimeError: no library of that name was found
        return None
    return (int(major), int(minor)) if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else None


def check_software() -> None:
    """Raises DeviceError, saying what is missing, for packages and a driver that cannot do. Loads none."""
    if missing := missing_packages():
        no_gpu = "" if gpu_is_visible() else ", and the driver shows no GPU (check nvidia-smi)"
        raise DeviceError(
            f"device cuda: packages are missing ({', '.join(missing)}){no_gpu}: {INSTALL}, or use device cpu"
        )
    if problem := old_driver(served_cuda()):
        raise DeviceError(f"device cuda: {problem}, or use device cpu")


def find_gpu() -> Gpu:
    """The current device. Raises DeviceError, saying what is missing, if this package cannot use it."""
    check_software()
    ahead.begin()
    from coldstream.kernels.cuda.limits import device_limits
    from coldstream.kernels.cuda.runtime import calls

    ahead.wait_for_context()  # which the runtime would ask for too
    devices = find_driver().devices
    if not devices:
        raise DeviceError(
            "device cuda: no GPU to use, the driver shows none; check nvidia-smi, or use device cpu"
        )
    found = devices[calls.DEVICE]
    if problem := old_card(found.name, found.capability):
        raise DeviceError(f"{problem}: use device cpu")
    with device_errors():
        free, total = calls.free_memory()
        return Gpu(found.name, found.capability, device_limits().num_processors, total, free)


def find_card(index: int) -> Gpu:
    """A further device. Raises DeviceError, in a sentence, if this package cannot use it."""
    from coldstream.kernels.cuda.limits import device_limits
    from coldstream.kernels.cuda.runtime import calls

    devices = find_driver().devices
    if index >= len(devices):
        raise DeviceError(
            f"device {index}: the driver shows {len(devices)} (see nvidia-smi, and CUDA_VISIBLE_DEVICES): "
            "name others, or use one"
        )
    found = devices[index]
    if problem := old_card(found.name, found.capability):
        raise DeviceError(f"device {index}: {problem}: use one device")
    with device_errors(), calls.on_device(index):
        free, total = calls.free_memory()
        return Gpu(found.name, found.capability, device_limits().num_processors, total, free)


def measure_copy_bandwidth() -> float:
    """Bytes per second that a copy within device memory reads and writes together, the best of ten."""
    from coldstream.kernels.cuda.runtime import allocations, calls, copies, streams

    with device_errors():
        num_bytes = min(COPY_BYTES, calls.free_memory()[0] // 4)
        source, target = (allocations.block(num_bytes) for _ in range(2))
        copies.fill_bytes(source.address, 1, num_bytes)
        begin, end = (streams.Event(has_time=True) for _ in range(2))
        times = []
        for _ in range(NUM_COPIES):
            begin.record()
            copies.within_device(target.address, source.address, num_bytes)
            end.record()
            end.synchronize()
            times.append(end.milliseconds_since(begin) / 1e3)
    return float(2 * num_bytes / min(times))


class device_errors:
    """Drops the frames of our errors' tracebacks, so that keeping an error keeps no device memory.

    A class and not a generator, as a step enters it several times while the device waits.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ColdstreamError):
            traceback.clear_frames(trace)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
