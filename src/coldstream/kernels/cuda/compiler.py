"""From a .cu file to machine code, by NVRTC; needs no GPU.

Sources may include each other by their path below `kernels/`, and headers that are made of Python's tables
(`grid_tables.py`, `type_numbers.py`). They include nothing else: NVRTC ships no headers.
Machine code is kept in the user's cache directory under a hash of everything that it depends on; see
`kept_files.py` for what is checked there.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from coldstream.gguf import quant_types
from coldstream.kept_files import MACHINE_CODE, KeptFiles, directory_of
from coldstream.kernels.cuda import grid_tables, type_numbers
from coldstream.kernels.cuda.features import features_for
from coldstream.kernels.dequantize import grids

KERNELS = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(rb'^#include [<"]([^>"]+)', re.MULTILINE)
# What the text of a generated header is made from.
SOURCES_OF_GENERATED = {
    grid_tables.HEADER: (Path(grid_tables.__file__), Path(grids.__file__)),
    type_numbers.HEADER: (Path(type_numbers.__file__), Path(quant_types.__file__)),
}

# Every float operation rounds by itself, as in docs/arithmetic.md.
OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "-default-device",
)


@dataclass(frozen=True)
class MachineCode:
    """A cubin and the name that the compiler gave the kernel in it."""

    cubin: bytes
    symbol: str


class CompileError(RuntimeError):
    """A kernel of this package does not compile: a defect of the package, or of the CUDA installation."""


@cache
def default_cache() -> KeptFiles:
    """This process's cache of machine code, which also records problems with it."""
    return KeptFiles(MACHINE_CODE, directory_of(MACHINE_CODE))


def compile_instance(source: Path, instance: str, arch: str, directory: Path | None = None) -> MachineCode:
    """The template instance or function `instance` of `source` for `arch`, for example sm_90.

    As `compile_together`.
    """
    (code,) = compile_together(source, (instance,), arch, directory)
    return code


def compile_together(
    source: Path, instances: Sequence[str], arch: str, directory: Path | None = None
) -> tuple[MachineCode, ...]:
    """Template instances and functions of `source` for `arch`, in one cubin, which all results share.

    From the cache in `directory` (None: the default one) if they were compiled before. A cache that cannot be
    used is no error. Raises CompileError with the compiler's log.
    """
    if (kept := kept_together(source, instances, arch, directory)) is not None:
        return kept
    codes = compile_uncached(source, instances, arch)
    payload = " ".join(code.symbol for code in codes).encode() + b"\n" + codes[0].cubin
    _cache(directory).put(_entry(source, instances, arch), payload)
    return codes


def kept_together(
    source: Path, instances: Sequence[str], arch: str, directory: Path | None = None
) -> tuple[MachineCode, ...] | None:
    """What `compile_together` finds in the cache; None if it would compile. CompileError without NVRTC."""
    payload = _cache(directory).get(_entry(source, instances, arch))
    if payload is None:
        return None
    symbols, _, cubin = payload.partition(b"\n")
    return tuple(MachineCode(cubin, symbol) for symbol in symbols.decode().split(" "))


def _cache(directory: Path | None) -> KeptFiles:
    return default_cache() if directory is None else KeptFiles(MACHINE_CODE, directory)


def _entry(source: Path, instances: Sequence[str], arch: str) -> str:
    """The name of an entry of the cache."""
    return f"{source.stem}-{_key(source, instances, arch)}.cubin"


def _key(source: Path, instances: Sequence[str], arch: str) -> str:
    _, *version = nvrtc.nvrtcVersion()  # major and minor
    digest = hashlib.sha256(repr((*instances, arch, _options(arch), version)).encode())
    for path in sorted(_closure(source)):
        digest.update(_contents(path, path.stat().st_mtime_ns)[0])
    return digest.hexdigest()[:32]


def _options(arch: str) -> tuple[str, ...]:
    return (*OPTIONS, *features_for(arch).options)


def _closure(source: Path) -> set[Path]:
    """`source` and everything it includes; of a generated header the files that it is made from."""
    found, new = set(), [source]
    while new:
        path = new.pop()
        if path not in found:
            found.add(path)
            for name in _contents(path, path.stat().st_mtime_ns)[1]:
                new += SOURCES_OF_GENERATED.get(name, (KERNELS / name,))
    return found


@cache
def _contents(path: Path, changed_ns: int) -> tuple[bytes, tuple[str, ...]]:
    """The bytes of a file as it was at that time, and what it includes."""
    text = path.read_bytes()
    return text, tuple(map(bytes.decode, INCLUDE.findall(text)))


@cache
def generated_headers() -> Mapping[str, str]:
    """The text of each header that is no file, by the name that sources include it with."""
    return {
        grid_tables.HEADER: grid_tables.grids_header(),
        type_numbers.HEADER: type_numbers.types_header(),
    }


def compile_uncached(source: Path, instances: Sequence[str], arch: str) -> tuple[MachineCode, ...]:
    """As `compile_together`, without a cache."""
    headers = generated_headers()
    texts, names = ([part.encode() for part in parts] for parts in (headers.values(), headers.keys()))
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(texts), texts, names)
    )
    try:
        for instance in instances:
            _checked(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
        options = [*_options(arch), f"--gpu-architecture={arch}", f"--include-path={KERNELS}"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source.name}, {', '.join(instances)}, {arch}:\n{_log(program)}")
        symbols = [
            _checked(nvrtc.nvrtcGetLoweredName(program, instance.encode())).decode() for instance in instances
        ]
        cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return tuple(MachineCode(cubin, symbol) for symbol in symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: Any) -> str:
    log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode(errors="replace")


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if values else None
