"""The exact product against scalar loops that follow docs/arithmetic.md line by line, and against float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_blocks import random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import fma, quantize_activations
from coldstream.kernels.dequantize.integer_blocks import IntegerBlocks
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES, dequantize, unpack
from coldstream.kernels.linear.integer_types import INTEGER_TYPES, activation_scale_size
from coldstream.kernels.linear.reference import linear, linear_exact
from coldstream.kernels.quant_tensor import QuantTensor

F = np.float32


def scalar_fma(a: F, b: F, c: F) -> F:
    return F(fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item())


def product_by_hand(x: torch.Tensor, weight: QuantTensor) -> F:
    """One row of activations [K] times one row of weights [K]."""
    block_size = 256 if weight.quant_type.block_elements == 256 else 32
    activations = quantize_activations(x.unsqueeze(0), block_size)
    q = activations.q[0].numpy().astype(np.int64)
    blocks = unpack(weight)
    sub_blocks = blocks.scales.shape[-1]
    p = [F(0)] * 8
    for b in range(blocks.codes.shape[0]):
        inputs = q[b * block_size : (b + 1) * block_size].reshape(sub_blocks, -1)
        codes = blocks.codes[b].numpy().astype(np.int64).reshape(sub_blocks, -1)
        a = activations.scales[0, b].numpy()
        total = sum(int(blocks.scales[b, j]) * int((codes[j] * inputs[j]).sum()) for j in range(sub_blocks))
        p[b % 8] = scalar_fma(blocks.d[b].numpy() * a, F(total), p[b % 8])
        if blocks.mins is not None:
            offset = sum(int(blocks.mins[b, j]) * int(inputs[j].sum()) for j in range(sub_blocks))
            p[b % 8] = scalar_fma(-(blocks.dmin[b].numpy() * a), F(offset), p[b % 8])
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@pytest.mark.sharded(9)
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 11))
def test_integer_types_follow_the_written_order(quant_type: QuantType, seed: int, blocks: int) -> None:
    columns = blocks * quant_type.block_elements
    weight = random_weight(quant_type, (2, columns), seed)
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(seed))
    actual = linear_exact(x, weight)
    assert actual.dtype == torch.float32
    for t in range(2):
        for n in range(2):
            assert actual[t, n].item() == product_by_hand(x[t], weight[n])


@pytest.mark.parametrize("quant_type", sorted(FLOAT_DTYPES), ids=lambda t: t.name)
def test_float_types_are_close_to_float64(quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (5, 512), seed=int(quant_type))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(7))
    values = dequantize(weight).double()
    scale = x.double().norm(dim=-1, keepdim=True) * values.norm(dim=-1)
    error = (linear_exact(x, weight).double() - linear(x.double(), values)).abs()
    assert (error <= 1e-6 * scale).all()


def rounding_bound(x: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """The most that a product may differ from that of floats: float64 [T, N].

    Rounding moves an activation by at most half a step, which is the largest of its group / 127. The float32
    operations add a share of the magnitudes that they meet: those of codes and of minimums apart.
    """
    blocks = unpack(weight)
    size = blocks.codes.shape[-1]
    steps = x.double().abs().unflatten(-1, (-1, size)).amax(dim=-1) / 127  # [T, B]
    by_block = dequantize(weight).double().abs().unflatten(-1, (-1, size)).sum(dim=-1)  # [N, B]
    parts = [replace(blocks, dmin=None, mins=None)]
    if blocks.dmin is not None and blocks.mins is not None:
        ones = torch.ones_like(blocks.codes)
        parts.append(IntegerBlocks(ones, blocks.dmin, blocks.mins))
    magnitude = sum(linear(x.double().abs(), part.values().double().abs()) for part in parts)
    return linear(steps, by_block) / 2 + 2.0**-20 * magnitude


@pytest.mark.sharded(9)
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(2, 4))
def test_an_integer_product_differs_by_the_rounding_of_its_activations(
    quant_type: QuantType, seed: int, groups: int
) -> None:
    """A great input, alone in its group, takes no precision from the other groups."""
    columns, size = groups * 256, activation_scale_size(quant_type)
    weight = random_weight(quant_type, (4, columns), seed)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(seed))
    first = seed % columns // size * size
    x[:, first : first + size] = 0
    x[:, seed % columns] = 1000
    expected = linear(x.double(), dequantize(weight).double())
    error = (linear_exact(x, weight).double() - expected).abs()
    assert (error <= rounding_bound(x, weight)).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    "quant_type", [QuantType.Q4_K, QuantType.Q8_0, QuantType.F16, QuantType.IQ4_NL], ids=lambda t: t.name
)
def test_rows_do_not_depend_on_each_other(quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (7, 768), seed=3)
    x = torch.randn(9, 768, generator=torch.Generator().manual_seed(3))
    together = linear_exact(x, weight)
    for t in range(9):
        assert torch.equal(linear_exact(x[t : t + 1], weight)[0], together[t])


@pytest.mark.parametrize("quant_type", [QuantType.Q5_K, QuantType.Q4_0, QuantType.F32], ids=lambda t: t.name)
def test_trap_48_no_rows_give_an_empty_result(quant_type: QuantType) -> None:
    weight = random_weight(quant_type, (3, 256), seed=1)
    assert linear_exact(torch.empty(0, 256), weight).shape == (0, 3)


def test_a_row_with_nan_spoils_only_itself() -> None:
    weight = random_weight(QuantType.Q6_K, (3, 512), seed=2)
    x = torch.ones(2, 512)
    x[1, 400] = torch.nan
    result = linear_exact(x, weight)
    assert result[0].isfinite().all()
    assert result[1].isnan().all()
