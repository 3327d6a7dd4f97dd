"""Compiling CUDA C++ at run time, which needs no GPU."""

import struct
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from coldstream.kept_files import MACHINE_CODE, KeptFiles
from coldstream.kernels.cuda.compiler import (
    CompileError,
    MachineCode,
    compile_instance,
    compile_together,
    default_cache,
)

SOURCE = """
#include "cuda/common.cuh"
template <int n>
__global__ void add(float* x) {
  coldstream::wait_for_previous_grid();
  x[threadIdx.x] += coldstream::exact_silu(float(n));
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "add.cu"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_an_instance_compiles_without_a_gpu(source: Path, tmp_path: Path, arch: str) -> None:
    code = compile_instance(source, "add<3>", arch, tmp_path / "cache")
    assert code.cubin.startswith(b"\x7fELF")
    assert code.symbol.encode() in code.cubin


def test_machine_code_is_compiled_once(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = compile_instance(source, "add<3>", "sm_90", cache)
    (entry,) = cache.iterdir()
    written = entry.stat().st_mtime_ns
    assert compile_instance(source, "add<3>", "sm_90", cache) == first
    assert entry.stat().st_mtime_ns == written
    compile_instance(source, "add<4>", "sm_90", cache)
    source.write_text(SOURCE.replace("+=", "-="))
    compile_instance(source, "add<3>", "sm_90", cache)
    assert len(list(cache.iterdir())) == 3


def test_kernels_that_are_compiled_together_share_a_cubin(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both = compile_together(source, ("add<3>", "add<4>"), "sm_90", cache)
    assert len({code.symbol for code in both}) == 2
    assert all(code.symbol.encode() in both[0].cubin for code in both)
    assert compile_together(source, ("add<3>", "add<4>"), "sm_90", cache) == both
    assert len(list(cache.iterdir())) == 1
    alone = compile_instance(source, "add<3>", "sm_90", cache)
    assert alone.symbol == both[0].symbol
    assert both[1].symbol.encode() not in alone.cubin


def test_a_damaged_entry_is_compiled_again(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = compile_instance(source, "add<3>", "sm_90", cache)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[: len(good) // 2])
    again = compile_instance(source, "add<3>", "sm_90", cache)
    assert instructions(again) == instructions(first)
    assert len(entry.read_bytes()) == len(good)
    assert compile_instance(source, "add<3>", "sm_90", cache) == again


def test_an_unsafe_directory_is_not_used(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = compile_instance(source, "add<3>", "sm_90", cache)
    (entry,) = cache.iterdir()
    KeptFiles(MACHINE_CODE, cache).put(entry.name, b"add\nplanted")
    assert compile_instance(source, "add<3>", "sm_90", cache) == MachineCode(b"planted", "add")
    cache.chmod(0o777)
    again = compile_instance(source, "add<3>", "sm_90", cache)
    assert instructions(again) == instructions(first)
    cache.chmod(0o700)
    assert KeptFiles(MACHINE_CODE, cache).get(entry.name) == b"add\nplanted"


def test_without_a_home_kernels_compile_and_it_is_said(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    default_cache.cache_clear()
    try:
        assert compile_instance(source, "add<3>", "sm_90").cubin.startswith(b"\x7fELF")
        assert "no home" in str(default_cache().problem)
    finally:
        default_cache.cache_clear()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_another_compiler_compiles_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    compile_instance(source, "add<3>", "sm_80", cache)
    status, major, minor = nvrtc.nvrtcVersion()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (status, major, minor + 1))
    compile_instance(source, "add<3>", "sm_80", cache)
    assert len(list(cache.iterdir())) == 2


def test_a_directory_that_cannot_be_written_is_no_error(source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compile_instance(source, "add<3>", "sm_90", blocked / "cache").cubin.startswith(b"\x7fELF")


def test_a_mistake_names_the_kernel_and_shows_the_log(source: Path, tmp_path: Path) -> None:
    source.write_text(SOURCE.replace("float(n)", "flaot(n)"))
    with pytest.raises(CompileError, match=r"add\.cu, add<3>, sm_90:[\s\S]*flaot"):
        compile_instance(source, "add<3>", "sm_90", tmp_path)


def test_float_operations_are_not_contracted(source: Path, tmp_path: Path) -> None:
    fused = SOURCE.replace("+= coldstream::exact_silu(float(n))", "= x[1] * x[2] + x[3]")
    source.write_text(fused)
    plain = compile_instance(source, "add<3>", "sm_90", tmp_path)
    source.write_text(fused.replace("x[1] * x[2] + x[3]", "__fmaf_rn(x[1], x[2], x[3])"))
    assert instructions(compile_instance(source, "add<3>", "sm_90", tmp_path)) != instructions(plain)
    source.write_text(fused.replace("x[1] * x[2] + x[3]", "__fadd_rn(__fmul_rn(x[1], x[2]), x[3])"))
    assert instructions(compile_instance(source, "add<3>", "sm_90", tmp_path)) == instructions(plain)


def instructions(code: MachineCode) -> bytes:
    """The kernel's parts that are equal in two compilations of the same source."""
    elf = code.cubin
    (sections,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<2I4Q", elf, sections + i * size) for i in range(count)]
    wanted = f".text.{code.symbol}\0".encode()
    for name, _, _, _, offset, num_bytes in headers:
        if elf.startswith(wanted, headers[names][4] + name):
            return elf[offset : offset + num_bytes]
    raise AssertionError(f"{code.symbol} is not there")
