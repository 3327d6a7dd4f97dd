"""The C++ products: generic equals the reference, every tier equals generic, rows do not see each other."""

import pytest
import torch
from cpu_cases import AWKWARD_SIZES, same_bits
from quant_cases import VECTOR_TIERS, before_a_hole, linear, linear_any, load, same_numbers
from random_blocks import activations, float16_places, random_weight

from all_pairs import all_pairs
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor

EVERY_TYPE = pytest.mark.parametrize("quant_type", list(QuantType), ids=lambda t: t.name)
INTEGER_TYPE = pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)
EVERY_TIER = pytest.mark.parametrize("tier", VECTOR_TIERS)
COLS = (32, 64, 192, 256, 288, 512, 2048, 2304)
NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO = 0x7E01, 0x7C00, 0xFC00, 0x0001, 0x7BFF, 0x8000
WEIGHT_ROWS = (1, 3, 16, 33, 100)


def cols_of(quant_type: QuantType) -> list[int]:
    return [cols for cols in COLS if cols % quant_type.block_elements == 0]


@EVERY_TYPE
def test_generic_equals_the_reference(quant_type: QuantType) -> None:
    runtime = _csrc.Runtime(1, "generic")
    for cols in cols_of(quant_type):
        x = activations(cols, 5, cols)
        weight = random_weight(quant_type, (7, cols), cols)
        (actual,) = linear(runtime, x, [load(weight)])
        assert same_bits(actual, linear_exact(x, weight))


@pytest.mark.parametrize("tier", [tier for tier in VECTOR_TIERS if tier in ("avx512", "amx")])
@pytest.mark.parametrize("quant_type", [QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ2_S])
def test_entries_are_gathered_as_they_are_permuted(quant_type: QuantType, tier: str) -> None:
    generic, fast = _csrc.Runtime(1, "generic"), _csrc.Runtime(1, tier)
    weight, x = load(random_weight(quant_type, (33, 2304), 1)), activations(2, 33, 2304)
    for num_rows in (1, 4, 33):
        (expected,) = linear(generic, x[:num_rows], [weight])
        for gathers in (False, True):
            _csrc.gather_grid(quant_type, gathers)
            assert same_bits(*linear(fast, x[:num_rows], [weight]), expected)


@pytest.mark.sharded(9)
@EVERY_TIER
@EVERY_TYPE
def test_tiers_equal_generic(quant_type: QuantType, tier: str) -> None:
    generic, fast = _csrc.Runtime(2, "generic"), _csrc.Runtime(2, tier)
    for i, cols in enumerate(cols_of(quant_type)):
        for j, num_rows in enumerate(WEIGHT_ROWS):
            x = activations(cols, AWKWARD_SIZES[(5 * i + j) % len(AWKWARD_SIZES)], cols)
            weight = load(random_weight(quant_type, (num_rows, cols), num_rows))
            assert same_bits(*linear(fast, x, [weight]), *linear(generic, x, [weight]))


@pytest.mark.sharded(9)
@all_pairs(quant_type=sorted(INTEGER_TYPES), tier=VECTOR_TIERS, cols=[512, 2048, 2304])
def test_sp02_rows_do_not_depend_on_the_batch(quant_type: QuantType, tier: str, cols: int) -> None:
    runtime = _csrc.Runtime(2, tier)
    x = activations(cols, 300, cols)
    weight = load(random_weight(quant_type, (65, cols), 1))
    alone = torch.cat([linear(runtime, x[t : t + 1], [weight])[0] for t in range(len(x))])
    for rows in (*AWKWARD_SIZES, 300):
        assert same_bits(linear(runtime, x[:rows], [weight])[0], alone[:rows])


@pytest.mark.sharded(9)
@all_pairs(quant_type=list(QuantType), tier=VECTOR_TIERS, byte=[0x00, 0x7F, 0x80, 0xFE, 0xFF])
def test_extreme_blocks(quant_type: QuantType, tier: str, byte: int) -> None:
    """The largest codes and sub-block scales, under ordinary float scales, fill the integers most."""
    cols, rows = 512, 19
    weight = random_weight(quant_type, (33, cols), byte)
    blocks = weight.blocks.reshape(33, -1, quant_type.block_bytes)
    scales = [blocks[..., at : at + 2].clone() for at in float16_places(quant_type)]
    blocks[:, ::2] = byte
    for at, kept in zip(float16_places(quant_type), scales, strict=True):
        if quant_type not in FLOAT_DTYPES:
            blocks[..., at : at + 2] = kept
    x = activations(byte, rows, cols)
    x[::5] = torch.where(x[::5] < 0, -3.0, 3.0)
    x[1] = 3.0
    generic, fast = _csrc.Runtime(1, "generic"), _csrc.Runtime(1, tier)
    expected = linear_any(generic, x, load(weight))
    for batch in (1, 4, 7, rows):
        assert same_numbers(linear_any(fast, x[:batch], load(weight)), expected[:batch])


