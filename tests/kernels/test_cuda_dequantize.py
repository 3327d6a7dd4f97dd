"""The GPU's values of blocks equal the reference, bit for bit: unpackers on the host, kernels on a GPU."""

from pathlib import Path

import pytest
import torch
from cuda_row_cases import CUDA, check_compiles, for_each_architecture
from gpu_cases import on_gpu
from guarded import Guarded
from host_code import HostCode
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import float16_places, random_weight
from same_bits import assert_same_bits

from bench.kernels.machine_code import stack_bytes
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.dequantize import reference
from coldstream.kernels.dequantize.cuda import PROGRAM, dequantize_cuda, instance_of
from coldstream.kernels.embed.cuda import embed_cuda
from coldstream.kernels.quant_tensor import QuantTensor

EVERY_TYPE = pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO = 0x7E01, 0x7C00, 0xFC00, 0x0001, 0x7BFF, 0x8000
ROWS = (1, 2, 7, 31, 63, 64, 65, 100)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


def hostile_weight(quant_type: QuantType) -> QuantTensor:
    """Rows of one byte, and random ones with every kind of scale."""
    elements = max(quant_type.block_elements, 32)
    shape = (8, quant_type.row_bytes(elements))
    blocks = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1)).byte()
    for row, byte in enumerate((0x00, 0xFF, 0x7F)):
        blocks[row] = byte
    for row, scale in enumerate((NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO), start=2):
        for at in float16_places(quant_type):
            blocks[row, at : at + 2] = torch.tensor([scale & 255, scale >> 8])
    return QuantTensor(blocks, quant_type, (8, elements))


@pytest.mark.sharded
@EVERY_TYPE
@given(seed=st.integers(0, 2**32 - 1))
def test_unpackers(quant_type: QuantType, seed: int, host: Path) -> None:
    """Any byte is a value."""
    generator = torch.Generator().manual_seed(seed)
    cols = 3 * max(quant_type.block_elements, 32)
    blocks = torch.randint(0, 256, (2, quant_type.row_bytes(cols)), generator=generator).byte()
    weight = QuantTensor(blocks, quant_type, (2, cols))
    actual = HostCode(quant_type, host).dequantize(weight)
    assert_same_bits(actual, reference.dequantize(weight))


@pytest.mark.sharded(9)
@EVERY_TYPE
def test_unpackers_of_hostile_scales(quant_type: QuantType, host: Path) -> None:
    """Any scale gives what IEEE arithmetic gives."""
    weight = hostile_weight(quant_type)
    actual = HostCode(quant_type, host).dequantize(weight)
    assert_same_bits(actual, reference.dequantize(weight))


@pytest.mark.parametrize("quant_type", [QuantType.F16, QuantType.BF16], ids=lambda t: t.name)
def test_unpackers_of_every_short_float(quant_type: QuantType, host: Path) -> None:
    weight = QuantTensor(
        torch.arange(1 << 16).to(torch.uint16).view(torch.uint8)[None], quant_type, (1, 1 << 16)
    )
    actual = HostCode(quant_type, host).dequantize(weight)
    assert_same_bits(actual, reference.dequantize(weight))


def test_unpackers_of_every_power_of_mxfp4(host: Path) -> None:
    blocks = torch.full((256, 17), 0x57, dtype=torch.uint8)
    blocks[:, 0] = torch.arange(256)
    weight = QuantTensor(blocks, QuantType.MXFP4, (256, 32))
    actual = HostCode(QuantType.MXFP4, host).dequantize(weight)
    assert_same_bits(actual, reference.dequantize(weight))


@pytest.mark.sharded(of="kernels")
@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


@pytest.mark.sharded(9)
@EVERY_TYPE
def test_kernels_stay_in_registers(quant_type: QuantType) -> None:
    assert stack_bytes(compile_instance(PROGRAM.source, instance_of(quant_type), "sm_90")) == 0


def test_outputs_of_other_shapes_are_refused() -> None:
    weight = QuantTensor(torch.zeros(2, 34, dtype=torch.uint8), QuantType.Q8_0, (2, 32))
    for out in (torch.empty(3, 32), torch.empty(2, 64), torch.empty(32, 2).T):
        with pytest.raises(ValueError, match="do not go into"):
            dequantize_cuda(weight, out)


def test_matrices_that_start_where_the_kernel_cannot_read_are_refused() -> None:
    blocks = torch.zeros(1 + 144, dtype=torch.uint8)[1:].view(1, 144)
    with pytest.raises(ValueError, match="rows of Q4_K"):
        dequantize_cuda(QuantTensor(blocks, QuantType.Q4_K, (1, 256)), torch.empty(1, 256))


