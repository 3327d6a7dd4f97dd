"""The GPU: whether this package can use one, its properties, and its copy bandwidth."""

import ctypes
import importlib.util
import traceback
from dataclasses import dataclass
from types import TracebackType

from coldstream.errors import ColdstreamError, DeviceError
from coldstream.kernels.cuda import ahead
from coldstream.kernels.cuda.driver import old_card, old_driver, served_cuda

# As imported, and as installed.
REQUIRED_PACKAGES = {"torch": "torch", "cuda.core": "cuda-core", "cuda.bindings": "cuda-bindings"}
INSTALL = "pip install 'coldstream[cuda]' (in a checkout, on a machine with a GPU: make demo)"
COPY_BYTES = 2 * 2**30  # far beyond any cache
NUM_COPIES = 10

MEMORY_ERROR = "out of memory"  # in the driver's messages


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


def find_gpu() -> Gpu:
    """The current device. Raises DeviceError, saying what is missing, if this package cannot use it."""
    if missing := missing_packages():
        no_gpu = "" if gpu_is_visible() else ", and the driver shows no GPU (check nvidia-smi)"
        raise DeviceError(
            f"device cuda: packages are missing ({', '.join(missing)}){no_gpu}: {INSTALL}, or use device cpu"
        )
    if problem := old_driver(served_cuda()):
        raise DeviceError(f"device cuda: {problem}, or use device cpu")
    ahead.begin()
    import torch

    from coldstream.kernels.cuda.runtime import calls

    ahead.wait_for_context()  # PyTorch would ask for the same one
    if not torch.cuda.is_available():
        cause = (
            f"this PyTorch ({torch.__version__}) has no CUDA; install one that has"
            if gpu_is_visible()
            else "the driver shows none; check nvidia-smi"
        )
        raise DeviceError(f"device cuda: no GPU to use, {cause}, or use device cpu")
    with device_errors():
        properties = torch.cuda.get_device_properties()
        free, total = calls.free_memory()
    capability = (properties.major, properties.minor)
    if problem := old_card(properties.name, capability):
        raise DeviceError(f"{problem}: use device cpu")
    return Gpu(properties.name, capability, properties.multi_processor_count, total, free)


def measure_copy_bandwidth() -> float:
    """Bytes per second that a copy within device memory reads and writes together, the best of ten."""
    import torch

    from coldstream.kernels.cuda.runtime import calls, streams

    with device_errors():
        num_bytes = min(COPY_BYTES, calls.free_memory()[0] // 4)
        source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        begin, end = (streams.Event(has_time=True) for _ in range(2))
        times = []
        for _ in range(NUM_COPIES):
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(end.milliseconds_since(begin) / 1e3)
        del source, target
        torch.cuda.empty_cache()
    return float(2 * num_bytes / min(times))


class device_errors:
    """Translates PyTorch's errors about the device into coldstream's.

    Drops the traceback's frames, so that keeping the error keeps no device memory. A class and not a
    generator, as a step enters it several times while the device waits.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ColdstreamError):
            traceback.clear_frames(trace)
        elif isinstance(error, RuntimeError):
            ours = _translated(error)
            if ours is not None:
                traceback.clear_frames(trace)
                try:
                    raise ours from error
                finally:
                    del ours, error, trace  # which would keep each other, and all frames, until a collection


def _translated(error: RuntimeError) -> ColdstreamError | None:
    """The corresponding error of coldstream; None if `error` is not about the device."""
    import torch

    from coldstream.kernels.cuda.runtime import calls

    if isinstance(error, torch.OutOfMemoryError):
        return calls.out_of_memory()
    if not isinstance(error, torch.AcceleratorError):
        return None
    message = str(error)
    if MEMORY_ERROR in message:
        return calls.out_of_memory()
    return DeviceError(
        f"the GPU failed: {message.splitlines()[0]}; the state of this process's GPU work is lost, "
        "start it again"
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
