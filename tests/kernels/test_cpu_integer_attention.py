"""C++ attention over integers: its definition's bits on every tier, however rows are divided among calls."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_cases import EPS, EXTREMES, Case, make_case, records
from cpu_cases import Output, Results, run_everywhere, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from all_pairs import all_pairs
from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.ops import AttentionHeads, Caches

Runtimes = list[_csrc.Runtime]
INTEGER_TYPES = ("i16", "i8", "i4", "i3")


def run(
    runtime: _csrc.Runtime,
    case: Case,
    inputs: list[torch.Tensor] | None = None,
    bounds: list[int] | None = None,
) -> Results:
    """The outputs and both caches after calls on the rows between consecutive `bounds`."""
    query_gate, key, value, q_norm, k_norm, angles = inputs or case.inputs()
    caches = case.caches()
    outputs = []
    for start, stop in pairwise(bounds or [0, len(key)]):
        part = slice(start, stop)
        out = Output(stop - start, case.num_heads * case.head_dim)
        _csrc.attention(
            runtime, query_gate[part], key[part], value[part], angles[part],
            AttentionHeads(q_norm, k_norm, EPS, window=case.window), *caches,
            case.positions[part], case.state_ids[part], out.rows,
        )  # fmt: skip
        outputs.append(out.rows.clone())
    return torch.cat(outputs), *caches


def check(runtimes: Runtimes, case: Case) -> None:
    got = run_everywhere(lambda runtime: run(runtime, case), runtimes)
    for want, each in zip(case.expected(), got, strict=True):
        assert same_bits(want, each)


@pytest.mark.sharded
@pytest.mark.parametrize("name", INTEGER_TYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 112, 128, 192, 256, 272, 512])
def test_head_sizes(runtimes: Runtimes, name: str, head_dim: int) -> None:
    if not CACHE_LAYOUTS[name].holds(head_dim):
        pytest.skip("no such rows")
    check(runtimes, make_case((0, 61, 9), cache_name=name, head_dim=head_dim))


@pytest.mark.sharded(9)
@all_pairs(name=INTEGER_TYPES, groups=[(1, 1), (3, 3), (6, 1), (8, 2), (70, 1)], count=[1, 20])
def test_head_groups(runtimes: Runtimes, name: str, groups: tuple[int, int], count: int) -> None:
    heads = dict(zip(("num_heads", "num_kv_heads"), groups, strict=True))
    check(runtimes, make_case((0, 60, count), cache_name=name, **heads))


# Sizes with 64 channels, 32 and 16 behind whole vectors of channels.
KEYS = [*((name, size) for name in ("i16", "i8") for size in (48, 80, 128, 272)), ("i4", 96), ("i3", 288)]


@pytest.mark.sharded(3)
@all_pairs(kind=KEYS, num_heads=[1, 2, 3, 4, 7])
def test_few_queries_of_a_head(runtimes: Runtimes, kind: tuple[str, int], num_heads: int) -> None:
    """With AVX-512 they meet keys in the layout of the cache."""
    name, size = kind
    heads = {"num_heads": num_heads, "num_kv_heads": 1}
    check(runtimes, make_case((0, 85, 1), cache_name=name, head_dim=size, **heads))


@pytest.mark.sharded
@all_pairs(name=INTEGER_TYPES, first=[0, 1, 62, 63, 64, 254, 255, 256, 257, 520], count=[1, 2, 9])
def test_block_and_chunk_edges(runtimes: Runtimes, name: str, first: int, count: int) -> None:
    check(runtimes, make_case((0, first, count), cache_name=name, head_dim=32))


@pytest.mark.sharded(2)
@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_prompts(runtimes: Runtimes, name: str) -> None:
    check(runtimes, make_case((0, 220, 64), cache_name=name, num_heads=8, num_kv_heads=1))


@pytest.mark.sharded
@pytest.mark.parametrize("name", INTEGER_TYPES)
def test_rows_of_several_sequences_do_not_meet(runtimes: Runtimes, name: str) -> None:
    check(runtimes, make_case((2, 63, 3), (0, 0, 5), (1, 250, 12), cache_name=name))


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(INTEGER_TYPES),
    first=st.integers(0, 600),
    count=st.integers(1, 64),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
    bounds=st.sets(st.integers(1, 63), max_size=5),
    tier=st.sampled_from(_csrc.supported_tiers()),
)
def test_no_chunking_and_no_tier_changes_a_bit(
    runtimes: Runtimes, name: str, first: int, count: int, head_dim: int, bounds: set[int], tier: str
) -> None:
    case = make_case((0, first, count), cache_name=name, head_dim=head_dim)
    (alone,) = [each for each in runtimes if each.tier == tier and each.threads == 1]
    parts = run(alone, case, bounds=[0, *sorted(bound for bound in bounds if bound < count), count])
    whole = run(runtimes[-1], case)
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.sharded(of="kernels")
@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(INTEGER_TYPES),
    first=st.integers(0, 520),
    count=st.integers(1, 12),
    head_dim=st.sampled_from([32, 64, 96, 128, 256]),
)
def test_any_rows_have_the_bits_of_the_definition(
    runtimes: Runtimes, name: str, first: int, count: int, head_dim: int
) -> None:
    check(runtimes, make_case((0, first, count), cache_name=name, head_dim=head_dim))


@pytest.mark.sharded
@all_pairs(name=INTEGER_TYPES, value=EXTREMES, spoiled=[1, 2])
def test_extreme_keys_and_values_have_the_bits_of_the_definition(
    runtimes: Runtimes, name: str, value: float, spoiled: int
) -> None:
    """In a row in the middle of a block; any NaN equals any other."""
    case = make_case((0, 62, 5), cache_name=name)
    inputs = case.inputs()
    inputs[spoiled][3] *= value  # which the row before does not see, in the same block
    got = run_everywhere(lambda runtime: run(runtime, case, inputs), runtimes)
    caches = case.caches()
    out = attention_exact(*records(*inputs), Caches(*caches), case.rows)
    np.testing.assert_array_equal(got[0].numpy(), out.numpy())
    for want, each in zip(caches, got[1:], strict=True):
        assert same_bits(want, each)


TYPES = (*INTEGER_TYPES, "f32", "f16")


WINDOWS = (1, 2, 63, 64, 65, 100, 256, 300, 10**12)
ROWS = ((0, 9), (60, 1), (250, 12), (519, 3))


@pytest.mark.sharded(9)
@all_pairs(name=TYPES, window=WINDOWS, rows=ROWS)
def test_windows(runtimes: Runtimes, name: str, window: int, rows: tuple[int, int]) -> None:
    """What lies before them decodes to NaN, so that a position too many would be seen."""
    check(runtimes, make_case((0, *rows), cache_name=name, head_dim=32, window=window))


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("window", [20, 70, 300])
def test_windows_of_prompts_begin_in_several_chunks(runtimes: Runtimes, name: str, window: int) -> None:
    parts = (0, 240 + window, 24), (1, 5, 3)
    check(runtimes, make_case(*parts, cache_name=name, head_dim=32, num_heads=4, window=window))


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(TYPES),
    window=st.integers(1, 400),
    first=st.integers(0, 600),
    count=st.integers(1, 64),
    bounds=st.sets(st.integers(1, 63), max_size=5),
)
def test_no_chunking_changes_a_bit_of_windows(
    runtimes: Runtimes, name: str, window: int, first: int, count: int, bounds: set[int]
) -> None:
    case = make_case((0, first, count), cache_name=name, head_dim=32, window=window)
    parts = run(runtimes[0], case, bounds=[0, *sorted(bound for bound in bounds if bound < count), count])
    whole = run(runtimes[-1], case)
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("window", [0, -1])
def test_windows_of_nothing_are_refused(fastest: _csrc.Runtime, window: int) -> None:
    with pytest.raises(ValueError, match=f"a window of {window} positions holds nothing"):
        run(fastest, make_case((0, 0, 2), cache_name="i16", window=window))


def test_rows_that_hold_no_such_heads_are_refused(fastest: _csrc.Runtime) -> None:
    case = make_case((0, 0, 2), cache_name="i16")
    query_gate, key, value, q_norm, k_norm, angles = case.inputs()

    def call(row: int, dtype: torch.dtype = torch.int8) -> None:
        caches = [torch.zeros(1, 5, 2, row, dtype=dtype) for _ in range(2)]
        _csrc.attention(
            fastest, query_gate, key, value, angles, AttentionHeads(q_norm, k_norm, EPS), *caches,
            case.positions, case.state_ids, torch.zeros(2, 256),
        )  # fmt: skip

    call(2 * 64 + 16)
    call(64 + 16)
    call(32 + 16)
    call(24 + 8)
    for row in (64, 128, 143):
        with pytest.raises(ValueError, match=f"rows of {row} elements in k_cache hold no heads of 64"):
            call(row)
    with pytest.raises(ValueError, match="both be float16, both float32 or both int8"):
        call(80, torch.uint8)
