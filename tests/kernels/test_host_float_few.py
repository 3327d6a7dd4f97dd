"""Products of float weights with 9 to 64 rows: the GPU's kernel on the host against the exact reference."""

from collections.abc import Sequence

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.linear.cuda_float_few import fits_float_few, float_linear_few
from coldstream.kernels.linear.cuda_float_many import NAMES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")


def strided(x: torch.Tensor, gap: int = 12) -> torch.Tensor:
    """Rows of x with NaN between them, on 16 bytes."""
    wide = torch.full((len(x), x.shape[1] + gap), torch.nan)
    wide[:, :-gap] = x
    return wide[:, :-gap]


def check(x: torch.Tensor, weights: Sequence[QuantTensor]) -> None:
    placed = [on_gpu(weight, device="cpu") for weight in weights]
    outs = [Guarded(len(x), weight.shape[0], device=CPU, gap=3) for weight in weights]
    float_linear_few(strided(x), placed, [out.tensor for out in outs])
    for out, weight in zip(outs, weights, strict=True):
        assert_same(out.checked(), linear_exact(x, weight))


@pytest.mark.parametrize("quant_type", NAMES)
@pytest.mark.parametrize("cols", [8, 120, 128, 384, 520])
def test_depths_around_the_borders_of_stages(quant_type: QuantType, cols: int) -> None:
    check(activations(cols, 11, cols), [random_weight(quant_type, (19, cols), seed=cols)])


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 33, 64])
def test_several_matrices_in_one_launch(rows: int) -> None:
    weights = [random_weight(QuantType.F32, (count, 264), seed=count) for count in (1, 16, 37, 2)]
    check(activations(rows, rows, 264), weights)


def test_sums_that_are_negative_zero_and_values_that_are_not_finite() -> None:
    x = activations(2, 20, 40)
    x[0] = -1e-30
    x[1, 3] = torch.nan
    x[2, 39] = torch.inf
    weight = random_weight(QuantType.F32, (24, 40), 7)
    values = weight.blocks.view(torch.float32)
    values[0] = 1e-30
    values[1] = 0.0
    out = Guarded(20, 24, device=CPU)
    float_linear_few(x, [on_gpu(weight, device="cpu")], [out.tensor])
    assert torch.signbit(out.checked()[0, 0])
    check(x, [weight])


def test_rows_that_begin_anywhere_are_another_kernels() -> None:
    weight, x = on_gpu(random_weight(QuantType.F16, (5, 64), 1), device="cpu"), torch.zeros(9, 64)
    other = on_gpu(random_weight(QuantType.F32, (5, 64), 1), device="cpu")
    assert fits_float_few(x, [weight])
    assert not fits_float_few(torch.zeros(9, 66)[:, :64], [weight]), "rows of x"
    assert not fits_float_few(torch.zeros(9, 65)[:, 1:], [weight]), "the first row of x"
    assert not fits_float_few(x, [on_gpu(random_weight(QuantType.F16, (5, 64), 1), 2, "cpu")])
    assert not fits_float_few(torch.zeros(9, 36), [random_weight(QuantType.F16, (5, 36), 1)]), "cols"
    assert not fits_float_few(x, [weight, other]), "two types"
    with pytest.raises(ValueError, match="not one launch of aligned rows"):
        float_linear_few(x, [weight, other], [torch.zeros(9, 5), torch.zeros(9, 5)])
    with pytest.raises(ValueError, match="do not fit"):
        float_linear_few(x, [weight], [torch.zeros(9, 6)])
