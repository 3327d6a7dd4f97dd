"""Products of up to 64 rows: the GPU's kernels on the host against the exact reference, bit for bit."""

from collections.abc import Sequence

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, extreme_weight, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE, QuantActivations
from coldstream.kernels.arithmetic.reference import empty_activations, quantize_activations
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.skinny_shapes import PASS_COLS, SKINNY_TYPES, lone_pass_cols, matrix_shape
from coldstream.kernels.hyper_connections.reference import scaled_silu_exact
from coldstream.kernels.linear import skinny_layouts
from coldstream.kernels.linear.cuda import (
    divided,
    fits_skinny,
    linear_skinny_cuda,
    needs_block_rows,
    shares_passes,
)
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.linear.skinny_layouts import Walk, layout_for
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from host_device import LIMITS, TURING_LIMITS

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")
EVERY_TYPE = pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)


def quantised(x: torch.Tensor, scale_size: int = GROUP_SIZE) -> QuantActivations:
    out = empty_activations(*x.shape, CPU, scale_size)
    out.q.fill_(77), out.scales.fill_(torch.nan), out.sums.fill_(-777)
    quantize_cuda(x, out)
    return out


def run(x: torch.Tensor, weights: Sequence[QuantTensor]) -> list[torch.Tensor]:
    """The products, in one launch."""
    outs = [Guarded(x.shape[0], weight.shape[0], device=CPU, gap=16) for weight in weights]
    codes = None if x.shape[1] % BLOCK_SIZE else quantised(x)
    by_block = None if x.shape[1] % BLOCK_SIZE else quantised(x, BLOCK_SIZE)
    linear_skinny_cuda(weights, [out.tensor for out in outs], activations=codes, x=x, block_rows=by_block)
    return [out.checked() for out in outs]


def check(x: torch.Tensor, weights: Sequence[QuantTensor]) -> None:
    placed = [on_gpu(weight, device="cpu") for weight in weights]
    for actual, weight in zip(run(x, placed), weights, strict=True):
        assert_same(actual, linear_exact(x, weight))


