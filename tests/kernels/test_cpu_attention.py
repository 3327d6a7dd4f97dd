"""C++ attention: the reference's values, and the same bits however the rows are divided among calls."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cpu_cases import Output, Results, random, run_everywhere, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.attention.reference import attention as attention_reference
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, OutputGate, RopeSpec, Rows
from coldstream.kernels.rope.reference import rope_angles

Runtimes = list[_csrc.Runtime]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Random rows at `positions` of `state_ids`, over caches full of random numbers below the positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dims: int
    positions: torch.Tensor
    state_ids: torch.Tensor
    num_positions: int
    dtype: torch.dtype = torch.float32

    def inputs(self) -> list[torch.Tensor]:
        """query_gate, key, value, q_norm, k_norm, angles."""
        num_rows = len(self.positions)
        return [
            random(1, num_rows, self.num_heads * 2 * self.head_dim, scale=2),
            random(2, num_rows, self.num_kv_heads * self.head_dim, scale=2),
            random(3, num_rows, self.num_kv_heads * self.head_dim),
            random(4, self.head_dim) + 1,
            random(5, self.head_dim) + 1,
            rope_angles(self.positions, RopeSpec(self.rope_dims, 1e4)),
        ]

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions that no row may look at hold NaN."""
        shape = (int(self.state_ids.max()) + 1, self.num_positions, self.num_kv_heads, self.head_dim)
        caches = random(6, *shape), random(7, *shape)
        for cache in caches:
            for state_id in range(shape[0]):
                last = (
                    self.positions[self.state_ids == state_id].max()
                    if (self.state_ids == state_id).any()
                    else -1
                )
                cache[state_id, int(last) + 1 :] = torch.nan
        return caches[0].to(self.dtype), caches[1].to(self.dtype)


