"""RMS norm and the gated activation in Triton against the exact reference."""

import pytest
from cuda_row_cases import GuardedActivations, random, spiky
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


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("cols", [7, 160, 512, 600])
def test_swiglu(rows: int, cols: int) -> None:
    both = spiky(rows, rows, 2 * cols)
    codes = GuardedActivations(rows, cols, DEVICE)
    gate, up = both.to(DEVICE).split(cols, dim=1)
    swiglu(gate, up, codes.out)
    codes.check(swiglu_exact(*both.split(cols, dim=1)))
