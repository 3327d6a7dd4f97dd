"""Which device a model runs on."""

from collections.abc import Callable
from dataclasses import replace

from coldstream.engine.config import EngineConfig
from coldstream.errors import DeviceError
from coldstream.kernels.cuda.device import Gpu, find_gpu, gpu_is_visible

# Called with what is going on, how much of it is done, and of how much.
OpenProgress = Callable[[str, int, int], None]


def choose_device(config: EngineConfig) -> tuple[EngineConfig, Gpu | None, tuple[str, ...]]:
    """`config` with a concrete device, the GPU if it is that, and why it isn't if one is there.

    Raises DeviceError if the configuration asks for a GPU, or for memory of one, and there is none that this
    version can use.
    """
    if config.device == "cpu" or (config.device == "auto" and not gpu_is_visible()):
        return replace(config, device="cpu"), None, ()
    try:
        return replace(config, device="cuda"), find_gpu(), _unused_on_gpu(config)
    except DeviceError as error:
        if config.device == "cuda" or config.vram != "auto":
            raise
        return replace(config, device="cpu"), None, (f"there is a GPU, but the CPU computes: {error}",)


def _unused_on_gpu(config: EngineConfig) -> tuple[str, ...]:
    """What the configuration asks for in vain."""
    if config.ram == "auto":
        return ()
    return ("--ram bounds models on the CPU: with a GPU, experts beyond --vram stay in the mapped file",)
