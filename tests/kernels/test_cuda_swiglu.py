"""The gated activation and the rope angles on the GPU, against the exact reference."""

import pytest
import torch
from cuda_row_cases import CUDA, ROW_COUNTS, GuardedActivations, check_compiles, random, rows_apart, spiky
from guarded import Guarded
from triton_interpreter import assert_same_bits

from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.rope import cuda as rope_cuda
from coldstream.kernels.rope.reference import rope_angles
from coldstream.kernels.swiglu import cuda as swiglu_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact


def test_kernels_compile() -> None:
    check_compiles(swiglu_cuda.PROGRAM)
    check_compiles(rope_cuda.PROGRAM)


def check_swiglu(gate: torch.Tensor, up: torch.Tensor, gap: int = 0) -> None:
    rows, cols = gate.shape
    expected = swiglu_exact(gate, up)
    out, codes = Guarded(rows, cols, device=CUDA), GuardedActivations(rows, cols)
    swiglu_cuda.swiglu_cuda(rows_apart(gate, gap), rows_apart(up, gap + 4), out.tensor, codes.out)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)
    only_codes = GuardedActivations(rows, cols)
    swiglu_cuda.swiglu_cuda(gate.to(CUDA), up.to(CUDA), None, only_codes.out)
    only_codes.check(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_swiglu_of_any_number_of_rows(rows: int) -> None:
    check_swiglu(spiky(1, rows, 160), spiky(2, rows, 160))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1, 7, 31, 100, 256, 512, 513])
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_swiglu_of_rows_of_any_size(cols: int, gap: int) -> None:
    check_swiglu(spiky(3, 6, cols), spiky(4, 6, cols), gap)


@pytest.mark.gpu
def test_swiglu_of_gates_near_and_beyond_the_limits_of_exp() -> None:
    gate = torch.linspace(-120, 120, 4096).reshape(8, 512)
    gate[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    check_swiglu(gate, random(0, 8, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
@pytest.mark.parametrize("num_dims", [2, 64, 100])
def test_angles_are_those_of_the_positions(rows: int, num_dims: int) -> None:
    table = rope_angles(torch.arange(500), RopeSpec(num_dims, 1e7))
    positions = torch.randint(
        0, 500, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(rows)
    )
    out = Guarded(rows, num_dims // 2, 2, device=CUDA)
    rope_cuda.gather_angles_cuda(table.to(CUDA), positions.to(CUDA), out.tensor)
    assert_same_bits(out.checked(), table[positions])
