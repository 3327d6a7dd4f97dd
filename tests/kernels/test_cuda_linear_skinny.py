"""Products of up to 64 rows on the GPU against the exact reference, bit for bit."""

from collections.abc import Sequence

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE, QuantActivations
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda.skinny_shapes import GROUP_TYPES, PASS_COLS, SKINNY_TYPES
from coldstream.kernels.linear import skinny_layouts
from coldstream.kernels.linear.cuda import MAX_MATRICES, linear_skinny_cuda
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.linear.skinny_layouts import FLOAT_ROW_BYTES, Walk
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda

pytestmark = pytest.mark.gpu

SUPER_COLS = (256, 512, 768, 1024, 1536, 2048, 2304, 4096, 6144)
BLOCK_COLS = (32, 160, 384, 1024, 2048, 2080, 4096)
FLOAT_COLS = (1, 7, 24, 100, 256, 264, 2048, 3000)
GAP = 16  # elements between the rows of an output
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1000)


def quantized(x: torch.Tensor, scale_size: int = GROUP_SIZE) -> QuantActivations:
    out = empty_activations(*x.shape, torch.device("cuda"), scale_size)
    quantize_cuda(x, out)
    return out


def cols_of(quant_type: QuantType) -> Sequence[int]:
    if quant_type in PASS_COLS:
        return FLOAT_COLS
    if quant_type.block_elements == GROUP_SIZE:
        return SUPER_COLS
    return tuple(cols * quant_type.block_elements // BLOCK_SIZE for cols in BLOCK_COLS)


def run(x: torch.Tensor, weights: Sequence[QuantTensor]) -> list[torch.Tensor]:
    """The products, with what each type needs."""
    outs = [Guarded(x.shape[0], weight.shape[0], gap=GAP) for weight in weights]
    x = x.cuda()
    is_integer = [weight.quant_type in GROUP_TYPES for weight in weights]
    linear_skinny_cuda(
        weights,
        [out.tensor for out in outs],
        activations=quantized(x) if any(is_integer) else None,
        x=None if all(is_integer) else x,
        block_rows=None if all(is_integer) or x.shape[1] % BLOCK_SIZE else quantized(x, BLOCK_SIZE),
    )
    return [out.checked() for out in outs]


@pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)
def test_every_length_of_a_row(quant_type: QuantType) -> None:
    for cols in cols_of(quant_type):
        weight = random_weight(quant_type, (70, cols), seed=cols)
        row_bytes = weight.quant_type.row_bytes(cols)
        several = () if quant_type in PASS_COLS and row_bytes % FLOAT_ROW_BYTES else (9, 16, 23, 32, 40, 64)
        for rows in (*range(1, 9), *several):
            x = activations(rows, rows, cols)
            assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))


@pytest.mark.parametrize("walk", [Walk.ROWS, Walk.TILES, Walk.PARTS], ids=lambda walk: walk.name)
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_every_walk(monkeypatch: pytest.MonkeyPatch, quant_type: QuantType, walk: Walk) -> None:
    """Whichever is chosen, with one set of warps and with two."""
    monkeypatch.setattr(Walk, "of", lambda *_, **__: walk)
    for cols in (quant_type.block_elements, 1024, 2560, 17408):
        weight = random_weight(quant_type, (70, cols), seed=cols)
        for rows in (2, 7) if walk is Walk.ROWS else (2, 8, 9, 31, 64):
            x = activations(rows, rows, cols)
            for sets in (1, 2) if rows == 31 else (None,):
                if sets is not None:
                    monkeypatch.setitem(skinny_layouts.SETS[walk], 4, sets)
                assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))


@pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 57])
def test_every_number_of_weight_rows(quant_type: QuantType, rows: int) -> None:
    cols = 512
    for size in SIZES:
        weight = random_weight(quant_type, (size, cols), seed=size)
        x = activations(size, rows, cols)
        assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 20, 64])
def test_several_matrices_of_different_types(rows: int) -> None:
    cols, kinds = 1024, sorted(SKINNY_TYPES)
    x = activations(rows, rows, cols)
    for first in range(0, len(kinds), MAX_MATRICES):
        weights = [
            random_weight(quant_type, (size, cols), seed=size)
            for quant_type, size in zip(kinds[first:], (33, 500, 4, 1000, 2, 31, 257, 64), strict=False)
        ]
        results = run(x, [on_gpu(weight) for weight in weights])
        for actual, weight in zip(results, weights, strict=True):
            assert_same(actual, linear_exact(x, weight))


UNALIGNED = [t for t in sorted(SKINNY_TYPES) if t.block_bytes % 16]


@pytest.mark.parametrize("quant_type", UNALIGNED, ids=lambda t: t.name)
def test_matrices_at_any_address_of_their_alignment(quant_type: QuantType) -> None:
    cols = 768
    weight, x = random_weight(quant_type, (21, cols), seed=3), activations(4, 2, cols)
    expected = linear_exact(x, weight)
    step = quant_type.alignment
    for offset in range(step, 18, step):
        assert_same(run(x, [on_gpu(weight, offset)])[0], expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_spoils_only_its_row(bad: float) -> None:
    for quant_type in (QuantType.Q4_K, QuantType.Q8_0, QuantType.F16):
        weight, x = random_weight(quant_type, (9, 512), seed=2), activations(5, 3, 512)
        x[1, 300] = bad
        result, expected = run(x, [on_gpu(weight)])[0], linear_exact(x, weight)
        assert_same(result[::2], expected[::2])
        assert not result[1].isfinite().any()


def test_large_and_wide() -> None:
    """More units than warps, and rows of activations that need several parts."""
    for quant_type, shape in [
        (QuantType.Q4_K, (12300, 256)),
        (QuantType.Q6_K, (9000, 512)),
        (QuantType.Q4_K, (40, 65536)),
    ]:
        weight, x = random_weight(quant_type, shape, seed=5), activations(6, 8, shape[1])
        assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))
    for cols in (4096, 8192):
        weight, x = random_weight(QuantType.Q4_K, (300, cols), seed=5), activations(6, 61, cols)
        assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))


def test_infinite_scales_give_what_ieee_gives() -> None:
    weight, x = random_weight(QuantType.Q4_K, (5, 512), seed=7), activations(7, 2, 512)
    weight.blocks[2, 0:2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    weight.blocks[3, 146:148] = torch.tensor([0x01, 0x7E], dtype=torch.uint8)
    assert_same(run(x, [on_gpu(weight)])[0], linear_exact(x, weight))


def test_what_does_not_fit_is_refused() -> None:
    weight = on_gpu(random_weight(QuantType.Q4_K, (5, 512), seed=7))
    out = torch.full((2, 5), torch.nan, device="cuda")
    with pytest.raises(ValueError, match="of the other kind"):
        linear_skinny_cuda([weight], [out], x=torch.zeros(2, 512, device="cuda"))
    with pytest.raises(ValueError, match="does not give"):
        linear_skinny_cuda([weight], [out[:, :4]], activations=quantized(torch.zeros(2, 512, device="cuda")))
    with pytest.raises(ValueError, match="one launch"):
        linear_skinny_cuda([weight], [torch.zeros(65, 5, device="cuda")])
