"""The Triton products equal the exact reference, bit for bit, whatever the number of rows."""

import pytest
import torch
from guarded import DEVICE, Guarded
from random_blocks import activations, float16_places, random_weight
from triton_interpreter import assert_same_bits, device_activations, on_device

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES
from coldstream.kernels.linear.reference import INTEGER_TYPES, linear_exact
from coldstream.kernels.linear.triton import FEW_ROWS, linear, linear_float
from coldstream.kernels.quant_tensor import QuantTensor

INTEGER_TYPE = pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
FLOAT_TYPE = pytest.mark.parametrize("quant_type", list(FLOAT_DTYPES), ids=lambda t: t.name)
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)
HALF_BITS = (0x7E01, 0x7C00, 0xFC00, 0x0001, 0x7BFF, 0x8000)


def product(x: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """x times weight by the Triton kernels, into a guarded output."""
    out = Guarded(x.shape[0], weight.shape[0])
    if weight.quant_type in INTEGER_TYPES:
        linear(device_activations(x), on_device(weight), out.tensor)
    else:
        linear_float(x.to(DEVICE), on_device(weight), out.tensor)
    return out.checked()


def cols_of(quant_type: QuantType) -> tuple[int, ...]:
    """Rows of one block, of fewer than eight, of more than eight, of several times eight."""
    return (256, 512, 768, 2304) if quant_type.block_elements == 256 else (32, 96, 384, 288)


@INTEGER_TYPE
@pytest.mark.parametrize("num_tokens", [1, 3, FEW_ROWS + 1])
def test_integer_types(quant_type: QuantType, num_tokens: int) -> None:
    for cols in cols_of(quant_type):
        weight = random_weight(quant_type, (9, cols), cols)
        x = activations(cols, num_tokens, cols)
        assert_same_bits(product(x, weight), linear_exact(x, weight))


@FLOAT_TYPE
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_float_types(quant_type: QuantType, num_tokens: int) -> None:
    for cols in (1, 17, 100, 256):
        weight = random_weight(quant_type, (9, cols), cols)
        x = activations(cols, num_tokens, cols)
        assert_same_bits(product(x, weight), linear_exact(x, weight))


@INTEGER_TYPE
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF], ids=hex)
def test_extreme_blocks(quant_type: QuantType, byte: int) -> None:
    """The largest codes and sub-block scales, and scales that are no ordinary numbers."""
    weight = random_weight(quant_type, (9, 512), byte)
    blocks = weight.blocks.reshape(9, -1, quant_type.block_bytes)
    scales = [blocks[..., at : at + 2].clone() for at in float16_places(quant_type)]
    blocks[:, ::2] = byte
    for at, kept in zip(float16_places(quant_type), scales, strict=True):
        blocks[..., at : at + 2] = kept
        for row, bits in enumerate(HALF_BITS):
            blocks[row, 0, at : at + 2] = torch.tensor([bits & 255, bits >> 8])
    x = activations(byte, FEW_ROWS + 1, 512)
    x[0], x[1, 300] = 3.0, torch.nan
    for rows in (x, x[:2]):
        assert_same_bits(product(rows, weight), linear_exact(rows, weight))


def test_strided_output() -> None:
    weight = random_weight(QuantType.Q6_K, (20, 256), 1)
    x = activations(1, FEW_ROWS + 1, 256)
    for rows in (1, FEW_ROWS + 1):
        wide = torch.full((rows, 50), -1.0, device=DEVICE)
        linear(device_activations(x[:rows]), on_device(weight), wide[:, 10:30])
        assert_same_bits(wide[:, 10:30].contiguous(), linear_exact(x[:rows], weight))
        assert wide[:, :10].eq(-1).all()
        assert wide[:, 30:].eq(-1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", [*sorted(INTEGER_TYPES), *FLOAT_DTYPES], ids=lambda t: t.name)
def test_every_size(quant_type: QuantType) -> None:
    """Rows of a batch equal the same rows alone, and weights of every size fit."""
    cols = 2304 if quant_type.block_elements == 256 else 288
    weight = random_weight(quant_type, (1000, cols), 1)
    x = activations(1, 1000, cols)
    expected = linear_exact(x[:100], weight)
    together = product(x, weight)
    assert_same_bits(together[:100], expected)
    for num_tokens in SIZES:
        assert_same_bits(product(x[:num_tokens], weight), together[:num_tokens])
    for num_rows in SIZES:
        part = QuantTensor(weight.blocks[:num_rows], quant_type, (num_rows, cols))
        for num_tokens in (1, FEW_ROWS + 1, 100):
            assert_same_bits(product(x[:num_tokens], part), expected[:num_tokens, :num_rows])
    assert_same_bits(product(x[900:901], weight), together[900:901])
