"""The definition of attention over integers: its planes, its caches, and its error."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import EXTREMES, Case, make_case, records
from hypothesis import given
from hypothesis import strategies as st

from all_pairs import all_pairs
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.attention.cache_types import CACHE_TYPES, CacheType
from coldstream.kernels.attention.exact import attend, attention_exact, heads_of
from coldstream.kernels.attention.hadamard import head_block, rotate_head, rotate_head_back
from coldstream.kernels.attention.levels import LARGEST_LEVEL, LEVELS
from coldstream.kernels.attention.planes import (
    LARGEST_TWO_PLANE_CODE,
    Planes,
    multiply_planes,
    round_planes,
)
from coldstream.kernels.attention.reference import attention
from coldstream.kernels.ops import Caches

INTEGER_TYPES = ("i16", "i8", "i4", "i3")
# RMS error of a head's output over its RMS size, with two channels so many times as great as the others; a
# head of 256, 1024 positions. A little above what docs/results/integer_attention.json has.
LARGEST_ERRORS = {
    ("i16", 1): 0.00018,
    ("i16", 20): 0.0002,
    ("i16", 100): 0.00055,
    ("i8", 1): 0.0165,
    ("i8", 20): 0.02,
    ("i8", 100): 0.054,
    ("i4", 1): 0.24,
    ("i4", 20): 0.36,
    ("i4", 100): 2.1,
    ("i3", 1): 0.43,
    ("i3", 20): 0.88,
    ("i3", 100): 3.1,
}

finite_rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70)


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(finite_rows, st.sampled_from([1, 2]))
def test_planes_are_the_nearest_codes_and_bytes(values: list[float], num_planes: int) -> None:
    x = numbers(values)
    planes = round_planes(x, num_planes)
    assert planes.high.abs().max() <= 127
    assert planes.low.min() >= -128
    assert planes.low.max() <= 127
    assert torch.equal(planes.codes, planes.high * (256 if num_planes == 2 else 1) + planes.low)
    maximum, limit = np.abs(values).max(), 127 if num_planes == 1 else LARGEST_TWO_PLANE_CODE
    if maximum < 2.0**-100:
        assert not planes.scale
        assert not planes.codes.any()
        return
    assert planes.scale == np.float32(maximum) / np.float32(limit / (256 if num_planes == 2 else 1))
    assert planes.codes.abs().max() == limit
    exact = x.double() / maximum * limit
    assert (planes.codes - exact).abs().max() < 0.5 + 0.005


def test_halves_go_to_the_even_code() -> None:
    # With a maximum of 127, or 32639, the factor is 1.
    assert round_planes(numbers([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), 1).codes.tolist() == [
        127, 0, 2, 2, 0, -2,
    ]  # fmt: skip
    two = round_planes(numbers([32639.0, 127.5, 128.5, -128.5, 383.5]), 2)
    assert two.codes.tolist() == [32639, 128, 128, -128, 384]
    assert two.high.tolist() == [127, 1, 1, 0, 2]
    assert two.low.tolist() == [127, -128, -128, -128, -128]
    assert two.scale == 256.0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_a_scale_of_nan(value: float) -> None:
    planes = round_planes(numbers([[1.0, value, 2.0], [1.0, 2.0, 3.0]]), 2)  # type: ignore[list-item]
    assert planes.scale.isnan().tolist() == [True, False]
    assert not planes.codes[0].any()
    assert planes.codes[1, 2] == LARGEST_TWO_PLANE_CODE


@given(st.integers(0, 2**31), st.integers(1, 512), st.sampled_from([1, 2]), st.booleans())
def test_products_are_sums_of_int32_in_any_order(seed: int, size: int, planes: int, extreme: bool) -> None:
    random = np.random.default_rng(seed)

    def codes(num_planes: int) -> Planes:
        limit = 127 if num_planes == 1 else LARGEST_TWO_PLANE_CODE
        # −128 in a low plane and 127 in a high one: the greatest products of bytes.
        drawn = (
            random.choice([limit, -limit, limit - 255 * (num_planes - 1)])
            if extreme
            else random.integers(-limit, limit + 1, size)
        )
        return Planes(
            torch.from_numpy(np.broadcast_to(drawn, size).astype(np.int32)), numbers([1.0])[0], num_planes
        )

    x, y = codes(2), codes(planes)
    high = np.int32(256) * x.high.numpy().astype(np.int32) * y.high.numpy()
    middle = x.high.numpy() * y.low.numpy() + x.low.numpy() * y.high.numpy()
    total = (high + middle).sum(dtype=np.int64)
    assert abs(int(total)) <= 4161536 * size < 2**31
    assert multiply_planes("n,n->", x, y) == np.float32(total)
    # Any order of 32-bit additions gives the same, because even the sum of magnitudes fits.
    assert (np.abs(high.astype(np.int64)) + np.abs(middle)).sum() < 2**31


@given(st.integers(0, 2**31), st.sampled_from([16, 48, 64, 80, 128, 192, 256, 512]))
def test_rotating_a_head_keeps_products_and_is_undone(seed: int, size: int) -> None:
    x, y = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    block = head_block(size)
    assert size % block == 0
    assert size // block % 2 == 1
    signs = [[(-1.0) ** (i & j).bit_count() for i in range(block)] for j in range(block)]
    matrix = torch.block_diag(*[torch.tensor(signs, dtype=torch.float64)] * (size // block))
    torch.testing.assert_close(rotate_head(x), matrix @ x)
    torch.testing.assert_close(rotate_head_back(rotate_head(x)), x)
    torch.testing.assert_close(rotate_head(x) @ rotate_head(y) / block, x @ y)


@pytest.mark.parametrize("name", ["i16", "i8"])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256, 512])
def test_rows_are_planes_then_a_scale_then_zeros(name: str, head_dim: int) -> None:
    cache_type = CACHE_TYPES[name]
    x = torch.randn(3, head_dim, generator=torch.Generator().manual_seed(1))
    rows = cache_type.encode(x)
    planes = round_planes(rotate_head(x), cache_type.num_planes)
    size = cache_type.num_planes * head_dim
    assert rows.dtype == torch.int8
    assert rows.shape == (3, size + 16)
    assert torch.equal(rows[:, :head_dim], planes.high.to(torch.int8))
    if cache_type.num_planes == 2:
        assert torch.equal(rows[:, head_dim:size], planes.low.to(torch.int8))
    assert torch.equal(rows[:, size : size + 4].contiguous().view(torch.float32).squeeze(-1), planes.scale)
    assert not rows[:, size + 4 :].any()
    read = cache_type.planes(rows, head_dim)
    assert torch.equal(read.codes, planes.codes)
    assert torch.equal(read.scale, planes.scale)
    assert CacheType.of(rows, head_dim) == cache_type
    error = cache_type.rotate_back(cache_type.decode(rows, head_dim)) - x
    assert error.norm() / x.norm() < (2e-4 if cache_type.num_planes == 2 else 0.03)


@given(st.integers(0, 2**31), st.sampled_from([32, 64, 96, 128, 256, 512]), st.sampled_from(["i4", "i3"]))
def test_packed_rows_hold_the_nearest_of_what_there_is(seed: int, head_dim: int, name: str) -> None:
    cache_type = CACHE_TYPES[name]
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.standard_t(random.integers(1, 9), (3, head_dim)).astype(np.float32))
    rows = cache_type.encode(x)
    code_bytes = head_dim * cache_type.value_bits // 8
    assert rows.shape == (3, -(-(code_bytes + 4) // 16) * 16)
    assert not rows[:, code_bytes + 4 :].any()
    planes = cache_type.planes(rows, head_dim)
    rotated = rotate_head(x)
    offered = torch.arange(-7, 8) if name == "i4" else torch.tensor(LEVELS)
    assert torch.isin(planes.codes, offered).all()
    limit = 7 if name == "i4" else LARGEST_LEVEL
    assert torch.equal(planes.scale, rotated.abs().amax(dim=-1) / limit)
    exact = rotated.double() / planes.scale.double().unsqueeze(-1)
    distances = (exact.unsqueeze(-1) - offered).abs()
    assert ((exact - planes.codes).abs() <= distances.amin(dim=-1) + 1e-4).all()
    assert torch.equal(cache_type.encode(x[1]), rows[1])
    assert CacheType.of(rows, head_dim) == cache_type


@pytest.mark.parametrize("head_dim", range(16, 513, 16))
def test_every_type_is_known_by_the_length_of_its_rows(head_dim: int) -> None:
    lengths = [
        CACHE_LAYOUTS[n].row_bytes(head_dim) for n in INTEGER_TYPES if CACHE_LAYOUTS[n].holds(head_dim)
    ]
    assert len(set(lengths)) == len(lengths) >= 2


@pytest.mark.parametrize("name", ["i4", "i3"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0, 2.0**-120])
def test_packed_rows_of_nothing_and_of_what_is_not_finite(name: str, value: float) -> None:
    cache_type = CACHE_TYPES[name]
    rows = cache_type.encode(torch.full((32,), value))
    assert rows[: 4 * cache_type.value_bits].unique().tolist() == ([-120] if name == "i4" else [0])
    scale = cache_type.planes(rows, 32).scale
    assert scale.isnan() if not abs(value) < 1 else scale == 0


@pytest.mark.parametrize(("name", "multiple"), [("i16", 16), ("i8", 16), ("i4", 32), ("i3", 32)])
@pytest.mark.parametrize("head_dim", [0, 8, 15, 40, 528, 544])
def test_heads_of_other_sizes_are_refused(name: str, multiple: int, head_dim: int) -> None:
    with pytest.raises(
        ValueError, match=f"{name} caches hold heads of multiples of {multiple} values up to 512"
    ):
        CACHE_LAYOUTS[name].row_bytes(head_dim)


def head_error(name: str, outlier: int) -> float:
    """Error of one head of 256 over 1024 positions, against float64 attention."""
    generator = torch.Generator().manual_seed(256)
    query, key, value = (torch.randn(n, 1, 256, generator=generator) for n in (32, 1024, 1024))
    query *= 2  # so that some positions weigh much
    channels = torch.tensor([3, 133])
    key[..., channels] *= outlier
    query[..., channels] /= outlier  # as a model does whose scores stay what they are
    value[..., channels] *= outlier
    cache_type = CACHE_TYPES[name]
    rows = [cache_type.encode(x) for x in (key, value)]
    queries = cache_type.rotate_query(query * 256**-0.5)
    got = torch.stack([cache_type.rotate_back(attend(heads_of(cache_type, q, *rows))) for q in queries])
    scores = torch.einsum("lhd,phd->hlp", query.double(), key.double()) * 256**-0.5
    want = torch.einsum("hlp,phd->lhd", scores.softmax(dim=-1), value.double())
    return float(((got - want).square().mean() / want.square().mean()).sqrt())


@pytest.mark.sharded(9)
@pytest.mark.parametrize(("name", "outlier"), LARGEST_ERRORS)
def test_a_head_is_as_close_to_float64_as_its_roundings_allow(name: str, outlier: int) -> None:
    error = head_error(name, outlier)
    assert LARGEST_ERRORS[name, outlier] / 3 < error < LARGEST_ERRORS[name, outlier]


@pytest.mark.parametrize("name", INTEGER_TYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_both_references_agree(name: str, window: int | None) -> None:
    """Over the same cache, integers against floats: what is left are roundings to 16 bits."""
    case = make_case((0, 250, 8), cache_name=name, window=window)
    # Floats multiply weights of zero with what a row does not see.
    caches = Caches(*replace(case, window=None).caches())
    out, *_ = case.expected()
    plain = attention(*records(*case.inputs(), window=window), caches, case.rows)
    torch.testing.assert_close(out, plain, atol=5e-4, rtol=1e-3)


def seen_by_hand(case: Case) -> torch.Tensor:
    """float32 [T, H · D]: each row alone, with the positions that it does not see overwritten."""
    outputs = []
    *tensors, angles = case.inputs()
    query_gate, key, value, *norms = tensors
    _, k_cache, v_cache = case.expected()
    for row, position in enumerate(case.positions.tolist()):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        caches = [cache.clone() for cache in (k_cache, v_cache)]
        for cache in caches:
            cache[:, position:] = 77
            cache[:, :first] = -77
        part = slice(row, row + 1)
        alone = replace(case, positions=case.positions[part], state_ids=case.state_ids[part])
        outputs.append(
            attention_exact(
                *records(query_gate[part], key[part], value[part], *norms, angles[part], window=case.window),
                Caches(*caches),
                alone.rows,
            )
        )
    return torch.cat(outputs)


@pytest.mark.sharded(9)
@all_pairs(name=INTEGER_TYPES, first=[0, 60, 250, 500], window=[None, 1, 64, 100])
def test_a_row_sees_its_positions_alone(name: str, first: int, window: int | None) -> None:
    case = make_case((0, first, 7), cache_name=name, window=window)
    assert torch.equal(case.expected()[0], seen_by_hand(case))


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", INTEGER_TYPES)
@pytest.mark.parametrize("value", EXTREMES)
def test_extreme_values_are_zeros_or_nan_and_stay_with_who_sees_them(name: str, value: float) -> None:
    case = make_case((0, 62, 4), cache_name=name)
    *tensors, angles = case.inputs()
    tensors[2][2] *= value  # the values of the third row, at the first position of a block
    before = case.expected()[0]
    out = attention_exact(*records(*tensors, angles), Caches(*case.caches()), case.rows)
    assert torch.equal(out[:2], before[:2])
    assert out[2:].isnan().all() == (not np.isfinite(value) or value >= 1e38)
