"""Kernels of a .cu file, ready to be launched on PyTorch's current stream.

    program = CudaProgram(Path(__file__).with_name("few.cu"), ("linear_few<1>", "linear_few<2>"))
    program.kernel("linear_few<1>").launch((grid, 1, 1), 256, (x, weight, 3, 1.5))

Loading a kernel needs its first use outside a graph capture; after that launches are captured like any other.
Compiling takes up to a second each, so `note_kernels` finds out which ones are needed and `load_kernels`
compiles them together.
"""

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.kernels.cuda.compiler import MachineCode, compile_instance
from coldstream.kernels.cuda.device import out_of_memory

Grid = tuple[int, int, int]
Argument = torch.Tensor | int | float | ctypes.Structure | None

DEFAULT_SHARED_BYTES = 48 * 1024  # what a block may use without asking


class Kernel:
    """One kernel in the current device's memory."""

    def __init__(self, code: MachineCode) -> None:
        # PyTorch makes the primary context current when it first touches the device.
        torch.cuda.current_stream()
        self._device = torch.cuda.current_device()
        self._module = _checked(driver.cuModuleLoadData(code.cubin))
        self._function = _checked(driver.cuModuleGetFunction(self._module, code.symbol.encode()))
        self._shared_limit = DEFAULT_SHARED_BYTES
        self._can_overlap = torch.cuda.get_device_capability() >= (9, 0)
        self._overlap = driver.CUlaunchAttribute()
        self._overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._overlap.value.programmaticStreamSerializationAllowed = 1

    def launch(
        self,
        grid: Grid,
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Queue the kernel with `block` threads a block.

        A tensor passes its address, None a null pointer, int an int32, float a float32, a ctypes structure
        its bytes. shared_bytes is dynamic shared memory. With `overlap` the kernel may start before the one
        in front of it has ended, and must wait for it itself. Raises DeviceError, OutOfMemoryError.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_limit:
            self._raise_shared_limit(shared_bytes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        # What `torch.cuda.current_stream` wraps into an object, which takes longer than the launch.
        config.hStream = torch._C._cuda_getCurrentRawStream(self._device)
        if overlap and self._can_overlap:
            config.attrs = [self._overlap]
            config.numAttrs = 1
        values = [_as_c(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        _checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _raise_shared_limit(self, num_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, attribute, num_bytes))
        self._shared_limit = num_bytes


class NotedKernel(Kernel):
    """Stands for a kernel that is only to be known: a launch does nothing."""

    def __init__(self) -> None:
        """Takes nothing of the device."""

    def launch(self, *args: object, **options: object) -> None:
        """Nothing happens."""


class CudaProgram:
    """The kernels `instances` of `source`: functions, or template instances as C++ writes them.

    Each is compiled and loaded when it is first asked for, other instances of the same templates too.
    """

    def __init__(self, source: Path, instances: Sequence[str]) -> None:
        self.source = source
        self.instances = tuple(instances)
        self._names = {_function(instance) for instance in instances}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, instance: str) -> Kernel:
        """KeyError for one of a function that was not listed; CompileError, DeviceError, OutOfMemoryError."""
        kernel = self._kernels.get(instance)
        if kernel is None or _noted.get() is not None:
            if _function(instance) not in self._names:
                raise KeyError(f"{self.source.name} lists no instance {instance}")
            if (noted := _noted.get()) is not None:
                noted.add((self, instance))
                return NotedKernel()
            kernel = Kernel(compile_instance(self.source, instance, _architecture()))
            self._kernels[instance] = kernel
        return kernel


Noted = set[tuple[CudaProgram, str]]
_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


@contextmanager
def note_kernels() -> Iterator[Noted]:
    """Inside, kernels are noted in the set and not launched, so that tensors need no memory."""
    noted: Noted = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def load_kernels(noted: Collection[tuple[CudaProgram, str]], progress: Callable[[int, int], None]) -> None:
    """Makes the kernels ready to be launched on the current device, by as many threads as there are cores.

    progress is called with (done, total) kernels. Raises as `CudaProgram.kernel`.
    """
    # A thread has the device's context only once it has called it.
    with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.synchronize) as pool:
        loaded = pool.map(lambda kernel: kernel[0].kernel(kernel[1]), noted)
        for done, _ in enumerate(loaded, start=1):
            progress(done, len(noted))


def _function(instance: str) -> str:
    return instance.partition("<")[0]


def _architecture() -> str:
    """Of the current device, as the compiler names it with all its instructions."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _as_c(arg: Argument) -> Any:
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if arg is None:
        return ctypes.c_void_p(0)
    if isinstance(arg, int):
        return ctypes.c_int32(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return arg


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise out_of_memory()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the GPU driver refused: {driver.cuGetErrorString(status)[1].decode()}")
    return values[0] if values else None