@pytest.mark.sharded(9)
@all_pairs(
    quant_type=list(QuantType),
    tier=VECTOR_TIERS,
    scale=[NAN, INFINITY, MINUS_INFINITY, DENORMAL, MAX, MINUS_ZERO],
)
def test_gg16_hostile_scales(quant_type: QuantType, tier: str, scale: int) -> None:
    """Non-finite and extreme float scales give what IEEE arithmetic gives, in every tier."""
    cols, rows = 512, 17
    weight = random_weight(quant_type, (5, cols), scale)
    blocks = weight.blocks.reshape(5, -1, quant_type.block_bytes)
    for at in float16_places(quant_type):
        blocks[1:, 0, at : at + 2] = torch.tensor([scale & 255, scale >> 8], dtype=torch.uint8)
    x = activations(scale, rows, cols)
    generic, fast = _csrc.Runtime(1, "generic"), _csrc.Runtime(1, tier)
    expected = linear_any(generic, x, load(weight))
    for batch in (1, rows):
        assert same_numbers(linear_any(fast, x[:batch], load(weight)), expected[:batch])


@pytest.mark.sharded(9)
@EVERY_TYPE
@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
def test_hostile_activations(quant_type: QuantType, tier: str) -> None:
    """Rows with NaN, infinities, the largest floats, subnormals and zeros stay their own affair."""
    x = activations(1, 17, 512)
    extremes = [torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max, 1e-40, 0.0]
    for row, value in enumerate(extremes):
        x[row, 300] = value
    x[6] = torch.finfo(torch.float32).max
    x[7], x[8] = 0.0, 1e-39
    weight = random_weight(quant_type, (33, 512), 2)
    assert same_numbers(linear_any(_csrc.Runtime(2, tier), x, load(weight)), linear_exact(x, weight))


@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
def test_several_weights_share_one_input(tier: str) -> None:
    """Also where some types take a few rows as tiles, and others as rows."""
    types = list(QuantType)
    weights = [random_weight(t, (3 + 8 * i, 256), i) for i, t in enumerate(types)]
    runtime = _csrc.Runtime(2, tier)
    for rows in (*range(1, 9), 20, 40, 130):
        x = activations(rows, rows, 256)
        together = linear(runtime, x, [load(weight) for weight in weights])
        for weight, result in zip(weights, together, strict=True):
            assert same_bits(result, linear(runtime, x, [load(weight)])[0])


@pytest.mark.sharded(9)
@pytest.mark.parametrize("tier", ["generic", *VECTOR_TIERS])
@EVERY_TYPE
def test_nothing_is_read_beyond_the_last_byte(quant_type: QuantType, tier: str) -> None:
    """Weights and activations end where the next page may not be read: reading on would end the process."""
    runtime = _csrc.Runtime(1, tier)
    for cols in cols_of(quant_type):
        weight = random_weight(quant_type, (3, cols), 1)
        guarded = QuantTensor(before_a_hole(weight.blocks), quant_type, weight.shape)
        for rows in (1, 9, 33):
            x = activations(1, rows, cols)
            assert same_bits(
                *linear(runtime, before_a_hole(x), [load(guarded)]), *linear(runtime, x, [load(weight)])
            )


@EVERY_TIER
def test_a_graph_runs_with_fewer_rows(tier: str) -> None:
    capacity, cols = 40, 512
    runtime = _csrc.Runtime(2, tier)
    x = activations(3, capacity, cols)
    types = QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0
    weights = [random_weight(quant_type, (70, cols), 3) for quant_type in types]
    outs = [torch.empty(capacity, 70) for _ in weights]
    runtime.begin_capture(capacity)
    _csrc.linear(runtime, x, [load(weight) for weight in weights], outs)
    graph = runtime.end_capture()
    for rows in (*range(1, 10), 33, capacity):
        for out in outs:
            out.fill_(torch.nan)
        graph.run(rows)
        for weight, out in zip(weights, outs, strict=True):
            assert same_bits(out[:rows], linear(runtime, x[:rows], [load(weight)])[0])
            assert out[rows:].isnan().all()


def test_bad_arguments_are_named() -> None:
    runtime = _csrc.Runtime(1)
    weight = load(random_weight(QuantType.Q4_K, (4, 256), 0))
    x, out = torch.zeros(2, 256), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"x has shape \[2, 255\] instead of \[2, 256\]"):
        _csrc.linear(runtime, torch.zeros(2, 255), [weight], [out])
    with pytest.raises(ValueError, match=r"an output of linear has shape \[3, 4\]"):
        _csrc.linear(runtime, x, [weight], [torch.zeros(3, 4)])
    with pytest.raises(ValueError, match="one output for each"):
        _csrc.linear(runtime, x, [weight], [])
    with pytest.raises(ValueError, match="unit stride"):
        _csrc.linear(runtime, torch.zeros(256, 2).T, [weight], [out])
    with pytest.raises(ValueError, match="do not overlap"):
        _csrc.linear(runtime, x, [weight], [torch.zeros(1, 4).expand(2, 4)])
    with pytest.raises(TypeError):
        _csrc.linear(runtime, x.double(), [weight], [out])
    with pytest.raises(ValueError, match="stack of matrices"):
        _csrc.linear(runtime, x, [load(random_weight(QuantType.Q4_K, (2, 4, 256), 0))], [out])
