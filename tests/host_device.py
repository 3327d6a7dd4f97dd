"""The GPU's kernels on the host: real launchers, real kernels compiled for it, threads that alternate.

A launch ends before it returns, and fails if its threads wait forever. `host/grid.cpp` emulates barriers;
instructions without an emulation need a GPU (`host/cuda/instructions.cuh`).
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from coldstream.kernels.cuda import compiler, limits, program
from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray
from coldstream.kernels.cuda.compiler import KERNELS
from coldstream.kernels.cuda.features import TURING, Features
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda.program import Argument, CudaProgram, Grid
from device_arrays import SharedArray
from host_driver import CAPABILITY, HostDriver

HOST = Path(__file__).with_name("host")
OPTIONS = (
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"),
    *(f"-I{HOST}", f"-I{KERNELS}"),  # in this order: the host's cuda/instructions.cuh goes first
)
HEADERS = [*sorted(HOST.glob("*.h")), *sorted(HOST.glob("cuda/*.cuh"))]
# It needs a third of the time of the usual linker, which takes as long as compiling most kernels does.
LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
HOPPER_KIB = 227  # shared memory of a block on Hopper
MOST_AT_ONCE = 8  # instances that are compiled together; beyond, only launched ones are compiled
# Of these files, those for one type of weights: tests launch most of them, and parsing takes longer than one.
BY_TYPE = {"skinny.cu", "parts.cu", "grouped.cu", "gemv.cu"}
# Of kernels of the form that racecheck can follow, see gemm_copies.cuh; for the GPU's compiler as well.
EVERY_LANE_ARRIVES = "-DCOLDSTREAM_EVERY_LANE_ARRIVES"
LIMITS = DeviceLimits(num_processors=3, shared_per_block=99 << 10, shared_per_processor=100 << 10)
FEATURES = Features.of(CAPABILITY)
TURING_LIMITS = DeviceLimits(3, 64 << 10, 64 << 10, reserved_per_block=0)


def turing_device(directory: Path) -> "HostDevice":
    """One without what came with Ampere, and with its shared memory."""
    return HostDevice(directory, limits=TURING_LIMITS, features=Features.of(TURING))


def generated_headers(directory: Path) -> str:
    """An option of the compiler that finds the headers which are no files, after writing them."""
    for name, text in compiler.generated_headers().items():
        part = directory / f"{name}.{os.getpid()}-{threading.get_ident()}"
        part.write_text(text)
        part.rename(directory / name)
    return f"-I{directory}"


class HostMemory(Memory):
    """Arrays in the host's memory, each with its own; persistent ones keep all of that kind."""

    _array = SharedArray

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[np.ndarray] = []

    def persistent(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        array: Any = super().persistent(shape, dtype)
        return replace(array, owner=self)

    def _persistent_at(self, start: int, num_bytes: int) -> int:
        address, memory = _aligned_memory(num_bytes)
        self._kept.append(memory)
        return address

    def _workspace_at(self, part: Any) -> int:
        address, part.memory = _aligned_memory(part.num_bytes)
        return address


def _aligned_memory(num_bytes: int) -> tuple[int, np.ndarray]:
    """An address in memory that makes NaN of floats."""
    memory = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
    return memory.ctypes.data + -memory.ctypes.data % ALIGNMENT, memory


class HostDevice:
    """Kernels are compiled into `directory` when they are first launched, by content.

    defined: further options of the compiler. limits, features: of the device.
    """

    def __init__(
        self,
        directory: Path,
        defined: Sequence[str] = (),
        *,
        limits: DeviceLimits = LIMITS,
        features: Features = FEATURES,
    ) -> None:
        self.directory, self.limits = directory, limits
        self._defined = (*defined, *features.options)
        self._libraries: dict[tuple[Path, tuple[str, ...]], ctypes.CDLL] = {}
        self.driver = HostDriver()  # while installed
        self.launches = 0  # each has its own order of threads
        self.before_launch: Callable[[], None] | None = None
        self.keeps_time = False  # whether the clock is the host's; otherwise each read advances it by 1 ms

    @contextmanager
    def installed(self) -> Iterator["HostDevice"]:
        """A context in which every `CudaProgram` is launched here, with the device's limits."""
        with HostDriver().installed() as self.driver, pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "_limits_of", lambda index: self.limits)
            patch.setattr(CudaProgram, "kernel", lambda own, instance: HostKernel(self, own, instance))
            yield self

    def library(self, source: Path, kernels: Sequence[str]) -> ctypes.CDLL:
        """The kernels of a file, in this order."""
        key = source, tuple(kernels)
        if key not in self._libraries:
            instances = ", ".join(f"&run_thread_of<&{name}>" for name in kernels)
            options = [
                *self._defined,
                f'-DSOURCE="{source}"',
                f"-DKERNELS={instances}",
                "-shared",
                HOST / "kernels.cpp",
            ]
            options += LINKER
            options += [f"-DSHARED_KIB={self._shared_kib(source)}"]
            sources = [HOST / "kernels.cpp", *sorted(compiler._closure(source))]
            grid = HOST / "grid.cpp"
            grid = self._compiled("grid.o", [grid], ["-O2", "-U_FORTIFY_SOURCE", "-c", grid])
            library = ctypes.CDLL(str(self._compiled(f"{source.stem}.so", sources, [*options, grid])))
            library.launch.restype = ctypes.c_char_p
            self._libraries[key] = library
        return self._libraries[key]

    def _shared_kib(self, source: Path) -> int:
        """What a block may take: of some kernels tests launch what is for Hopper."""
        has_more = "warpgroups" in source.stem or source.stem in ("merge", "gemm", "token")
        return HOPPER_KIB if has_more and self.limits is LIMITS else self.limits.shared_per_block >> 10

    def _compiled(self, name: str, sources: Sequence[Path], options: Sequence[str | Path]) -> Path:
        """A file that depends on these sources and options."""
        digest = hashlib.sha256(repr((OPTIONS, options)).encode())
        for path in (*sources, *HEADERS):
            digest.update(path.read_bytes())
        file = self.directory / f"{digest.hexdigest()[:16]}-{name}"
        if file.exists():
            return file
        with FileLock(file.with_suffix(".lock")):  # another process of this run may be compiling it
            if not file.exists():
                part = file.with_suffix(".part")
                # Hidden, so that libraries do not share variables of inline functions.
                headers = generated_headers(self.directory)
                command = ["c++", *OPTIONS, headers, "-fvisibility=hidden", *options, "-o", part]
                subprocess.run(command, check=True)
                part.rename(file)
        return file


