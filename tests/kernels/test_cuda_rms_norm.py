"""RMS norm on the GPU, alone and after a sum, against the exact reference."""

import pytest
import torch
from cuda_row_cases import (
    CUDA,
    ROW_COUNTS,
    GuardedActivations,
    check_compiles,
    for_each_architecture,
    random,
    rows_apart,
    spiky,
)
from guarded import Guarded
from same_bits import assert_same_bits

from all_pairs import all_pairs
from coldstream.kernels.arithmetic import reference as exact_arithmetic
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.reference import combine_experts
from coldstream.kernels.ops import ExpertOutputs, Routing, RowsElsewhere
from coldstream.kernels.rms_norm.cuda import PROGRAM, add_rms_norm_cuda, rms_norm_cuda
from coldstream.kernels.rms_norm.reference import rms_norm_exact

EPS = 1e-6
COLS = (1, 3, 16, 31, 100, 256, 384, 1000, 2048, 5120)


@for_each_architecture
def test_kernels_compile(arch: str, part_of_examples: slice) -> None:
    check_compiles(PROGRAM, arch, part_of_examples)


def check_norm(rows: int, cols: int, gap: int = 0, *, as_floats: bool = True, as_codes: bool = True) -> None:
    x, weight = spiky(rows, rows, cols), 1 + random(cols, cols, scale=0.1)
    expected = rms_norm_exact(x, weight, EPS)
    out, codes = Guarded(rows, cols, device=CUDA), GuardedActivations(rows, cols)
    rms_norm_cuda(
        rows_apart(x, gap) if gap else x.to(CUDA),
        weight.to(CUDA),
        EPS,
        out.tensor if as_floats else None,
        codes.out if as_codes else None,
    )
    if as_floats:
        assert_same_bits(out.checked(), expected)
    if as_codes:
        codes.check(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_norm_of_any_number_of_rows(rows: int) -> None:
    check_norm(rows, 384)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_norm_of_rows_of_any_size(cols: int, gap: int) -> None:
    check_norm(5, cols, gap)


@pytest.mark.gpu
@pytest.mark.parametrize("as_floats", [True, False])
def test_norm_writes_what_is_asked_for(as_floats: bool) -> None:
    check_norm(9, 640, as_floats=as_floats, as_codes=not as_floats)


@pytest.mark.gpu
def test_norm_of_rows_that_are_not_finite() -> None:
    x = random(0, 4, 512)
    x[1, 3], x[2, 300] = torch.inf, torch.nan
    expected = rms_norm_exact(x, torch.ones(512), EPS)
    out, codes = Guarded(4, 512, device=CUDA), GuardedActivations(4, 512)
    rms_norm_cuda(x.to(CUDA), torch.ones(512, device=CUDA), EPS, out.tensor, codes.out)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


@pytest.mark.gpu
@all_pairs(rows=[1, 2, 9, 33, 200], cols=[7, 100, 384, 2048], in_place=[True, False])
def test_norm_of_a_sum(rows: int, cols: int, in_place: bool) -> None:
    x, update, weight = spiky(1, rows, cols), spiky(2, rows, cols), random(3, cols)
    expected = rms_norm_exact(x + update, weight, EPS)
    x_device = x.to(CUDA)
    total, out, codes = (
        Guarded(rows, cols, device=CUDA),
        Guarded(rows, cols, device=CUDA),
        GuardedActivations(rows, cols),
    )
    total.tensor.copy_(x) if in_place else None
    source = total.tensor if in_place else x_device
    add_rms_norm_cuda(source, update.to(CUDA), total.tensor, weight.to(CUDA), EPS, out.tensor, codes.out)
    assert_same_bits(total.checked(), x + update)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)
    assert_same_bits(x_device, x)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 2048), (3, 384), (8, 63), (200, 100)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_norm_of_a_sum_of_experts(ranks: int, rows: int, cols: int, *, is_gated: bool) -> None:
    x, weight = spiky(1, rows, cols), random(2, cols)
    routed, shared = spiky(3, rows, ranks, cols), spiky(4, rows, cols)
    topk_weights = random(5, rows, ranks).softmax(-1)
    gate = random(6, rows, 1, scale=4) if is_gated else None
    update = combine_experts(
        routed, topk_weights, shared, gate, exact_arithmetic.fma, exact_arithmetic.sigmoid
    )
    expected = rms_norm_exact(x + update, weight, EPS)
    total, out, codes = (
        Guarded(rows, cols, device=CUDA),
        Guarded(rows, cols, device=CUDA),
        GuardedActivations(rows, cols),
    )
    ids = torch.zeros(rows, ranks, dtype=torch.int32)  # whose outputs these are doesn't matter to their sum
    routing = Routing(ids.to(CUDA), topk_weights.to(CUDA), gate.to(CUDA) if is_gated else None)
    experts = ExpertOutputs(routed.to(CUDA), shared.to(CUDA), routing)
    add_rms_norm_cuda(x.to(CUDA), experts, total.tensor, weight.to(CUDA), EPS, out.tensor, codes.out)
    assert_same_bits(total.checked(), x + update)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