def consecutive(first: int, count: int, state_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(first, first + count, dtype=torch.int32)
    return positions, torch.full_like(positions, state_id)


def make_case(first: int, count: int, **changes: int | torch.dtype) -> Case:
    positions, state_ids = consecutive(first, count)
    case = Case(4, 2, 16, 8, positions, state_ids, num_positions=first + count + 3)
    return replace(case, **changes)  # type: ignore[arg-type]


def run(runtime: _csrc.Runtime, case: Case, bounds: list[int] | None = None) -> Results:
    """The outputs and both caches after calls on the rows between consecutive `bounds`."""
    query_gate, key, value, q_norm, k_norm, angles = case.inputs()
    k_cache, v_cache = case.caches()
    outputs = []
    bounds = [0, len(key)] if bounds is None else bounds
    for start, stop in pairwise(bounds):
        part = slice(start, stop)
        out = Output(stop - start, case.num_heads * case.head_dim)
        _csrc.attention(
            runtime, query_gate[part], key[part], value[part], angles[part],
            AttentionHeads(q_norm, k_norm, EPS), k_cache, v_cache,
            case.positions[part], case.state_ids[part], out.rows,
        )  # fmt: skip
        outputs.append(out.checked())
    return torch.cat(outputs), k_cache, v_cache


def check_values(case: Case, result: Results) -> None:
    query_gate, key, value, q_norm, k_norm, angles = (x.double() for x in case.inputs())
    caches = [cache.double() for cache in case.caches()]
    rows = Rows(case.positions, case.state_ids)
    heads = AttentionHeads(q_norm, k_norm, EPS)
    inputs = AttentionInputs(query_gate, key, value, angles)
    expected = attention_reference(inputs, heads, Caches(*caches), rows)
    tolerance = 2e-5 if case.dtype == torch.float32 else 5e-3
    torch.testing.assert_close(result[0].double(), expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(result[1:], caches, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance / 10, equal_nan=True)


@pytest.mark.parametrize("head_dim", [2, 3, 8, 15, 16, 17, 33, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_sizes(runtimes: Runtimes, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(5, 12, head_dim=head_dim, rope_dims=head_dim // 2 * 2, dtype=dtype)
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (6, 1), (8, 2), (7, 1), (70, 1)])
@pytest.mark.parametrize("count", [1, 20])
def test_head_groups(runtimes: Runtimes, num_heads: int, num_kv_heads: int, count: int) -> None:
    case = make_case(60, count, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


@pytest.mark.parametrize("head_dim", [3, 16, 33])
@pytest.mark.parametrize("count", [1, 20])
def test_without_a_gate_it_is_as_with_gates_that_are_open(
    runtimes: Runtimes, head_dim: int, count: int
) -> None:
    """A sigmoid of 1 changes no bit. Also as the written arithmetic has it."""
    case = make_case(60, count, head_dim=head_dim, rope_dims=head_dim // 2 * 2)
    query_gate, *others, angles = case.inputs()
    open_gates = query_gate.clone().reshape(count, case.num_heads, 2, head_dim)
    open_gates[:, :, 1] = 1e9
    queries = open_gates[:, :, 0].reshape(count, -1)

    def attend(runtime: _csrc.Runtime, query_gate: torch.Tensor, output_gate: OutputGate) -> Results:
        out, caches = Output(count, case.num_heads * head_dim), case.caches()
        _csrc.attention(
            runtime,
            query_gate,
            *others[:2],
            angles,
            AttentionHeads(*others[2:4], EPS, output_gate),
            *caches,
            case.positions,
            case.state_ids,
            out.rows,
        )
        return (out.checked(), *caches)

    both = open_gates.reshape(count, -1)
    expected = run_everywhere(lambda runtime: attend(runtime, both, "query"), runtimes)
    actual = run_everywhere(lambda runtime: attend(runtime, queries, "none"), runtimes)
    rows = Rows(case.positions, case.state_ids)
    heads = AttentionHeads(*others[2:4], EPS, output_gate="none")
    inputs = AttentionInputs(queries, *others[:2], angles)
    exact = attention_exact(inputs, heads, Caches(*case.caches()), rows)
    assert all(same_bits(want, got) for want, got in zip(expected, actual, strict=True))
    assert same_bits(exact, actual[0])


@pytest.mark.sharded(9)
@pytest.mark.parametrize("first", [0, 1, 62, 63, 64, 254, 255, 256, 257, 700])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_block_and_chunk_edges(runtimes: Runtimes, first: int, count: int) -> None:
    case = make_case(first, count)
    check_values(case, run_everywhere(lambda runtime: run(runtime, case), runtimes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_chunked_prefill_is_token_by_token(fastest: _csrc.Runtime, dtype: torch.dtype) -> None:
    case = make_case(0, 333, dtype=dtype)
    whole = run(fastest, case)
    check_values(case, whole)
    for bounds in (list(range(334)), [0, 7, 15, 16, 64, 65, 200, 320, 333], [0, 100, 333]):
        for want, got in zip(whole, run(fastest, case, bounds), strict=True):
            assert same_bits(want, got)


@given(first=st.integers(0, 300), bounds=st.sets(st.integers(1, 79), max_size=6))
@settings(max_examples=25, deadline=None)
def test_no_chunking_changes_a_bit(fastest: _csrc.Runtime, first: int, bounds: set[int]) -> None:
    case = make_case(first, 80)
    whole, parts = run(fastest, case), run(fastest, case, [0, *sorted(bounds), 80])
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("num_rows", [2, 3, 9, 64])
def test_sp02_attention_of_several_sequences_does_not_meet(runtimes: Runtimes, num_rows: int) -> None:
    # Sequence s has rows at positions 40 · s …: runs of 1, 2, 3, … rows, the highest first.
    lengths: list[int] = []
    while sum(lengths) < num_rows:
        lengths.append(min(len(lengths) + 1, num_rows - sum(lengths)))
    runs = [
        consecutive(40 * state_id, length, state_id)
        for state_id, length in reversed(list(enumerate(lengths)))
    ]
    positions, state_ids = (torch.cat(parts) for parts in zip(*runs, strict=True))
    case = Case(4, 2, 16, 8, positions, state_ids, num_positions=1000)
    together = run_everywhere(lambda runtime: run(runtime, case), runtimes)
    check_values(case, together)
    alone = run(runtimes[-1], case, list(range(num_rows + 1)))
    assert all(same_bits(a, b) for a, b in zip(together, alone, strict=True))


def test_float16_caches_hold_the_nearest_values(runtimes: Runtimes) -> None:
    large, small = [65504.0, 65519.99, 65520.0, -1e30], [6e-8, 2.9e-8, 2.98e-8, 6.1e-5]
    special = torch.tensor([0.0, -0.0, 1.0, *large, *small, 1 + 2**-11, 1 + 3 * 2**-11])
    values = torch.cat((special, random(8, 87), random(9, 100, scale=1e-5))).unsqueeze(0)
    zeros, ones = torch.zeros(1, 200), torch.ones(200)

    def call(runtime: _csrc.Runtime) -> Results:
        caches = [torch.zeros(1, 1, 1, 200, dtype=torch.float16) for _ in range(2)]
        place = torch.zeros(1, dtype=torch.int32)
        _csrc.attention(
            runtime, torch.zeros(1, 400), zeros, values, torch.empty(1, 0, 2),
            AttentionHeads(ones, ones, EPS), *caches, place, place, torch.zeros(1, 200),
        )  # fmt: skip
        return (caches[1],)

    assert same_bits(run_everywhere(call, runtimes)[0].flatten(), values.half().flatten())


@pytest.mark.parametrize(
    ("position", "state_id"),
    [(-1, 0), (20, 0), (2**31 - 1, 0), (-(2**31), 0), (0, -1), (0, 1), (0, 2**31 - 1)],
)
@pytest.mark.parametrize("count", [1, 12])
def test_rows_outside_the_caches_are_refused(
    runtimes: Runtimes, position: int, state_id: int, count: int
) -> None:
    case = make_case(0, count, num_positions=20)
    case.positions[-1], case.state_ids[-1] = position, state_id
    caches = [torch.zeros(3, 20, 2, 16) for _ in range(2)]  # a sequence before and after the one handed over
    query_gate, key, value, q_norm, k_norm, _ = make_case(0, count).inputs()
    for runtime in runtimes:
        out = Output(count, 64)
        with pytest.raises(ValueError, match="sequence or position lies outside the caches"):
            _csrc.attention(
                runtime, query_gate, key, value, torch.zeros(count, 4, 2),
                AttentionHeads(q_norm, k_norm, EPS), caches[0][1:2], caches[1][1:2],
                case.positions, case.state_ids, out.rows,
            )  # fmt: skip
        assert out.rows.isnan().all()
    assert not caches[0][[0, 2]].any()
    assert not caches[1][[0, 2]].any()


def test_wrong_arrays_are_refused(fastest: _csrc.Runtime) -> None:
    query_gate, key, value, q_norm, k_norm, angles = make_case(0, 2).inputs()
    place, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 64)
    cache = torch.zeros(1, 5, 2, 16)

    def call(
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        angles: torch.Tensor = angles,
        q_norm: torch.Tensor = q_norm,
        output_gate: Any = "query",
        gate: torch.Tensor | None = None,
    ) -> None:
        _csrc.attention(
            fastest,
            query_gate,
            key,
            value,
            angles,
            AttentionHeads(q_norm, k_norm, EPS, output_gate),
            k_cache,
            v_cache,
            place,
            place,
            out,
            gate=gate,
        )

    with pytest.raises(ValueError, match="both be float16, both float32 or both int8"):
        call(cache, cache.half(), out)
    with pytest.raises(ValueError, match="both be float16, both float32 or both int8"):
        call(cache.bfloat16(), cache.bfloat16(), out)
    for wrong in (q_norm.double(), q_norm.view(1, -1)):
        with pytest.raises(ValueError, match="q_norm has a wrong type or shape"):
            call(cache, cache, out, q_norm=wrong)
    with pytest.raises(ValueError, match="v_cache must be"):
        call(cache, cache[:, :4], out)
    with pytest.raises(ValueError, match="k_cache must be contiguous"):
        call(cache.repeat(1, 2, 1, 1)[:, ::2], cache, out)
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        call(cache, cache, torch.zeros(2, 48))
    with pytest.raises(ValueError, match=r"query_gate must be \[2, 64\], not \[2, 128\]"):
        call(cache, cache, torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"query_gate must be \[2, 64\], not \[2, 128\]"):
        call(cache, cache, out, output_gate="head", gate=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="output_gate row is none of: none, query, head, element"):
        call(cache, cache, out, output_gate="row")
    query_gate = query_gate[:, :64]
    for kind, width in (("head", 4), ("element", 64)):
        with pytest.raises(ValueError, match="gate is missing"):
            call(cache, cache, out, output_gate=kind)
        with pytest.raises(ValueError, match=rf"gate must be \[2, {width}\], not \[2, 5\]"):
            call(cache, cache, out, output_gate=kind, gate=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="gate belongs to another output_gate"):
        call(cache, cache, out, output_gate="none", gate=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="rows of 8 elements in k_cache hold no heads of 16"):
        call(cache[..., :8].contiguous(), cache[..., :8].contiguous(), out)
    with pytest.raises(ValueError, match="more dimensions than a head has"):
        call(cache, cache, out, torch.zeros(2, 9, 2))
