"""The exact arithmetic against exact fractions and against itself written as plain loops."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE
from coldstream.kernels.arithmetic.reference import (
    dot_lanes,
    exp,
    fma,
    quantize_activations,
    sigmoid,
    silu,
    sum_lanes,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-1e3, 1e3, width=32)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def round_to_float32(value: Fraction) -> float:
    """The float32 nearest to an exact value, ties to even, chosen among neighbours."""
    limit = Fraction(float(np.finfo(np.float32).max))
    half_ulp = Fraction(2) ** 103
    if abs(value) >= limit + half_ulp:
        return math.copysign(math.inf, value)
    guess = np.float32(min(max(value, -limit), limit))
    with np.errstate(over="ignore"):
        neighbours = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)]
    candidates = [float(c) for c in (guess, *neighbours) if np.isfinite(c)]

    def distance(c: float) -> tuple[Fraction, int]:
        return abs(Fraction(c) - value), struct.unpack("<I", struct.pack("<f", c))[0] & 1

    return min(candidates, key=distance)


@given(a=FLOATS, b=FLOATS, c=FLOATS)
@example(a=1 + 2.0**-12, b=1 + 2.0**-12, c=2.0**-60)  # a tie that only the lowest bits of c break
@example(a=1 + 2.0**-12, b=1 + 2.0**-12, c=-(2.0**-60))
@example(a=2.0**-126, b=2.0**-20, c=2.0**-149)
@example(a=2.0**100, b=2.0**28, c=-(2.0**127))
@example(a=2.0**-75, b=-(2.0**-75), c=0.0)
def test_fma_is_one_rounding(a: float, b: float, c: float) -> None:
    expected = round_to_float32(Fraction(a) * Fraction(b) + Fraction(c))
    assert fma(scalar(a), scalar(b), scalar(c)).item() == expected


@given(seed=st.integers(0, 2**32 - 1))
def test_fma_is_one_rounding_near_ties(seed: int) -> None:
    """Products of short numbers against a much smaller c: rounding twice would show here."""
    generator = np.random.default_rng(seed)
    a, b = (1 + generator.integers(0, 2**12, 8) / 2**12 for _ in range(2))
    c = generator.choice([-1, 1], 8) * 2.0 ** generator.integers(-100, -24, 8)
    actual = fma(*(torch.tensor(v, dtype=torch.float32) for v in (a, b, c)))
    for k in range(8):
        assert actual[k].item() == round_to_float32(Fraction(a[k]) * Fraction(b[k]) + Fraction(c[k]))


def test_fma_is_one_rounding_where_floats_have_fewer_bits() -> None:
    """257 and almost a half of the least float: half way to 258, if it is rounded before."""
    least = 2.0**-149
    a, b = 2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23)
    assert fma(scalar(a), scalar(b), scalar(257 * least)).item() == 257 * least
    assert fma(scalar(a), scalar(-b), scalar(-257 * least)).item() == -257 * least


def test_fma_follows_ieee_beyond_the_finite() -> None:
    inf, nan = math.inf, math.nan
    assert fma(scalar(1.0), scalar(1.0), scalar(inf)).item() == inf
    assert fma(scalar(-inf), scalar(2.0), scalar(1.0)).item() == -inf
    assert fma(scalar(3e38), scalar(3e38), scalar(0.0)).item() == inf
    for a, b, c in [(inf, 0.0, 1.0), (inf, 1.0, -inf), (nan, 1.0, 1.0), (1.0, 1.0, nan)]:
        assert fma(scalar(a), scalar(b), scalar(c)).isnan()


def test_exp_is_close_over_its_range() -> None:
    x = torch.linspace(-87.3, 88.3, 20_001)
    relative = (exp(x).double() / torch.exp(x.double()) - 1).abs()
    assert relative.max().item() < 4e-7


def test_exp_outside_its_range() -> None:
    low, high, nan = exp(torch.tensor([-math.inf, math.inf, math.nan])).tolist()
    assert 0 < low < 1.2e-38
    assert 2.4e38 < high < math.inf
    assert math.isnan(nan)
    assert exp(scalar(0.0)).item() == 1.0


@given(x=MODERATE)
def test_sigmoid_and_silu(x: float) -> None:
    expected = 1 / (1 + math.exp(-max(x, -80)))
    assert sigmoid(scalar(x)).item() == pytest.approx(expected, rel=1e-6, abs=1e-34)
    assert silu(scalar(x)).item() == (scalar(x) * sigmoid(scalar(x))).item()


def lanes_by_hand(terms: list[np.float32]) -> np.float32:
    """The written order as scalar loops over float32 numbers."""
    p = [np.float32(0)] * 16
    for i, term in enumerate(terms):
        p[i % 16] = p[i % 16] + term
    p = [p[j] + p[j + 8] for j in range(8)]
    return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))


@given(x=st.integers(0, 70).flatmap(lambda n: arrays(np.float32, n, elements=MODERATE)))
def test_sum_lanes_keeps_the_written_order(x: np.ndarray) -> None:
    assert sum_lanes(torch.from_numpy(x)).item() == lanes_by_hand(list(x))
    # A product with 1 is exact, so one fma a step is one addition a step.
    assert dot_lanes(torch.from_numpy(x[None]), torch.ones(1, len(x))).item() == lanes_by_hand(list(x))


def test_dot_lanes_is_one_rounding_a_step() -> None:
    tiny = 2.0**-12
    x, y = torch.zeros(2, 20), torch.zeros(3, 20)
    x[0, 0], y[0, 0] = 1.0, -(1 + 2 * tiny)
    x[0, 16], y[0, 16] = 1 + tiny, 1 + tiny  # in the lane of input 0
    x[1, 3], y[2, 3] = 5.0, 2.0
    # (1 + t)² − (1 + 2t) is 0 if the square is rounded before the sum.
    assert dot_lanes(x, y).tolist() == [[tiny**2, 0.0, 0.0], [0.0, 0.0, 10.0]]


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    columns=st.sampled_from([16, 32, 96, 256, 288, 512, 544]),
    exponent=st.integers(-40, 40),
    size=st.sampled_from([GROUP_SIZE, BLOCK_SIZE]),
)
def test_quantize_activations(seed: int, rows: int, columns: int, exponent: int, size: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    result = quantize_activations(x, size)
    assert result.q.dtype == torch.int8
    assert result.scales.dtype == torch.float32
    assert result.sums.dtype == torch.int16
    assert result.scales.shape == (rows, -(-columns // size))
    for row in range(rows):
        for group in range(result.scales.shape[1]):
            values = x[row, size * group : size * (group + 1)].numpy()
            maximum = np.abs(values).max()
            codes = np.rint(values * (np.float32(127) / maximum))
            assert result.q[row, size * group : size * (group + 1)].tolist() == codes.tolist()
            assert result.scales[row, group].item() == maximum / np.float32(127)
            assert np.abs(codes).max() == 127
    assert torch.equal(result.sums, result.q.reshape(rows, -1, 16).sum(-1).to(torch.int16))


def test_quantize_activations_at_the_edges() -> None:
    x = torch.zeros(5, 512)
    x[0, 3] = 2.0**-101
    x[1, 300] = math.inf
    x[2, 10] = math.nan
    x[3, :] = float(np.finfo(np.float32).max)
    x[4, 7], x[4, 8], x[4, 9] = 127.0, 2.5, -3.5
    result = quantize_activations(x)
    assert result.scales[0].tolist() == [0.0, 0.0]
    assert result.scales[1, 0] == 0
    assert result.scales[1, 1].isnan()
    assert result.scales[2, 0].isnan()
    assert not result.q[:3].any()
    assert (result.q[3] == 127).all()
    assert result.sums[3].tolist() == [127 * 16] * 32
    assert result.q[4, 7:10].tolist() == [127, 2, -4]


def test_a_block_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    x = torch.ones(1, 96)
    x[0, 40] = math.nan
    result = quantize_activations(x, BLOCK_SIZE)
    assert result.scales.isnan().tolist() == [[False, True, False]]
    assert result.q[0].tolist() == [127] * 32 + [0] * 32 + [127] * 32


def test_no_rows() -> None:
    result = quantize_activations(torch.empty(0, 288))
    assert (result.q.shape, result.scales.shape, result.sums.shape) == ((0, 288), (0, 2), (0, 18))