def on_cpu(share: float, rows: int, ranks: int) -> torch.Tensor:
    """Which pairs the CPU computes: bool [rows, ranks], whole rows of either kind among mixed ones."""
    chance = torch.rand(rows, ranks, generator=torch.Generator().manual_seed(rows))
    mine = chance < share
    if 0 < share < 1 and rows > 2:
        mine[0], mine[-1] = True, False
    return mine


@pytest.mark.gpu
@all_pairs(
    rows=[1, 2, 7, 64],
    sizes=[(8, 2048), (9, 100), (4, 63)],
    share=[0.0, 0.3, 0.7, 1.0],
    unused=[0.0, torch.nan, torch.inf, -torch.inf],
)
def test_trap_3_what_the_other_processor_left_out_does_not_leak(
    rows: int, sizes: tuple[int, int], share: float, unused: float
) -> None:
    ranks, cols = sizes
    x, weight = spiky(1, rows, cols), random(2, cols)
    outputs, shared = spiky(3, rows, ranks, cols), spiky(4, rows, cols)
    topk_weights, gate = random(5, rows, ranks).softmax(-1), random(6, rows, 1, scale=4)
    mine = on_cpu(share, rows, ranks)
    # Outputs that must not be read: a weight of zero would not hide their NaN.
    routed = outputs.masked_fill(mine[..., None], unused)
    box = Mailbox.create(ranks, cols, rows)
    box.out.numpy()[:] = outputs.masked_fill(~mine[..., None], unused).cpu().numpy()
    ids = torch.arange(rows * ranks, dtype=torch.int32).view(rows, ranks).masked_fill(~mine, -1)
    elsewhere = RowsElsewhere(ids.to(CUDA), box.out, box.done)
    update = combine_experts(
        outputs, topk_weights, shared, gate, exact_arithmetic.fma, exact_arithmetic.sigmoid
    )
    total, out, codes = (
        Guarded(rows, cols, device=CUDA),
        Guarded(rows, cols, device=CUDA),
        GuardedActivations(rows, cols),
    )
    routing = Routing(*(part.to(CUDA) for part in (ids, topk_weights, gate)))
    experts = ExpertOutputs(routed.to(CUDA), shared.to(CUDA), routing, elsewhere)
    add_rms_norm_cuda(x.to(CUDA), experts, total.tensor, weight.to(CUDA), EPS, out.tensor, codes.out)
    expected = rms_norm_exact(x + update, weight, EPS)
    assert_same_bits(total.checked(), x + update)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)
    box.check()


@pytest.mark.gpu
def test_arguments_that_disagree_are_refused() -> None:
    x = torch.zeros(2, 32, device=CUDA)
    with pytest.raises(ValueError, match="33 weights"):
        rms_norm_cuda(x, torch.ones(33, device=CUDA), EPS, x, None)
    with pytest.raises(ValueError, match="codes"):
        rms_norm_cuda(x, torch.ones(32, device=CUDA), EPS, None, GuardedActivations(3, 32).out)
