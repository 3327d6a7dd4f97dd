"""GEMM of float weights on a GPU: the very bits of the exact reference."""

from pathlib import Path

import pytest
import torch
from cuda_gemm_cases import device_weight
from guarded import Guarded
from quant_cases import same_numbers
from random_blocks import activations, random_weight

from bench.kernels.machine_code import stack_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.linear.cuda_float_gemm import NAMES, PROGRAM, float_linear_gemm
from coldstream.kernels.linear.reference import linear_exact

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)
TYPES = tuple(NAMES)


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    for instance in PROGRAM.instances:
        assert stack_bytes(compile_instance(PROGRAM.source, instance, arch, tmp_path)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_tokens"), [(size, 37) for size in SIZES] + [(33, t) for t in SIZES]
)
def test_every_shape(quant_type: QuantType, num_rows: int, num_tokens: int) -> None:
    x = activations(num_tokens, num_tokens, 100)
    weight = random_weight(quant_type, (num_rows, 100), 5)
    out = Guarded(num_tokens, num_rows, gap=3)
    float_linear_gemm(x.cuda(), device_weight(weight), out.tensor)
    assert same_numbers(out.checked(), linear_exact(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [30, 2200])
@pytest.mark.parametrize("num_values", SIZES)
def test_every_depth(num_values: int, num_tokens: int) -> None:
    """With small tiles and large ones: few tokens, and enough tiles for every multiprocessor."""
    x = activations(num_values, num_tokens, max(num_values, 64))[:, :num_values]
    weight = random_weight(QuantType.F32, (150, num_values), 5)
    out = Guarded(num_tokens, 150)
    float_linear_gemm(x.cuda(), device_weight(weight, 4 if num_values % 2 else 0), out.tensor)
    chosen = torch.arange(0, num_tokens, 9)
    assert same_numbers(out.checked()[chosen], linear_exact(x[chosen], weight))


@pytest.mark.gpu
def test_negative_zeros_and_numbers_that_are_not() -> None:
    x = activations(2, 20, 40)
    x[0] = -1e-30
    x[1, 3] = torch.nan
    x[2, 39] = torch.inf
    weight = random_weight(QuantType.F32, (24, 40), 7)
    values = weight.blocks.view(torch.float32)
    values[0] = 1e-30
    values[1] = 0.0
    out = Guarded(20, 24)
    float_linear_gemm(x.cuda(), device_weight(weight), out.tensor)
    expected = linear_exact(x, weight)
    assert torch.signbit(expected[0, 0])
    assert same_numbers(out.checked(), expected)