def compiled_with(instance: str, program: CudaProgram) -> tuple[str, ...]:
    """The kernels of a program's library that has `instance`."""
    if instance not in program.instances:
        return (instance,)
    if len(program.instances) <= MOST_AT_ONCE:
        return program.instances
    if program.source.name not in BY_TYPE:
        return (instance,)
    own = type_of(instance)
    return tuple(other for other in program.instances if type_of(other) == own)


def type_of(instance: str) -> str:
    """The first argument of its template."""
    return instance.partition("<")[2].rstrip(">").partition(",")[0]


class HostKernel:
    """One kernel of a program."""

    def __init__(self, device: HostDevice, own: CudaProgram, instance: str) -> None:
        self._device, self._name = device, instance
        kernels = compiled_with(instance, own)
        self._library = device.library(own.source, kernels)
        self._index = kernels.index(instance)

    def launch(
        self,
        grid: Grid,
        block: int,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        """As `Kernel.launch`, without clusters. AssertionError for errors of threads."""
        if 0 in grid:
            return
        values = [program._as_c(arg) for arg in args]
        self._device.driver.queue(partial(self._run, grid, block, values, shared_bytes, together))

    def _run(self, grid: Grid, block: int, values: Sequence[Any], shared_bytes: int, together: bool) -> None:
        device = self._device
        if device.before_launch is not None:
            device.before_launch()
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        device.launches += 1
        order, size = ctypes.c_uint64(device.launches), (ctypes.c_uint * 3)(*grid)
        ways = ctypes.c_bool(device.keeps_time), ctypes.c_bool(together)
        failure = self._library.launch(self._index, pointers, size, block, shared_bytes, order, *ways)
        assert failure is None, f"{self._name}: {failure.decode()}"