@pytest.mark.gpu
@EVERY_TYPE
def test_values(quant_type: QuantType) -> None:
    cols = {1: 100, 32: 96, 64: 192, 256: 768}[quant_type.block_elements]
    weight = random_weight(quant_type, (3, cols), 1)
    for gap in (0, 1, 4):
        out = Guarded(3, cols, gap=gap, device=CUDA)
        dequantize_cuda(on_gpu(weight, quant_type.alignment), out.tensor)
        assert_same_bits(out.checked(), reference.dequantize(weight))


@pytest.mark.gpu
@EVERY_TYPE
def test_hostile_bytes(quant_type: QuantType) -> None:
    weight = hostile_weight(quant_type)
    out = Guarded(*weight.shape, device=CUDA)
    dequantize_cuda(on_gpu(weight), out.tensor)
    assert_same_bits(out.checked(), reference.dequantize(weight))


@pytest.mark.gpu
@EVERY_TYPE
def test_every_number_of_rows(quant_type: QuantType) -> None:
    cols = 1280  # more than the values of one block of threads
    weight = random_weight(quant_type, (max(ROWS), cols), 2)
    expected = reference.dequantize(weight)
    for rows in ROWS:
        part = QuantTensor(weight.blocks[:rows], quant_type, (rows, cols))
        out = Guarded(rows, cols, device=CUDA)
        dequantize_cuda(on_gpu(part), out.tensor)
        assert_same_bits(out.checked(), expected[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1, 3, 8, 31, 100, 257, 1024, 1030, 2049])
@pytest.mark.parametrize("quant_type", list(reference.FLOAT_DTYPES), ids=lambda t: t.name)
def test_rows_of_floats_of_any_size(quant_type: QuantType, cols: int) -> None:
    weight = random_weight(quant_type, (5, cols), cols)
    out = Guarded(5, cols, device=CUDA)
    dequantize_cuda(on_gpu(weight), out.tensor)
    assert_same_bits(out.checked(), reference.dequantize(weight))


@pytest.mark.gpu
@EVERY_TYPE
def test_embedding(quant_type: QuantType) -> None:
    table = random_weight(quant_type, (50, 512), 1)
    for tokens in (1, 63, 64, 100):
        ids = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(tokens)).int()
        ids[0] = 49
        out = Guarded(tokens, 512, device=CUDA)
        embed_cuda(on_gpu(table), ids.to(CUDA), out.tensor)
        assert_same_bits(out.checked(), reference.dequantize(table.take_rows(ids)))


@pytest.mark.gpu
def test_rows_of_a_large_and_wide_table() -> None:
    rows, cols = 250_000, 8960  # 2.4 GB of Q8_0; 2.2e9 values
    table = torch.zeros(rows, QuantType.Q8_0.row_bytes(cols), dtype=torch.uint8, device=CUDA)
    last = random_weight(QuantType.Q8_0, (1, cols), 1)
    table[-1].copy_(last.blocks[0])
    out = Guarded(2, cols, device=CUDA)
    ids = torch.tensor([rows - 1, 0], dtype=torch.int32, device=CUDA)
    embed_cuda(QuantTensor(table, QuantType.Q8_0, (rows, cols)), ids, out.tensor)
    values = out.checked()
    assert_same_bits(values[:1], reference.dequantize(last))
    assert not values[1].any()


@pytest.mark.gpu
def test_large_and_wide_outputs() -> None:
    rows, cols = 70_000, 32768  # 2.3e9 values, 9.2 GB of them
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of the device's memory")
    blocks = torch.zeros(rows, QuantType.Q8_0.row_bytes(cols), dtype=torch.uint8, device=CUDA)
    last = random_weight(QuantType.Q8_0, (1, cols), 2)
    blocks[-1].copy_(last.blocks[0])
    out = torch.full((rows, cols), torch.nan, device=CUDA)
    dequantize_cuda(QuantTensor(blocks, QuantType.Q8_0, (rows, cols)), out)
    assert_same_bits(out[-1:].cpu(), reference.dequantize(last))
    assert not any(part.any() for part in out[:-1].split(8192))


@pytest.mark.gpu
def test_nothing_to_do() -> None:
    weight = on_gpu(random_weight(QuantType.Q4_K, (5, 256), 1))
    none = torch.zeros(0, dtype=torch.int32, device=CUDA)
    embed_cuda(weight, none, torch.zeros(0, 256, device=CUDA))
