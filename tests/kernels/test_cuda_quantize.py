"""Quantised activations from the GPU, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same
from random_blocks import activations

from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.arithmetic.reference import empty_activations, quantize_activations
from coldstream.kernels.quantize.cuda import quantize_cuda

pytestmark = pytest.mark.gpu


def quantize_on_gpu(x: torch.Tensor) -> QuantActivations:
    out = empty_activations(*x.shape, torch.device("cuda"))
    out.q.fill_(77), out.scales.fill_(torch.nan), out.sums.fill_(-777)
    quantize_cuda(x.cuda(), out)
    return out


def check(x: torch.Tensor) -> None:
    rows, cols = x.shape
    out, expected = quantize_on_gpu(x), quantize_activations(x)
    assert out.q.shape == (rows, padded_cols(cols))
    assert torch.equal(out.q[:, :cols].cpu(), expected.q)
    assert torch.equal(out.sums[:, : cols // 16].cpu(), expected.sums)
    assert not out.q[:, cols:].any()
    assert not out.sums[:, cols // 16 :].any()
    assert_same(out.scales, expected.scales)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000])
@pytest.mark.parametrize("cols", [32, 160, 256, 384, 2048, 4096])
def test_quantized_rows(rows: int, cols: int) -> None:
    check(activations(rows, rows, cols))


def test_values_of_every_magnitude() -> None:
    """Subnormal, tiny, ordinary and huge groups, and ties of the rounding."""
    exponents = torch.arange(-149, 128).float()
    x = torch.randn(277, 512, generator=torch.Generator().manual_seed(1)).clamp(-0.9, 0.9)
    check(torch.ldexp(x, exponents.unsqueeze(-1)))
    check((torch.arange(4 * 256).reshape(4, 256) % 255 - 127).float() / 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_group_with_a_bad_value_is_all_zero_and_its_scale_nan(bad: float) -> None:
    x = activations(1, 3, 768)
    x[1, 300] = bad
    check(x)


def test_rows_of_a_wider_array() -> None:
    x = activations(2, 5, 512)
    wide = torch.full((5, 516), torch.nan)
    wide[:, :512] = x
    out = empty_activations(5, 512, torch.device("cuda"))
    quantize_cuda(wide.cuda()[:, :512], out)
    assert torch.equal(out.q.cpu(), quantize_activations(x).q)


def test_rows_that_cannot_be_quantised_are_refused() -> None:
    out = empty_activations(2, 100, torch.device("cuda"))
    with pytest.raises(ValueError, match="cannot quantise"):
        quantize_cuda(torch.zeros(2, 100, device="cuda"), out)
    with pytest.raises(ValueError, match="adjacent bytes"):
        quantize_cuda(torch.zeros(3, 256, device="cuda"), out)