def cols_of(quant_type: QuantType) -> Sequence[int]:
    if quant_type in PASS_COLS:
        return (24, 1000)
    if quant_type.block_elements == GROUP_SIZE:
        return (512, 2304)
    return tuple(size * quant_type.block_elements // BLOCK_SIZE for size in (32, 416, 2080))


@pytest.mark.parametrize("scale_size", [GROUP_SIZE, BLOCK_SIZE])
@pytest.mark.parametrize("cols", [32, 160, 512])
def test_quantised_rows(cols: int, scale_size: int) -> None:
    x = activations(cols, 9, cols)
    for row, value in enumerate([torch.nan, torch.inf, torch.finfo(torch.float32).max, 2.0**-101]):
        x[row, cols // 2] = value
    whole = torch.nn.functional.pad(x, (0, -cols % GROUP_SIZE))
    for found, expected in zip(
        vars(quantised(x, scale_size)).values(),
        vars(quantize_activations(whole, scale_size)).values(),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        assert_same(found, expected)


@pytest.mark.parametrize("quant_type", [QuantType.Q8_0, QuantType.MXFP4], ids=lambda t: t.name)
def test_a_lone_row_with_whole_rows_of_blocks(quant_type: QuantType) -> None:
    """Those of gpt-oss lie in the ring as in the matrix, also where the last unit has fewer rows."""
    shape = matrix_shape(quant_type, 22, 2880, pass_cols=lone_pass_cols(quant_type, 2880))
    assert shape.num_passes == 1
    assert shape.stage_stride == shape.row_bytes
    weight = random_weight(quant_type, (22, 2880), 1)
    check(activations(2, 1, 2880), [weight, random_weight(QuantType.Q8_0, (4, 2880), 3)])


def test_rows_that_are_no_pass_as_a_whole() -> None:
    """Where they begin in the same banks, where they are too long, and where a pass has them anyway."""
    kinds = QuantType.Q8_0, QuantType.MXFP4, QuantType.Q4_0
    assert [lone_pass_cols(kind, 2880, otherwise=1024) for kind in kinds] == [2880] * 3
    assert [lone_pass_cols(kind, 4096, otherwise=1024) for kind in kinds] == [1024] * 3
    assert lone_pass_cols(QuantType.Q8_0, 2880 * 4, otherwise=1024) == 1024
    assert {lone_pass_cols(kind, 2048, otherwise=1024) for kind in (*kinds, QuantType.Q4_K)} == {2048}
    assert lone_pass_cols(QuantType.Q4_K, 4096, otherwise=1024) == 2048


@pytest.mark.sharded
@EVERY_TYPE
def test_every_type(quant_type: QuantType) -> None:
    for cols in cols_of(quant_type):
        weight = random_weight(quant_type, (37, cols), seed=cols)
        for rows in (1, 3, 8, 9, 24, 61):
            check(activations(rows, rows, cols), [weight])


@pytest.mark.sharded
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_the_greatest_and_the_least_codes(quant_type: QuantType) -> None:
    weight, x = extreme_weight(quant_type, 512), activations(1, 9, 512)
    x[5:7] = torch.tensor([[1.0], [-1.0]])
    for rows in (1, 3, 9):
        check(x[9 - rows :], [weight])


@pytest.mark.sharded
@pytest.mark.parametrize("rows", [1, 5, 11, 40])
def test_types_of_both_kinds_of_scales_in_one_launch(rows: int) -> None:
    kinds = (QuantType.Q4_K, QuantType.Q8_0, QuantType.F16, QuantType.Q6_K, QuantType.Q5_0)
    weights = [random_weight(quant_type, (9 + 8 * i, 512), seed=i) for i, quant_type in enumerate(kinds)]
    check(activations(rows, rows, 512), weights)


@pytest.mark.sharded
@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "IQ3_S"])
def test_one_row_with_a_few_long_rows(name: str) -> None:
    """Of 2 to 8 passes, which the warps of a block share, and the last of which may be short."""
    kind = QuantType[name]
    for cols in (2304, 10240, 16384):
        shapes = [(kind, 7, cols), (kind, 4, cols)]
        assert layout_for(LIMITS, shapes, 1).walk is Walk.WIDE
        check(activations(cols, 1, cols), [random_weight(*shape[:1], shape[1:], seed=3) for shape in shapes])


def test_an_activation_of_the_first_product() -> None:
    """Of one row with a few long rows, in the launch of its products. Other launches have none."""
    x, kind = activations(4, 1, 10240), QuantType.Q5_K
    weights = [random_weight(kind, (rows, 10240), seed=rows) for rows in (6, 4)]
    assert shares_passes(weights)
    outs = [Guarded(1, weight.shape[0], device=CPU) for weight in weights]
    placed, products = [on_gpu(weight, device="cpu") for weight in weights], [out.tensor for out in outs]
    linear_skinny_cuda(placed, products, activations=quantised(x), x=x, silu_divisor=4)
    expected = [linear_exact(x, weight) for weight in weights]
    assert_same(outs[0].checked(), scaled_silu_exact(expected[0], 4))
    assert_same(outs[1].checked(), expected[1])
    short = [random_weight(kind, (6, 512), seed=1)]
    assert not shares_passes(short)
    with pytest.raises(ValueError, match="no kernel for these weights applies an activation"):
        linear_skinny_cuda(
            short, [outs[0].tensor], activations=quantised(x[:, :512]), x=x[:, :512], silu_divisor=4
        )


def test_warps_share_no_passes_of_larger_matrices_or_other_types() -> None:
    most = 4 * LIMITS.num_processors
    for rows, cols, kind in (
        (most, 2048, QuantType.Q4_K),
        (most + 1, 4096, QuantType.Q4_K),
        (8, 16640, QuantType.Q4_K),
        (8, 4096, QuantType.Q8_0),
        (8, 4096, QuantType.F32),
    ):
        assert layout_for(LIMITS, [(kind, rows, cols)], 1).walk is Walk.ONE
    assert layout_for(LIMITS, [(QuantType.Q4_K, most, 4096)], 1).walk is Walk.WIDE
    little = DeviceLimits(
        132, 67 << 10, 67 << 10
    )  # of shared memory, in which a block finds no room for terms
    assert layout_for(little, [(QuantType.Q6_K, 324, 10240)], 1).walk is Walk.ONE


@pytest.mark.parametrize("cols", [512, 2048, 2304])
def test_grids_and_orders_of_several_types_in_one_launch(cols: int) -> None:
    kinds = (
        *(QuantType.IQ3_S, QuantType.IQ2_XXS, QuantType.IQ3_XXS, QuantType.IQ1_S),
        *(QuantType.IQ4_NL, QuantType.Q4_0, QuantType.MXFP4),
    )
    weights = [random_weight(quant_type, (9 + 8 * i, cols), seed=i) for i, quant_type in enumerate(kinds)]
    check(activations(cols, 1, cols), weights)
    check(activations(cols, 1, cols), [weights[4], weights[6]])


def test_a_value_that_is_not_finite_spoils_only_its_row() -> None:
    for quant_type in (QuantType.Q4_K, QuantType.Q8_0):
        weight, x = random_weight(quant_type, (9, 512), seed=2), activations(5, 3, 512)
        x[1, 300] = torch.inf
        check(x, [weight])


def test_rows_that_begin_anywhere_are_refused_by_blocks_of_32() -> None:
    x = torch.zeros(2, 66)[:, :64]
    weight = on_gpu(random_weight(QuantType.Q8_0, (5, 64), 1), device="cpu")
    with pytest.raises(ValueError, match="need rows of activations on 16 bytes"):
        linear_skinny_cuda([weight], [torch.zeros(2, 5)], x=x)


@pytest.mark.parametrize("quant_type", [QuantType.Q4_K, QuantType.Q8_0], ids=lambda t: t.name)
def test_parts_of_rows_that_do_not_fit_together(quant_type: QuantType) -> None:
    kinds = (quant_type, QuantType.F32)
    check(activations(3, 45, 4096), [random_weight(kind, (21, 4096), seed=3) for kind in kinds])


@pytest.mark.parametrize("rows", [65, 100, 128])
@pytest.mark.parametrize(
    "quant_type", [QuantType.Q5_K, QuantType.Q6_K, QuantType.IQ4_NL], ids=lambda t: t.name
)
def test_more_rows_than_a_block_takes(quant_type: QuantType, rows: int) -> None:
    kinds = (quant_type, QuantType.F32)
    check(activations(3, rows, 512), [random_weight(kind, (21, 512), seed=3) for kind in kinds])


def test_parts_of_a_single_row() -> None:
    kinds = (QuantType.Q4_K, QuantType.F16)
    check(activations(3, 3, 45056), [random_weight(kind, (21, 45056), seed=3) for kind in kinds])


FLOATS = pytest.mark.parametrize("quant_type", sorted(PASS_COLS), ids=lambda t: t.name)


@FLOATS
@pytest.mark.parametrize("cols", [8, 120, 128, 384, 520, 2048])
def test_floats_around_the_boundaries_of_stages(quant_type: QuantType, cols: int) -> None:
    check(activations(cols, 11, cols), [random_weight(quant_type, (19, cols), seed=cols)])


@pytest.mark.parametrize("rows", [9, 16, 17, 33, 64])
def test_several_matrices_of_floats_in_one_launch(rows: int) -> None:
    weights = [random_weight(QuantType.F32, (count, 264), seed=count) for count in (1, 16, 37, 2)]
    check(activations(rows, rows, 264), weights)


@pytest.mark.parametrize("cols", [24, 264, 1000])
@pytest.mark.parametrize("quant_type", sorted(PASS_COLS), ids=lambda t: t.name)
def test_tiles_of_a_large_matrix_of_floats(
    monkeypatch: pytest.MonkeyPatch, quant_type: QuantType, cols: int
) -> None:
    """Beside a small one, for a few rows."""
    monkeypatch.setattr(skinny_layouts, "MIN_TILED_FLOAT_ROWS", 33)
    large, small = (
        random_weight(quant_type, (37, cols), seed=cols),
        random_weight(QuantType.F32, (5, cols), 1),
    )
    for rows in (1, 2, 7, 8):
        check(activations(rows, rows, cols), [small, large])


def test_large_matrices_of_floats_have_tiles_where_their_rows_are_aligned() -> None:
    small, large, codes = (
        (QuantType.F32, 256, 2048),
        (QuantType.BF16, 2048, 2048),
        (QuantType.Q8_0, 4096, 2048),
    )
    for rows, expected in ((1, [0, 0]), (2, [64, 8]), (8, [64, 8]), (12, [512, 64])):
        assert layout_for(LIMITS, [large, small], rows).tiles == expected
    assert layout_for(LIMITS, [large], 4, are_aligned=False).tiles == [0]
    assert layout_for(LIMITS, [small], 4).tiles == [0]
    assert layout_for(LIMITS, [large, codes], 4).tiles == [0, 0]
    assert layout_for(LIMITS, [large, codes], 12).tiles == [512, 0]


def test_sums_of_floats_that_are_negative_zero_and_values_that_are_not_finite() -> None:
    x = activations(2, 20, 40)
    x[0] = -1e-30
    x[1, 3] = torch.nan
    x[2, 39] = torch.inf
    weight = random_weight(QuantType.F32, (24, 40), 7)
    values = weight.blocks.view(torch.float32)
    values[0] = 1e-30
    values[1] = 0.0
    found = run(x, [on_gpu(weight, device="cpu")])[0]
    assert torch.signbit(found[0, 0])
    assert_same(found, linear_exact(x, weight))


def test_rows_of_floats_that_begin_anywhere_are_for_another_kernel() -> None:
    weight, x = on_gpu(random_weight(QuantType.F16, (5, 64), 1), device="cpu"), torch.zeros(9, 64)
    assert fits_skinny([weight], x)
    shifted = torch.zeros(9, 65)[:, 1:]
    for other, rows in (
        (weight, torch.zeros(9, 66)[:, :64]),
        (weight, shifted),
        (on_gpu(random_weight(QuantType.F16, (5, 64), 1), 2, "cpu"), x),
        (on_gpu(random_weight(QuantType.F16, (5, 36), 1), device="cpu"), torch.zeros(9, 36)),
    ):
        assert not fits_skinny([other], rows)
        with pytest.raises(ValueError, match="need rows on 16 bytes"):
            linear_skinny_cuda([other], [torch.zeros(9, 5)], x=rows)
    assert fits_skinny([weight], shifted[:8]), "up to eight rows may begin anywhere"


def test_up_to_128_rows_of_all_but_large_matrices_are_for_these_kernels() -> None:
    def fits(rows: int, cols: int, quant_type: QuantType = QuantType.Q8_0, *, weight_rows: int = 1) -> bool:
        weight = on_gpu(random_weight(quant_type, (weight_rows, cols), 1), device="cpu")
        return fits_skinny([weight], torch.zeros(rows, cols))

    assert fits(64, 4096)
    assert not fits(65, 512), "blocks of 32 were not timed"
    for quant_type in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.BF16):
        assert fits(65, 512, quant_type)
        assert fits(128, 512, quant_type)
        assert not fits(129, 512, quant_type)
    assert not fits(65, 256, QuantType.Q4_K, weight_rows=4096)
    assert fits(64, 256, QuantType.Q4_K, weight_rows=4096)
    assert fits(64, 17408)
    assert fits(32, 5120, weight_rows=4096)
    assert not fits(33, 5120, weight_rows=4096)
    assert fits(33, 5120, weight_rows=1024)
    assert fits(15, 17408, QuantType.F16)
    assert not fits(16, 17408, QuantType.F16)


