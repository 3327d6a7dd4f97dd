"""RMS norm and the gated activation in Triton against the exact reference."""

import pytest
import torch
from cuda_row_cases import ROW_COUNTS, GuardedActivations, random, rows_apart, spiky
from guarded import DEVICE, Guarded
from triton_interpreter import assert_same_bits

from coldstream.kernels.rms_norm.reference import rms_norm_exact
from coldstream.kernels.rms_norm.triton import rms_norm
from coldstream.kernels.swiglu.reference import swiglu_exact
from coldstream.kernels.swiglu.triton import swiglu

EPS = 1e-6


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("cols", [7, 256, 384, 2100])
def test_norm(rows: int, cols: int) -> None:
    x, weight = spiky(rows, rows, cols), 1 + random(cols, cols, scale=0.1)
    expected = rms_norm_exact(x, weight, EPS)
    out, codes = Guarded(rows, cols), GuardedActivations(rows, cols, DEVICE)
    rms_norm(x.to(DEVICE), weight.to(DEVICE), EPS, out.tensor, codes.out)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)


def check_swiglu(gate: torch.Tensor, up: torch.Tensor, gap: int = 0) -> None:
    (rows, cols), expected = gate.shape, swiglu_exact(gate, up)
    gate, up = rows_apart(gate, gap, DEVICE), rows_apart(up, gap + 4, DEVICE)
    out, codes = Guarded(rows, cols), GuardedActivations(rows, cols, DEVICE)
    swiglu(gate, up, out.tensor, codes.out)
    assert_same_bits(out.checked(), expected)
    codes.check(expected)
    floats, only_codes = Guarded(rows, cols), GuardedActivations(rows, cols, DEVICE)
    swiglu(gate, up, floats.tensor, None)
    swiglu(gate, up, None, only_codes.out)
    assert_same_bits(floats.checked(), expected)
    only_codes.check(expected)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("cols", [1, 7, 160, 256, 512, 600])
@pytest.mark.parametrize("gap", [0, 1])
def test_swiglu(rows: int, cols: int, gap: int) -> None:
    check_swiglu(spiky(rows, rows, cols), spiky(cols, rows, cols), gap)


def test_swiglu_of_gates_near_and_beyond_the_limits_of_exp() -> None:
    gate = torch.linspace(-120, 120, 4096).reshape(8, 512)
    gate[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    check_swiglu(gate, random(0, 8, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_swiglu_of_any_number_of_rows(rows: int) -> None:
    check_swiglu(spiky(1, rows, 160), spiky(2, rows, 160))
