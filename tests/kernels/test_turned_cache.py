"""The cache type that keeps turned values: its transformation, its levels, and attention over them."""

from itertools import pairwise

import pytest
import torch
from attention_cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.levels import LEVEL_UNIT, LEVELS, THRESHOLDS
from coldstream.kernels.attention.reference import attention
from coldstream.kernels.attention.turn import SIGNS, turn, turn_back

TQ3 = CACHE_TYPES["tq3_0"]
SMALLEST_SCALE = 2.0**-24

floats = st.floats(-(2.0**100), 2.0**100, width=32)
blocks = st.lists(floats, min_size=32, max_size=32)


def hadamard() -> torch.Tensor:
    """The matrix of the transformation, float64 [32, 32], by its definition."""
    signs = torch.tensor([(-1.0) ** (i & j).bit_count() for i in range(32) for j in range(32)])
    return signs.view(32, 32).double()


def read_back(values: torch.Tensor) -> torch.Tensor:
    return turn_back(TQ3.decode(TQ3.encode(values), values.shape[-1]))


def relative_error(values: torch.Tensor) -> float:
    return float((read_back(values) - values).norm() / values.norm())


def test_the_turn_is_the_walsh_hadamard_transform_of_changed_signs() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    signs = torch.tensor([-1.0 if SIGNS >> i & 1 else 1.0 for i in range(32)], dtype=torch.float64)
    torch.testing.assert_close(turn(x), (x * signs) @ hadamard())


@given(st.lists(st.integers(-(2**13), 2**13), min_size=64, max_size=64))
def test_turning_back_gives_what_was_turned(values: list[int]) -> None:
    # Integers of 14 bits: all sums are exact.
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(turn_back(turn(x)), x)


def test_scalar_products_grow_by_the_length_of_a_block() -> None:
    x, y = torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close((turn(x) * turn(y)).sum(-1), 32 * (x * y).sum(-1))


def test_the_signs_spread_every_row_of_the_transformation_evenly() -> None:
    magnitudes = turn(hadamard()).abs()
    assert magnitudes.eq(4).sum(-1).eq(28).all()
    assert magnitudes.eq(12).sum(-1).eq(4).all()


def test_levels_are_the_best_ones_for_a_normal_variable() -> None:
    # Max, "Quantizing for minimum distortion", 1960, table I, eight levels.
    best = torch.tensor([0.2451, 0.7560, 1.3439, 2.1520])
    assert (torch.tensor(LEVELS[:4]) / LEVEL_UNIT - best).abs().max() < 0.005
    assert [(low + high) / 2 for low, high in pairwise(LEVELS[:4])] == list(THRESHOLDS)
    assert [-level for level in LEVELS[:4]] == list(LEVELS[4:])


@pytest.mark.parametrize("power", [-12, 0, 14])
def test_normal_values_lose_what_eight_levels_must_lose(power: int) -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(3)) * 2.0**power
    # Of endless blocks 0.03455 of the variance; 32 values that share their own deviation lose less.
    assert relative_error(x) ** 2 == pytest.approx(0.0322, abs=0.0006)


def test_outliers_cost_no_more() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(4))
    x[:, ::16] *= 20
    assert relative_error(x) < 0.2


@pytest.mark.parametrize("row", range(32))
def test_blocks_that_are_rows_of_the_transformation_lose_less(row: int) -> None:
    assert relative_error(hadamard()[row].float()) < 0.05


@settings(max_examples=200)
@given(blocks)
def test_a_value_gets_the_nearest_level(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    turned, kept = turn(x).double(), TQ3.decode(TQ3.encode(x), 32).double()
    exact = float((turned**2).mean().sqrt() / LEVEL_UNIT)
    if exact >= 65520 * 1.001:
        assert kept.isnan().all()
    elif exact <= SMALLEST_SCALE / 2 * 0.999:
        assert kept.eq(0).all()
    elif SMALLEST_SCALE / 2 * 1.001 < exact < 65520 * 0.999:
        scale = float(TQ3.encode(x)[12:14].view(torch.float16))
        assert scale == pytest.approx(exact, rel=2.0**-10, abs=SMALLEST_SCALE / 2 * 1.001)
        levels = scale * torch.tensor(LEVELS, dtype=torch.float64)
        assert kept.unsqueeze(-1).eq(levels).any(-1).all()
        assert torch.equal((turned - kept).abs(), (turned.unsqueeze(-1) - levels).abs().amin(-1))


def test_ties_go_to_the_greater_magnitude_and_zeros_to_a_positive_level() -> None:
    # 53, 26.5 and −26.5 of a scale of 1, and the rest such that the deviation is 53.
    turned = torch.zeros(32)
    turned[:3] = torch.tensor([53.0, 26.5, -26.5])
    rest = (32 * 53.0**2 - float(turned.square().sum())) ** 0.5
    turned[3] = rest
    turned[4] = 0.0
    levels = TQ3.decode(TQ3.encode(turn_back(turned)), 32)
    assert levels[:5].tolist() == [40, 40, -40, 114, 13]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, -1e-38, 1e-45])
def test_blocks_of_nothing_read_back_as_zeros(value: float) -> None:
    rows = TQ3.encode(torch.full((64,), value))
    assert rows.eq(0).all()
    assert TQ3.decode(rows, 64).eq(0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 1e7])
def test_what_no_scale_holds_is_nan_and_leaves_other_blocks_alone(value: float) -> None:
    x = torch.ones(64)
    x[5] = value
    rows = TQ3.encode(x)
    kept = TQ3.decode(rows, 64)
    assert kept[:32].isnan().all()
    assert torch.equal(kept[32:], TQ3.decode(TQ3.encode(torch.ones(64)), 64)[32:])
    assert rows[:8].eq(0).all()  # codes
    assert rows[24:26].tolist() == [0x00, 0x7E]


def test_rows_are_low_bits_then_high_bits_then_scales() -> None:
    x = torch.randn(96, generator=torch.Generator().manual_seed(5))
    row = TQ3.encode(x)
    assert row.shape == (48,)
    low, high = row[:24].view(torch.int32), row[24:36].view(torch.int32)
    scales = row[36:42].view(torch.float16).float()
    for i in range(96):
        block, part, nibble = i // 32, i % 32 // 8, i % 8
        code = int(low[2 * block + part // 2]) >> 4 * nibble + 2 * (part % 2) & 3
        code |= (int(high[block]) >> 4 * nibble + part & 1) << 2
        assert TQ3.decode(row, 96)[i] == LEVELS[code] * scales[block]


def test_both_references_agree() -> None:
    """Turned keys with a turned query, or keys and values turned back: the same but for rounding."""
    case = make_case((0, 60, 8), cache_name="tq3_0")
    *tensors, angles = case.inputs()
    k_cache, v_cache = case.caches()
    out, *_ = case.expected()
    plain = attention(*tensors, 1e-6, angles, k_cache, v_cache, case.rows)
    torch.testing.assert_close(out, plain, atol=2e-5, rtol=1e-4)
