"""Kernels of a .cu file, ready to be launched on the current stream.

    program = CudaProgram(Path(__file__).with_name("skinny.cu"), ("linear_skinny<1>", "linear_skinny<2>"))
    program.kernel("linear_skinny<1>").launch((grid, 1, 1), 256, (x, weight, 3, 1.5))

Loading a kernel needs its first use outside a graph capture; after that launches are captured like any other.
Compiling takes up to a second each, so `note_kernels` finds out which ones are needed, and
`kernel_loading.py` compiles them beside other work.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.compiler import MachineCode, compile_together, kept_together
from coldstream.kernels.cuda.features import Features, architecture_of
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
        self._can_overlap = Features.of(calls.capability()).has_overlap
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
        together: bool = False,
        cluster: int = 1,
    ) -> None:
        """Queue the kernel with `block` threads a block.

        An array passes its address, None a null pointer, int an int32, float a float32, a ctypes structure
        its bytes. shared_bytes: dynamic shared memory. With `overlap` the kernel may start before the one
        before it has ended, and must itself wait for that. `together`: blocks wait for each other, and a grid
        that does not fit on the device at once is refused. cluster: blocks that reach each other's shared
        memory. Raises DeviceError, OutOfMemoryError.
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
        attributes = [self._overlap] if overlap and self._can_overlap else []
        if together:
            attributes.append(_together())
        if cluster > 1:
            attributes.append(_cluster_of(cluster))
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        values = [_as_c(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        calls.checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))

    def _raise_shared_limit(self, num_bytes: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        calls.checked(driver.cuFuncSetAttribute(self._function, attribute, num_bytes))
        self._shared_limit = num_bytes


def _together() -> Any:
    """The attribute of a cooperative launch."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return attribute


def _cluster_of(num_blocks: int) -> Any:
    """The attribute of a launch in clusters of adjacent blocks."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = num_blocks, 1, 1
    attribute.value.clusterDim = dimension
    return attribute


class NotedKernel(Kernel):
    """A kernel that is only recorded: a launch does nothing."""

    def __init__(self) -> None:
        """Uses no device."""

    def launch(self, *args: object, **options: object) -> None:
        """Does nothing."""


class CudaProgram:
    """The kernels `instances` of `source`: functions, or template instances as C++ writes them.

    Each is compiled and loaded when it is first asked for on a device, other instances of the same templates
    too. Where some are no templates, all `instances` are compiled with the first, as the compiler omits none
    of these.
    is_slow: whether the compiler takes long for some of them.
    """

    def __init__(self, source: Path, instances: Sequence[str], *, is_slow: bool = False) -> None:
        self.source, self.is_slow = source, is_slow
        self.instances = tuple(instances)
        self._names = {_function(instance) for instance in instances}
        self._is_whole = any(instance in self._names for instance in instances)
        self._kernels: dict[str, Kernel] = {}
        self._elsewhere: dict[tuple[int, str], Kernel] = {}  # by device, without the first
        self._lock = threading.Lock()
        self._pending: dict[str, Pending] = {}  # by instance, until they are loaded

    def kernel(self, instance: str) -> Kernel:
        """KeyError for one of a function that was not listed; CompileError, DeviceError, OutOfMemoryError."""
        if (device := calls.device_index()) != calls.DEVICE:
            return self._on(device, instance)
        kernel = self._kernels.get(instance)
        if kernel is None or _noted.get() is not None:
            if _function(instance) not in self._names:
                raise KeyError(f"{self.source.name} lists no instance {instance}")
            if (noted := _noted.get()) is not None:
                noted.add((self, instance))
                return NotedKernel()
            kernel = self._awaited(instance)
        return kernel

    def _on(self, device: int, instance: str) -> Kernel:
        """A kernel of a further device, which is current. Loads it there if it is the first to ask."""
        with self._lock:
            if (device, instance) not in self._elsewhere:
                together = self._with(instance)
                codes = compile_together(self.source, together, _architecture())
                loaded = _loaded(together, codes)
                self._elsewhere |= {(device, name): kernel for name, kernel in loaded.items()}
            return self._elsewhere[device, instance]

    def _with(self, instance: str) -> tuple[str, ...]:
        """What is compiled with a kernel."""
        return self.instances if self._is_whole and instance in self.instances else (instance,)

    def pending(self, instance: str) -> "Pending | None":
        """What is to be loaded for a kernel; None if it is there, or somebody else is to load it."""
        together = self._with(instance)
        with self._lock:
            if instance in self._kernels or instance in self._pending:
                return None
            pending = Pending(self, together)
            self._pending |= dict.fromkeys(together, pending)
            return pending

    def put(self, kernels: "dict[str, Kernel]") -> None:
        """Adds kernels that have been loaded."""
        with self._lock:
            self._kernels |= kernels

    def forget(self, pending: "Pending") -> None:
        """Nobody loads these kernels any more."""
        with self._lock:
            for instance in pending.instances:
                if self._pending.get(instance) is pending:
                    del self._pending[instance]

    def _awaited(self, instance: str) -> Kernel:
        """A kernel that is not there yet: loaded here, unless another thread is to load it."""
        assert not calls.is_capturing(), f"{instance} is launched before it is captured, and loaded by then"
        while instance not in self._kernels:
            if (mine := self.pending(instance)) is not None:
                mine.load()
                mine.future.result()
            elif (other := self._pending.get(instance)) is not None:
                with suppress(CancelledError):  # given up: this thread may load it
                    other.future.result()
        return self._kernels[instance]


@dataclass(frozen=True)
class Pending:
    """Kernels of one module that somebody is to load. future: done when they are there, or given up."""

    program: CudaProgram
    instances: tuple[str, ...]
    future: "Future[None]" = field(default_factory=Future)

    def load_kept(self) -> bool:
        """Loads them if they were compiled before; False: they were not. Errors are those of the future."""
        try:
            codes = kept_together(self.program.source, self.instances, _architecture())
        except Exception:  # compiling meets it again, and tells who waits
            return False
        if codes is not None:
            self._begin(lambda: codes)
        return codes is not None

    def load(self) -> None:
        """Compiles and loads them. Errors are those of the future."""
        self._begin(lambda: compile_together(self.program.source, self.instances, _architecture()))

    def give_up(self) -> None:
        """Leaves them to who asks for one, unless somebody has begun."""
        if self.future.cancel():
            self.program.forget(self)

    def _begin(self, codes: "Callable[[], Sequence[MachineCode]]") -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.program.put(_loaded(self.instances, codes()))
        except BaseException as error:
            self.program.forget(self)
            self.future.set_exception(error)
        else:
            self.program.forget(self)
            self.future.set_result(None)


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


def _loaded(instances: Sequence[str], codes: "Sequence[MachineCode]") -> dict[str, Kernel]:
    """Kernels of one cubin in one module, by their instances."""
    calls.attach()
    module = calls.checked(driver.cuModuleLoadData(codes[0].cubin))
    return {instance: Kernel(module, code.symbol) for instance, code in zip(instances, codes, strict=True)}


def _function(instance: str) -> str:
    return instance.partition("<")[0]


def _architecture() -> str:
    """The compiler's name of the current device's."""
    return architecture_of(calls.capability())


_SCALARS: dict[type[Any], type[Any]] = {int: ctypes.c_int32, bool: ctypes.c_int32, float: ctypes.c_float}


def _as_c(arg: Argument) -> Any:
    if (scalar := _SCALARS.get(type(arg))) is not None:
        return scalar(arg)
    if isinstance(arg, ctypes.Structure):
        return arg
    return ctypes.c_void_p(0 if arg is None else arg.data_ptr())  # type: ignore[union-attr]
