"""Every quant type against the `gguf` package, bit for bit, on random and on hostile blocks."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import float16_places

import gguf
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize import grids
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES, UNPACKERS, dequantize
from coldstream.kernels.linear.integer_types import MINIMUM_TYPES
from coldstream.kernels.quant_tensor import QuantTensor
from gguf import quants

EVERY_TYPE = pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO = 0x7E01, 0x7C00, 0xFC00, 0x0001, 0x7BFF, 0x8000


def oracle(blocks: np.ndarray, quant_type: QuantType) -> np.ndarray:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if quant_type == QuantType.Q2_0:
            return q2_0_values(blocks)
        return quants.dequantize(blocks, gguf.GGMLQuantizationType(int(quant_type)))


def q2_0_values(blocks: np.ndarray) -> np.ndarray:
    """Value j of a block is (code − 1) · d, its code the bits 2 (j mod 4) of byte 2 + j div 4."""
    rows = []
    for row in blocks.reshape(len(blocks), -1, 18):
        values = []
        for block in row:
            d = np.float32(np.frombuffer(block[:2].tobytes(), np.float16)[0])
            values += [d * np.float32((int(block[2 + j // 4]) >> 2 * (j % 4) & 3) - 1) for j in range(64)]
        rows.append(values)
    return np.array(rows, np.float32)


def assert_equal_bits(blocks: np.ndarray, quant_type: QuantType) -> None:
    """`blocks` is uint8 [rows, row_bytes]."""
    expected = oracle(blocks, quant_type)
    actual = dequantize(QuantTensor(torch.from_numpy(blocks), quant_type, expected.shape)).numpy()
    assert actual.dtype == np.float32
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.sharded(9)
@EVERY_TYPE
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), blocks_per_row=st.integers(1, 3))
def test_random_blocks_equal_gguf(quant_type: QuantType, seed: int, rows: int, blocks_per_row: int) -> None:
    generator = np.random.default_rng(seed)
    shape = (rows, blocks_per_row * quant_type.block_bytes)
    assert_equal_bits(generator.integers(0, 256, shape, dtype=np.uint8), quant_type)


@EVERY_TYPE
def test_gg16_hostile_scales_stay_inside_the_code_tables(quant_type: QuantType) -> None:
    for scale in (NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO, 0):
        generator = np.random.default_rng(scale)
        blocks = generator.integers(0, 256, (4, quant_type.block_bytes), dtype=np.uint8)
        for place in float16_places(quant_type):
            blocks[:, place : place + 2] = np.frombuffer(np.uint16(scale).tobytes(), np.uint8)
        assert_equal_bits(blocks, quant_type)


@EVERY_TYPE
def test_gg16_equal_bytes_stay_inside_the_code_tables(quant_type: QuantType) -> None:
    """0xFF: the largest code and index of every type, a NaN scale, E8M0 = 255; 0: the all-zero block."""
    for byte in (0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF):
        assert_equal_bits(np.full((2, quant_type.block_bytes), byte, dtype=np.uint8), quant_type)


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254, 255])
def test_mxfp4_exponents(exponent: int) -> None:
    blocks = np.random.default_rng(exponent).integers(0, 256, (3, 17), dtype=np.uint8)
    blocks[:, 0] = exponent
    assert_equal_bits(blocks, QuantType.MXFP4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_float(dtype: torch.dtype) -> None:
    quant_type = {dtype: name for name, dtype in FLOAT_DTYPES.items()}[dtype]
    assert_equal_bits(np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(1, -1), quant_type)


def test_every_type_is_covered_once() -> None:
    assert set(UNPACKERS) | set(FLOAT_DTYPES) == set(QuantType)
    assert not set(UNPACKERS) & set(FLOAT_DTYPES)


def test_types_with_minima_are_those_that_unpack_some() -> None:
    blocks = {kind: torch.zeros(1, kind.block_bytes, dtype=torch.uint8) for kind in UNPACKERS}
    having = {kind for kind, block in blocks.items() if UNPACKERS[kind](block[None]).dmin is not None}
    assert having == MINIMUM_TYPES


@pytest.mark.parametrize(
    ("grid", "oracle_type"),
    [
        (grids.iq1_grid, quants.IQ1_S),
        (grids.iq2_xxs_grid, quants.IQ2_XXS),
        (grids.iq2_xs_grid, quants.IQ2_XS),
        (grids.iq2_s_grid, quants.IQ2_S),
        (grids.iq3_xxs_grid, quants.IQ3_XXS),
        (grids.iq3_s_grid, quants.IQ3_S),
    ],
    ids=lambda value: value.__name__,
)
def test_grids_equal_gguf(grid, oracle_type) -> None:
    oracle_type.init_grid()
    np.testing.assert_array_equal(grid(), oracle_type.grid.reshape(oracle_type.grid_shape))


def test_views_of_a_stack_dequantize_alike() -> None:
    data = torch.randint(
        0, 256, (3, 4, 2 * 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    stack = QuantTensor(data, QuantType.Q4_K, (3, 4, 512))
    whole = dequantize(stack)
    first, second = stack.split_rows([1, 3])
    assert torch.equal(dequantize(stack[2]), whole[2])
    assert torch.equal(dequantize(stack[2][1]), whole[2, 1])
    assert torch.equal(dequantize(first), whole[:, :1])
    assert torch.equal(dequantize(second), whole[:, 1:])


def test_odd_addresses_are_fine() -> None:
    data = torch.arange(1, 36, dtype=torch.uint8)
    tensor = QuantTensor.from_bytes(data[1:], QuantType.Q8_0, (32,))
    assert torch.equal(dequantize(tensor), dequantize(QuantTensor(data[1:].clone(), QuantType.Q8_0, (32,))))
    single = QuantTensor.from_bytes(data[1:5], QuantType.F32, (1,))
    assert single.blocks.storage_offset() == 1
    assert dequantize(single).view(torch.int32).item() == 0x05040302


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (torch.zeros(2, 34, dtype=torch.int8), (2, 32)),
        (torch.zeros(2, 33, dtype=torch.uint8), (2, 32)),
        (torch.zeros(34, 2, dtype=torch.uint8).T, (2, 32)),
        (torch.zeros(2, 34, dtype=torch.uint8), (2, 33)),
        (torch.zeros(2, 34, dtype=torch.uint8), ()),
    ],
    ids=["signed bytes", "short row", "strided bytes", "not whole blocks", "no dimension"],
)
def test_trap_09_shape_and_stride_are_checked_before_use(data: torch.Tensor, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"quantised|Q8_0"):
        QuantTensor(data, QuantType.Q8_0, shape)


def test_splits_and_indices_out_of_range() -> None:
    stack = QuantTensor(torch.zeros(2, 3, 34, dtype=torch.uint8), QuantType.Q8_0, (2, 3, 32))
    with pytest.raises(ValueError, match="add up"):
        stack.split_rows([1, 1])
    for index in (-1, 2):
        with pytest.raises(IndexError):
            stack[index]
