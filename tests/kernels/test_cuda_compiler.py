"""Compiling CUDA C++ at run time, which needs no GPU."""

from pathlib import Path

import pytest

from coldstream.kernels.cuda.compiler import CompileError, compile_instance

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
    assert compile_instance(source, "add<3>", "sm_90", tmp_path).cubin != plain.cubin
