"""The gated activation on the GPU, as floats and quantised, against the exact reference."""

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
from coldstream.kernels.swiglu.cuda import PROGRAM, swiglu_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact


@pytest.mark.sharded
@for_each_architecture
def test_kernels_compile(arch: str) -> None:
    check_compiles(PROGRAM, arch)


def test_shapes_that_disagree_are_refused() -> None:
    gate = torch.zeros(2, 32)
    with pytest.raises(ValueError, match="differ"):
        swiglu_cuda(gate, torch.zeros(2, 64), None, None)
    with pytest.raises(ValueError, match="an output"):
        swiglu_cuda(gate, gate, torch.zeros(3, 32), None)


def check_swiglu(gate: torch.Tensor, up: torch.Tensor, gap: int = 0) -> None:
    (rows, cols), expected = gate.shape, swiglu_exact(gate, up)
    gate, up = rows_apart(gate, gap), rows_apart(up, gap + 4)
    out, codes = Guarded(rows, cols, device=CUDA), GuardedActivations(rows, cols)
    swiglu_cuda(gate, up, out.tensor, codes.out)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)
    floats, only_codes = Guarded(rows, cols, device=CUDA), GuardedActivations(rows, cols)
    swiglu_cuda(gate, up, floats.tensor, None)
    swiglu_cuda(gate, up, None, only_codes.out)
    assert_same_bits(floats.checked(), expected)
    only_codes.check(expected)


@pytest.mark.gpu
@all_pairs(rows=[1, 3, 17, 63, 65], cols=[1, 7, 160, 256, 512, 600, 2816], gap=[0, 1])
def test_swiglu(rows: int, cols: int, gap: int) -> None:
    check_swiglu(spiky(rows, rows, cols), spiky(cols, rows, cols), gap)


@pytest.mark.gpu
def test_gates_near_and_beyond_the_limits_of_exp() -> None:
    gate = torch.linspace(-120, 120, 4096).reshape(8, 512)
    gate[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    check_swiglu(gate, random(0, 8, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_swiglu_of_any_number_of_rows(rows: int) -> None:
    check_swiglu(spiky(1, rows, 160), spiky(2, rows, 160))
