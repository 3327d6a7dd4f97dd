"""Kernels of a .cu file, ready to be launched on the current stream.

    program = CudaProgram(Path(__file__).with_name("skinny.cu"), ("linear_skinny<1>", "linear_skinny<2>"))
    program.kernel("linear_skinny<1>").launch((grid, 1, 1), 256, (x, weight, 3, 1.5))

Loading a kernel needs its first use outside a graph capture; after that launches are captured like any other.
Compiling takes up to a second each, so `note_kernels` finds out which ones are needed and `loading_kernels`
compiles them together.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.compiler import compile_together
from coldstream.kernels.cuda.runtime import calls, streams

Grid = tuple[int, int, int]
Argument = DeviceArray | int | float | ctypes.Structure | None

DEFAULT_SHARED_BYTES = 48 * 1024  # shared memory of a block without an attribute


class Kernel:
    """One kernel in the current device's memory."""

    def __init__(self, module: Any, symbol: str) -> None:
        """module: the driver's, with a kernel of this name. It stays loaded."""
        self._function = calls.checked(driver.cuModuleGetFunction(module, symbol.encode()))
        self._shared_limit = DEFAULT_SHARED_BYTES
        self._can_overlap = calls.capability() >= (9, 0)
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

        An array passes its address, None a null pointer, int an int32, float a float32, a ctypes structure
        its bytes. shared_bytes: dynamic shared memory. With `overlap` the kernel may start before the one
        before it has ended, and must itself wait for that. Raises DeviceError, OutOfMemoryError.
        """
        if 0 in grid:
            return
        if shared_bytes > self._shared_limit:
            self._raise_shared_limit(shared_bytes)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = streams.current_stream().handle
        if overlap and self._can_overlap:
            config.attrs = [self._overlap]
            config.numAttrs = 1
        values = [_as_c(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        calls.checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _raise_shared_limit(self, num_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        calls.checked(driver.cuFuncSetAttribute(self._function, attribute, num_bytes))
        self._shared_limit = num_bytes


class NotedKernel(Kernel):
    """A kernel that is only recorded: a launch does nothing."""

    def __init__(self) -> None:
        """Uses no device."""

    def launch(self, *args: object, **options: object) -> None:
        """Does nothing."""


class CudaProgram:
    """The kernels `instances` of `source`: functions, or template instances as C++ writes them.

    Each is compiled and loaded when it is first asked for, other instances of the same templates too. Where
    some are no templates, all `instances` are compiled with the first, as the compiler omits none of these.
    is_slow: whether the compiler takes long for some of them.
    """

    def __init__(self, source: Path, instances: Sequence[str], *, is_slow: bool = False) -> None:
        self.source, self.is_slow = source, is_slow
        self.instances = tuple(instances)
        self._names = {_function(instance) for instance in instances}
        self._is_whole = any(instance in self._names for instance in instances)
        self._kernels: dict[str, Kernel] = {}
        self._loading = threading.Lock()  # of kernels that are compiled together

    def kernel(self, instance: str) -> Kernel:
        """KeyError for one of a function that was not listed; CompileError, DeviceError, OutOfMemoryError."""
        kernel = self._kernels.get(instance)
        if kernel is None or _noted.get() is not None:
            if _function(instance) not in self._names:
                raise KeyError(f"{self.source.name} lists no instance {instance}")
            if (noted := _noted.get()) is not None:
                noted.add((self, instance))
                return NotedKernel()
            kernel = self._loaded(instance)
        return kernel

    def compiled_with(self, instance: str) -> tuple[str, ...]:
        """The kernels that are compiled and loaded with one, itself included."""
        return self.instances if self._is_whole and instance in self.instances else (instance,)

    def _loaded(self, instance: str) -> Kernel:
        together = self.compiled_with(instance)
        with self._loading if len(together) > 1 else nullcontext():
            if instance not in self._kernels:  # another thread may have loaded it
                self._kernels.update(_load(self.source, together))
            return self._kernels[instance]


Noted = set[tuple[CudaProgram, str]]
_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


@contextmanager
def note_kernels() -> Iterator[Noted]:
    """Records kernels in the set instead of launching them, so that tensors need no memory."""
    noted: Noted = set()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@contextmanager
def loading_kernels(
    noted: Collection[tuple[CudaProgram, str]], progress: Callable[[int, int], None] | None = None
) -> Iterator[None]:
    """Compiles and loads the kernels for the current device, with one thread per core, beside what is within.

    At the end they are there; progress is then called with (done, total) compilations. Raises as
    `CudaProgram.kernel`.
    """
    once = {(program, program.compiled_with(instance)): instance for program, instance in noted}
    # Slow ones first, or the last of them would be compiled alone while all other cores are idle.
    ordered = sorted(
        ((program, instance) for (program, _), instance in once.items()),
        key=lambda kernel: not kernel[0].is_slow,
    )
    with ThreadPoolExecutor(os.cpu_count(), initializer=calls.attach) as pool:
        try:
            loaded = pool.map(lambda kernel: kernel[0].kernel(kernel[1]), ordered)
            yield
            for done, _ in enumerate(loaded, start=1):
                if progress is not None:
                    progress(done, len(ordered))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _load(source: Path, instances: Sequence[str]) -> dict[str, Kernel]:
    """Kernels of a source in one module, by their instances."""
    codes = compile_together(source, instances, _architecture())
    calls.attach()
    module = calls.checked(driver.cuModuleLoadData(codes[0].cubin))
    return {instance: Kernel(module, code.symbol) for instance, code in zip(instances, codes, strict=True)}


def _function(instance: str) -> str:
    return instance.partition("<")[0]


def _architecture() -> str:
    """The compiler's name of the current device's architecture, with all its instructions."""
    major, minor = calls.capability()
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


_SCALARS: dict[type[Any], type[Any]] = {int: ctypes.c_int32, bool: ctypes.c_int32, float: ctypes.c_float}


def _as_c(arg: Argument) -> Any:
    if (scalar := _SCALARS.get(type(arg))) is not None:
        return scalar(arg)
    if isinstance(arg, ctypes.Structure):
        return arg
    return ctypes.c_void_p(0 if arg is None else arg.data_ptr())  # type: ignore[union-attr]
