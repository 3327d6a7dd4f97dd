"""Which device a model runs on."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Final

from coldstream.errors import DeviceError
from coldstream.kernels.cuda import ahead
from coldstream.kernels.cuda.device import (
    INSTALL,
    Gpu,
    check_software,
    find_gpu,
    gpu_is_visible,
    missing_packages,
)
from coldstream.planning.config import EngineConfig

# Called with the name of the current task, the amount done and the whole amount.
OpenProgress = Callable[[str, int, int], None]

_RUNNER: Final = "coldstream.models.cuda.runner"  # whose packages a machine without a GPU may not have


def choose_device(config: EngineConfig) -> tuple[EngineConfig, Gpu | None, tuple[str, ...]]:
    """`config` with a concrete device, its GPU if it is cuda, and warnings why a present GPU is not used.

    Raises DeviceError if the configuration asks for a GPU, or for memory of one, and there is none that this
    version can use.
    """
    if config.device == "cpu" or (not _asks_for_a_gpu(config) and not gpu_is_visible()):
        return replace(config, device="cpu"), None, ()
    try:
        check_software()
        ahead.begin()
        import_module(_RUNNER)  # beside the driver, which makes its context
        return replace(config, device="cuda"), find_gpu(), ()
    except DeviceError as error:
        if _asks_for_a_gpu(config):
            raise
        return replace(config, device="cpu"), None, (f"there is a GPU, but the CPU computes: {error}",)


def device_to_plan_for(config: EngineConfig) -> tuple[EngineConfig, Gpu | None, tuple[str, ...]]:
    """`choose_device`, but with a budget of GPU memory no usable GPU is needed.

    Without one the device is cuda, and a warning names the estimates. Raises as `choose_device`.
    """
    missing = missing_packages()
    if config.vram == "auto" or (gpu_is_visible() and not missing):
        return choose_device(config)
    config = replace(config, device="cuda")
    if not missing:
        return config, None, ()
    estimated = f"packages are missing ({', '.join(missing)}), so activations are estimated"
    if gpu_is_visible():
        estimated += f", and the GPU is not measured: {INSTALL}"
    return config, None, (estimated,)


def _asks_for_a_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or config.vram != "auto"
