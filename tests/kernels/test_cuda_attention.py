"""The kernels of attention compile where there is no GPU; test_host_integers.py compares their bits."""

from pathlib import Path

import pytest

from coldstream.errors import UnsupportedError
from coldstream.kernels.attention.arguments import AttentionShape
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import IntegerKernels
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.limits import DeviceLimits

H200 = DeviceLimits(132, 227 * 1024, 228 * 1024)
SMALL = DeviceLimits(84, 99 * 1024, 100 * 1024)


@pytest.mark.parametrize(("head_dim", "cache_name"), [(40, "f32"), (48, "i16"), (288, "i8"), (64, "i4")])
def test_what_no_kernel_takes_is_refused(head_dim: int, cache_name: str) -> None:
    with pytest.raises(ValueError, match=f"no kernels for heads of {head_dim} values in {cache_name}"):
        IntegerKernels(AttentionShape(4, 2, head_dim, CACHE_TYPES[cache_name]), H200)


def test_too_many_heads_on_one_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="129 heads of 64 values on one key/value head"):
        IntegerKernels(AttentionShape(129, 1, 64, CACHE_TYPES["i16"]), H200)


@pytest.mark.parametrize(
    ("head_dim", "cache_name", "device", "arch"), [(256, "i16", H200, "sm_90"), (96, "i8", SMALL, "sm_80")]
)
def test_kernels_compile_without_a_gpu(
    head_dim: int, cache_name: str, device: DeviceLimits, arch: str, tmp_path: Path
) -> None:
    kernels = IntegerKernels(AttentionShape(16, 2, head_dim, CACHE_TYPES[cache_name]), device)
    for program in kernels.programs.values():
        for instance in program.instances:
            compile_instance(program.source, instance, arch, tmp_path)