@pytest.mark.parametrize("rows", [64, 65, 128, 129])
def test_tall_matrices_are_apart_where_others_share_a_launch(rows: int) -> None:
    sizes = (
        (QuantType.Q4_K, 32),
        (QuantType.Q4_K, 4096),
        (QuantType.F32, 5000),
        (QuantType.Q6_K, 4100),
        (QuantType.Q4_K, 4095),
    )
    weights = [on_gpu(random_weight(kind, (count, 256), 1), device="cpu") for kind, count in sizes]
    found = divided(weights, torch.zeros(rows, 256))
    assert found == (([1, 3], [0, 2, 4]) if 64 < rows <= 128 else ([0, 1, 2, 3, 4],))
    assert divided(weights[1:2], torch.zeros(rows, 256)) == ([0],)


def test_beyond_a_slice_large_matrices_of_floats_alone_are_for_gemm() -> None:
    def fits(rows: int, *weights: tuple[QuantType, int]) -> bool:
        placed = [on_gpu(random_weight(kind, (count, 64), 1), device="cpu") for kind, count in weights]
        return fits_skinny(placed, torch.zeros(rows, 64))

    large, small, integers = (QuantType.BF16, 2048), (QuantType.F32, 2047), (QuantType.Q8_0, 4096)
    assert fits(8, large)
    assert not fits(9, large)
    assert not fits(9, small, large)
    assert fits(64, small)
    assert fits(64, integers, large), "which shares a launch with them"


