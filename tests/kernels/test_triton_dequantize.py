"""The Triton kernels that turn blocks into floats and floats into int8 equal the reference, bit for bit."""

import pytest
import torch
from guarded import DEVICE, Guarded
from random_blocks import activations, float16_places, random_weight
from triton_interpreter import assert_same_bits, device_activations, on_device

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.dequantize import reference
from coldstream.kernels.dequantize.triton import dequantize, dequantize_matrices
from coldstream.kernels.dequantize.triton_blocks import code_table, num_sub_blocks
from coldstream.kernels.embed.triton import embed
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.triton import quantize

EVERY_TYPE = pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO = 0x7E01, 0x7C00, 0xFC00, 0x0001, 0x7BFF, 0x8000


@EVERY_TYPE
def test_sub_blocks_are_those_of_the_reference(quant_type: QuantType) -> None:
    if quant_type not in reference.FLOAT_DTYPES:
        weight = random_weight(quant_type, (1, quant_type.block_elements), 1)
        assert num_sub_blocks(quant_type) == reference.unpack(weight).scales.shape[-1]


@EVERY_TYPE
def test_values(quant_type: QuantType) -> None:
    cols = {1: 100, 32: 96, 256: 768}[quant_type.block_elements]
    weight = random_weight(quant_type, (3, cols), 1)
    out = Guarded(3, cols)
    dequantize(on_device(weight), out.tensor, code_table(quant_type, DEVICE))
    assert_same_bits(out.checked(), reference.dequantize(weight))


@EVERY_TYPE
def test_hostile_bytes(quant_type: QuantType) -> None:
    """Any byte is a value, and any scale gives what IEEE arithmetic gives."""
    elements = max(quant_type.block_elements, 32)
    shape = (8, quant_type.row_bytes(elements))
    blocks = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).byte()
    for row, byte in enumerate((0x00, 0xFF, 0x7F)):
        blocks[row] = byte
    for row, scale in enumerate((NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO), start=2):
        for at in float16_places(quant_type):
            blocks[row, at : at + 2] = torch.tensor([scale & 255, scale >> 8])
    weight = QuantTensor(blocks, quant_type, (8, elements))
    out = Guarded(8, elements)
    dequantize(on_device(weight), out.tensor, code_table(quant_type, DEVICE))
    assert_same_bits(out.checked(), reference.dequantize(weight))


@EVERY_TYPE
def test_matrices_behind_addresses(quant_type: QuantType) -> None:
    cols = max(quant_type.block_elements, 32)
    experts = [on_device(random_weight(quant_type, (2, cols), seed)) for seed in range(3)]
    addresses = torch.tensor([expert.blocks.data_ptr() for expert in experts], device=DEVICE)
    matrix_ids = torch.tensor([2, 0, 2], dtype=torch.int32, device=DEVICE)
    out = Guarded(3, 2, cols)
    dequantize_matrices(quant_type, addresses, matrix_ids, out.tensor, code_table(quant_type, DEVICE))
    expected = [reference.dequantize(random_weight(quant_type, (2, cols), seed)) for seed in (2, 0, 2)]
    assert_same_bits(out.checked(), torch.stack(expected))


@pytest.mark.parametrize("quant_type", [QuantType.Q4_K, QuantType.Q8_0, QuantType.F16], ids=lambda t: t.name)
def test_embedding(quant_type: QuantType) -> None:
    table = random_weight(quant_type, (50, 256), 1)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32)
    out = Guarded(4, 256)
    embed(on_device(table), ids.to(DEVICE), out.tensor, code_table(quant_type, DEVICE))
    assert_same_bits(out.checked(), reference.dequantize(table.take_rows(ids)))


@pytest.mark.parametrize("cols", [32, 100, 160, 256, 384, 1024, 2304])
def test_quantized_activations(cols: int) -> None:
    x = activations(cols, 9, cols)
    x[7, 1], x[8, 3] = torch.nan, torch.inf
    padded = -(-cols // 256) * 256
    q = Guarded(9, padded, dtype=torch.int8)
    scales, sums = Guarded(9, padded // 256), Guarded(9, padded // 16, dtype=torch.int16)
    strided = torch.full((9, cols + 5), torch.nan, device=DEVICE)[:, :cols].copy_(x)
    quantize(strided, QuantActivations(q.tensor, scales.tensor, sums.tensor))
    expected = device_activations(x)
    assert_same_bits(q.checked(), expected.q)
    assert_same_bits(scales.checked(), expected.scales)
    assert_same_bits(sums.checked(), expected.sums)


def test_nothing_to_do() -> None:
    empty = torch.zeros(0, 256, device=DEVICE)
    quantize(empty, device_activations(empty))
    weight = on_device(random_weight(QuantType.Q4_K, (5, 256), 1))
    embed(weight, torch.zeros(0, dtype=torch.int32, device=DEVICE), empty, None)
