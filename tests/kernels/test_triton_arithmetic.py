"""The device functions of the Triton tier equal the exact reference, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from guarded import DEVICE, Guarded
from triton_interpreter import assert_same_bits

from coldstream.kernels.arithmetic import reference
from coldstream.kernels.arithmetic import triton as arithmetic
from coldstream.kernels.arithmetic.reference import quantize_activations

SMALL = (0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 2.0**-100, 0.34657359)
LARGE = (3.4028235e38, -3.4028235e38, torch.inf, -torch.inf, -87.33655, -87.33654, 88.37626, 88.4)
EXTREMES = (*SMALL, *LARGE, torch.nan)


@triton.jit
def unary_kernel(x, y, out, NAME: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    if NAME == "exp":
        value = arithmetic.exp(value)
    elif NAME == "silu":
        value = arithmetic.silu(value)
    elif NAME == "sigmoid":
        value = arithmetic.sigmoid(value)
    elif NAME == "inverse_sqrt":
        value = arithmetic.inverse_sqrt(value)
    else:
        value = arithmetic.swiglu(value, tl.load(y + at))
    tl.store(out + at, value)


@triton.jit
def sum_kernel(x, out, ROWS: tl.constexpr, LANES: tl.constexpr):
    rows = tl.arange(0, ROWS)
    lanes = tl.load(x + rows[:, None] * LANES + tl.arange(0, LANES)[None, :])
    total = arithmetic.sum_of_eight(lanes) if LANES == 8 else arithmetic.sum_of_sixteen(lanes)
    tl.store(out + rows, total)


@triton.jit
def quantize_kernel(x, q, scales, sums, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    values = tl.load(x + rows[:, None] * 256 + tl.arange(0, 256)[None, :])
    codes, scale, sum16 = arithmetic.quantize_groups(values)
    tl.store(q + rows[:, None] * 256 + tl.arange(0, 256)[None, :], codes)
    tl.store(scales + rows, scale)
    tl.store(sums + rows[:, None] * 16 + tl.arange(0, 16)[None, :], sum16)


def floats(count: int) -> torch.Tensor:
    """Values of every magnitude, the extremes first."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 3, (count,), generator=generator)
    x[: len(EXTREMES)] = torch.tensor(EXTREMES)
    return x


@pytest.mark.parametrize("name", ["exp", "silu", "sigmoid", "inverse_sqrt", "swiglu"])
def test_functions_of_one_value(name: str) -> None:
    x, y = floats(1 << 15), floats(1 << 15).flip(0)
    if name == "inverse_sqrt":
        x = x.abs()
    expected = reference.silu(x) * y if name == "swiglu" else getattr(reference, name)(x)
    out = Guarded(len(x))
    unary_kernel[(8,)](
        x.to(DEVICE), y.to(DEVICE), out.tensor, NAME=name, SIZE=len(x) // 8, enable_fp_fusion=False
    )
    assert_same_bits(out.checked(), expected)


@pytest.mark.parametrize("lanes", [8, 16])
def test_sums_of_lanes(lanes: int) -> None:
    x = torch.randn(64, lanes, generator=torch.Generator().manual_seed(lanes)) * 1000
    expected = reference.sum_of_eight(x) if lanes == 8 else reference.sum_of_sixteen(x)
    assert not torch.equal(expected, x.sum(dim=1)), "the order must matter"
    out = Guarded(64)
    sum_kernel[(1,)](x.to(DEVICE), out.tensor, ROWS=64, LANES=lanes, enable_fp_fusion=False)
    assert_same_bits(out.checked(), expected)


def test_quantized_groups() -> None:
    x = floats(16 * 256).reshape(16, 256)
    x[1:4] = x[1:4].round(decimals=1)
    x[4], x[5], x[6] = 0.0, 2.0**-101, 3.4e38
    x[7], x[8, 100], x[9, 7] = 1e-41, torch.nan, -torch.inf
    x[10] = torch.arange(256) - 127.5  # ties
    expected = quantize_activations(x)
    q = Guarded(16, 256, dtype=torch.int8)
    scales, sums = Guarded(16, 1), Guarded(16, 16, dtype=torch.int16)
    quantize_kernel[(1,)](x.to(DEVICE), q.tensor, scales.tensor, sums.tensor, ROWS=16, enable_fp_fusion=False)
    assert_same_bits(q.checked(), expected.q)
    assert_same_bits(scales.checked(), expected.scales)
    assert_same_bits(sums.checked(), expected.sums)