@pytest.mark.sharded(9)
@pytest.mark.parametrize("walk", [Walk.ROWS, Walk.TILES, Walk.PARTS], ids=lambda walk: walk.name)
@pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
def test_every_walk(monkeypatch: pytest.MonkeyPatch, quant_type: QuantType, walk: Walk) -> None:
    """Whichever is chosen, at sizes that its units and passes do and do not divide."""
    monkeypatch.setattr(Walk, "of", lambda *_, **__: walk)
    step = quant_type.block_elements
    for cols, count in ((step, 5), (1024, 32), (1024 + step, 33), (2560, 70), (3072, 31), (4096 + step, 40)):
        weight = random_weight(quant_type, (count, cols), seed=cols)
        for rows in (2, 7) if walk is Walk.ROWS else (2, 8, 9, 31):
            check(activations(rows, rows, cols), [weight])


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("rows", [33, 64])
def test_parts_of_columns_for_two_sets_of_warps(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(Walk, "of", lambda *_, **__: Walk.PARTS)
    weights = [random_weight(kind, (35, 1280), seed=3) for kind in (QuantType.Q5_K, QuantType.F16)]
    check(activations(3, rows, 1280), weights)


@pytest.mark.parametrize("walk", [Walk.TILES, Walk.PARTS], ids=lambda walk: walk.name)
def test_one_set_of_warps_and_two_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, walk: Walk) -> None:
    x, weight = activations(3, 27, 2304), random_weight(QuantType.Q6_K, (37, 2304), seed=3)
    monkeypatch.setattr(Walk, "of", lambda *_, **__: walk)
    for sets in (1, 2):
        monkeypatch.setitem(skinny_layouts.SETS[walk], 4, sets)
        check(x, [weight])


