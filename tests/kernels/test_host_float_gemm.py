"""GEMM of float weights: the GPU's kernels on the host against the exact reference, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from quant_cases import same_numbers
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.linear import cuda_float_gemm
from coldstream.kernels.linear.cuda_float_gemm import (
    LARGE,
    NAMES,
    PROGRAM,
    SMALL,
    TILINGS,
    FloatTiling,
    choose_tiling,
    float_linear_gemm,
    launch_float_gemm,
)
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from host_device import LIMITS

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")
EVERY_TYPE = pytest.mark.parametrize("quant_type", NAMES, ids=lambda t: t.name)
EVERY_TILING = pytest.mark.parametrize("tiling", TILINGS, ids=["large", "small"])


def check(x: torch.Tensor, weight: QuantTensor, tiling: FloatTiling, *, gap: int = 0) -> None:
    out = Guarded(len(x), weight.shape[0], device=CPU, gap=gap)
    launch_float_gemm(PROGRAM, tiling, x, on_gpu(weight, device="cpu"), out.tensor, is_aligned=True)
    assert_same(out.checked(), linear_exact(x, weight))


@EVERY_TYPE
@EVERY_TILING
@pytest.mark.parametrize("num_values", [16, 64, 136, 200])
def test_stages(tiling: FloatTiling, quant_type: QuantType, num_values: int) -> None:
    """A part of one, whole ones, and parts after those."""
    check(activations(3, 35, num_values), random_weight(quant_type, (70, num_values), 5), tiling)


@EVERY_TILING
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (16, 64), (33, 31), (600, 5)])
def test_parts_of_tiles(tiling: FloatTiling, num_tokens: int, num_rows: int) -> None:
    """Also more tokens than tiles that are next to each other have."""
    check(activations(4, num_tokens, 40), random_weight(QuantType.BF16, (num_rows, 40), 5), tiling, gap=3)


@pytest.mark.sharded(9)
@EVERY_TYPE
@pytest.mark.parametrize("num_values", [1, 15, 17, 77, 130])
def test_rows_that_begin_anywhere(quant_type: QuantType, num_values: int) -> None:
    x, weight = activations(5, 20, num_values), random_weight(quant_type, (40, num_values), 5)
    out = Guarded(20, 40, device=CPU, gap=1)
    float_linear_gemm(x, on_gpu(weight, device="cpu"), out.tensor)
    assert_same(out.checked(), linear_exact(x, weight))


@EVERY_TILING
def test_negative_zeros_and_numbers_that_are_not(tiling: FloatTiling) -> None:
    x = activations(2, 20, 72)
    x[0] = -1e-30
    x[1, 3] = torch.nan
    x[2, 71] = torch.inf
    weight = random_weight(QuantType.F32, (24, 72), 7)
    values = weight.blocks.view(torch.float32)
    values[0] = 1e-30
    values[1] = 0.0
    out, expected = Guarded(20, 24, device=CPU), linear_exact(x, weight)
    launch_float_gemm(PROGRAM, tiling, x, on_gpu(weight, device="cpu"), out.tensor, is_aligned=True)
    assert torch.signbit(expected[0, 0])
    assert same_numbers(out.checked(), expected)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "fastest"),
    [
        (64, 2048, SMALL),
        (512, 2048, LARGE),
        (2048, 2048, LARGE),
        (64, 8192, LARGE),
        (512, 8192, LARGE),
        (2048, 8192, LARGE),
    ],
)
def test_the_tiles_that_were_fastest_on_an_h200(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_rows: int, fastest: FloatTiling
) -> None:
    monkeypatch.setattr(cuda_float_gemm, "device_limits", lambda: DeviceLimits(132, 227 << 10, 228 << 10))
    assert choose_tiling(num_tokens, num_rows) is fastest


def test_small_tiles_where_large_ones_leave_multiprocessors_without_work() -> None:
    most = LIMITS.num_processors * LARGE.tile_rows
    assert choose_tiling(LARGE.tile_tokens, most) is LARGE
    assert choose_tiling(LARGE.tile_tokens, most // 2) is SMALL
    assert choose_tiling(10, 10) is SMALL
