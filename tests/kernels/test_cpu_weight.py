"""Weights of the extension, and what reads or prepares rows: geometry, bounds, embedding, quantising."""

import os
from pathlib import Path

import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, same_bits
from quant_cases import before_a_hole, linear, load, same_numbers
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.dequantize.reference import dequantize

EVERY_TYPE = pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
EVERY_TIER = pytest.mark.parametrize("tier", _csrc.supported_tiers())


def test_geometry_is_that_of_quant_type() -> None:
    table = [(int(t), t.name, t.block_elements, t.block_bytes) for t in QuantType]
    assert sorted(_csrc.quant_geometry()) == table


@EVERY_TYPE
@pytest.mark.parametrize("byte", [None, 0x00, 0xFF])
def test_dequantize_equals_the_reference(quant_type: QuantType, byte: int | None) -> None:
    weight = random_weight(quant_type, (2, 5, 768), int(quant_type))
    if byte is not None:
        weight.blocks.fill_(byte)
    out = torch.full((2, 5, 768), 1234.5)
    _csrc.dequantize(_csrc.Runtime(2), load(weight), out)
    assert same_numbers(out, dequantize(weight))


@EVERY_TYPE
def test_embed_equals_the_reference(quant_type: QuantType) -> None:
    table = random_weight(quant_type, (50, 512), 1)
    for num_ids in AWKWARD_SIZES:
        ids = torch.randint(50, (num_ids,), generator=torch.Generator().manual_seed(num_ids)).int()
        out = Output(num_ids, 512)
        _csrc.embed(_csrc.Runtime(2), load(table), ids, out.rows)
        assert same_bits(out.checked(), dequantize(table)[ids])


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_hostile_token_ids_are_refused(bad: int) -> None:
    table = random_weight(QuantType.Q6_K, (50, 256), 1)
    ids = torch.tensor([0, bad], dtype=torch.int32)
    with pytest.raises(ValueError, match="a token id lies outside the vocabulary"):
        _csrc.embed(_csrc.Runtime(2), load(table), ids, torch.zeros(2, 256))


@EVERY_TIER
@pytest.mark.parametrize("scale_size", [GROUP_SIZE, BLOCK_SIZE])
def test_quantize_activations_equals_the_reference(tier: str, scale_size: int) -> None:
    for cols in (1, 31, 32, 255, 256, 288, 1000, 2048):
        x = activations(cols, 9, cols)
        for row, value in enumerate(
            [torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max, 2.0**-100]
        ):
            x[row, cols // 2] = value
        x[5] = 2.0**-101
        q, scales, sums = map(
            torch.from_numpy,
            _csrc.quantize_activations(_csrc.Runtime(1, tier), before_a_hole(x), scale_size),
        )
        expected = quantize_activations(x, scale_size)
        assert torch.equal(q[:, :cols], expected.q)
        assert same_numbers(scales[:, : expected.scales.shape[1]], expected.scales)
        assert not scales[:, expected.scales.shape[1] :].any()
        assert torch.equal(sums[:, : expected.sums.shape[1]], expected.sums)
        assert not q[:, cols:].any()
        assert not sums[:, expected.sums.shape[1] :].any()


def test_a_scale_serves_256_inputs_or_32() -> None:
    with pytest.raises(ValueError, match="scale_size must be 256 or 32, not 64"):
        _csrc.quantize_activations(_csrc.Runtime(1), torch.zeros(1, 64), 64)


@EVERY_TIER
def test_weights_are_read_where_the_file_has_them(tier: str, tmp_path: Path) -> None:
    """The last block is the last of the file, after a prefix that leaves it at an odd address."""
    weight = random_weight(QuantType.Q6_K, (2, 40, 512), 1)
    path, prefix = tmp_path / "weights", bytes(4097)
    path.write_bytes(prefix + weight.blocks.numpy().tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    size = len(prefix) + weight.blocks.numel()
    file = _csrc.MappedFile(descriptor, size)
    os.close(descriptor)
    runtime, x = _csrc.Runtime(2, tier), activations(1, 20, 512)
    offset = len(prefix) + weight.blocks[0].numel()
    second = _csrc.Weight.from_file(file, offset, int(QuantType.Q6_K), 40, 512)
    assert same_bits(*linear(runtime, x, [second]), *linear(runtime, x, [load(weight[1])]))
    stack = _csrc.Weight.from_file(file, len(prefix), int(QuantType.Q6_K), 40, 512, 2)
    assert (stack.num_matrices, stack.num_rows, stack.num_cols) == (2, 40, 512)
    with pytest.raises(ValueError, match="does not fit into"):
        _csrc.Weight.from_file(file, offset + 1, int(QuantType.Q6_K), 40, 512)
    with pytest.raises(ValueError, match="does not fit into"):
        _csrc.Weight.from_file(file, size + 1, int(QuantType.Q6_K), 1, 256)


def test_row_views_keep_to_their_rows() -> None:
    weight, x = random_weight(QuantType.Q5_K, (30, 256), 2), activations(2, 3, 256)
    runtime = _csrc.Runtime(2)
    (whole,) = linear(runtime, x, [load(weight)])
    parts = linear(runtime, x, [load(weight).rows(0, 7), load(weight).rows(7, 30).rows(0, 23)])
    assert same_bits(torch.cat(parts, dim=1), whole)
    for begin, end in [(-1, 3), (3, 3), (5, 4), (0, 31)]:
        with pytest.raises(ValueError, match="of 30"):
            load(weight).rows(begin, end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((999, 1, 256), "unknown tensor type 999"),
        ((12, 1, 255), "Q4_K rows hold multiples of 256 values, not 255"),
        ((12, 0, 256), "at least one matrix"),
        ((12, 1, 256, 0), "at least one matrix"),
        ((12, -1, 256), "at least one matrix"),
        ((12, 2, 256), "does not fit into 144 bytes"),
        ((12, 2**62, 256), "does not fit"),
        ((12, 2**32, 2**32), "does not fit"),
        ((12, 1, 256, 2**62), "does not fit"),
    ],
)
def test_trap_11_weights_that_do_not_fit_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _csrc.Weight.from_array(torch.zeros(144, dtype=torch.uint8), *arguments)


def test_misaligned_float_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        _csrc.Weight.from_array(torch.zeros(17, dtype=torch.uint8)[1:], int(QuantType.F32), 1, 4)