@pytest.mark.parametrize(
    "limits",
    [TURING_LIMITS, LIMITS, DeviceLimits(132, 227 << 10, 228 << 10)],
    ids=["Turing", "99 KiB", "Hopper"],
)
def test_layouts_fit_their_device(limits: DeviceLimits) -> None:
    for quant_type in (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0):
        for cols in (256, 2048, 5120, 17408):
            for rows in range(1, 65):
                layout = layout_for(limits, [(quant_type, 100_000, cols)], rows)
                assert layout.plan.shared_bytes + 1024 <= limits.shared_per_block
                used = layout.plan.blocks_per_processor * (layout.plan.shared_bytes + 1024)
                assert used <= limits.shared_per_processor
                is_large = skinny_layouts.is_large(100_000, cols, rows)
                if (
                    limits.shared_per_block > LIMITS.shared_per_block
                    and layout.walk is not Walk.ROWS
                    and not is_large
                ):
                    assert layout.part_rows == rows, "no row is read for a part of the rows only"


def test_rows_in_another_form_are_asked_for() -> None:
    weight = on_gpu(random_weight(QuantType.Q8_0, (5, 17408), 1), device="cpu")
    x = torch.zeros(16, 17408)
    assert needs_block_rows([weight], x)
    assert not needs_block_rows([weight], x[:3])
    with pytest.raises(ValueError, match="quantised for blocks of 32"):
        linear_skinny_cuda([weight], [torch.zeros(16, 5)], x=x)
