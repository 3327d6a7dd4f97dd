"""Attention on the GPU: the bits of the exact reference, in decode and in prefill."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attention_cases import AWKWARD_ROWS, EPS, EXTREMES, Case, make_case
from guarded import Guarded

from coldstream.kernels.arithmetic.reference import QuantActivations, quantize_activations
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import (
    MERGE_SHARED_BYTES,
    AttentionInputs,
    AttentionKernels,
    AttentionShape,
    Caches,
    DecodeWorkspace,
)
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.limits import DeviceLimits, device_limits
from coldstream.kernels.ops import Rows

H200 = DeviceLimits(132, 227 * 1024, 228 * 1024)
SMALL = DeviceLimits(84, 99 * 1024, 100 * 1024)


class Runner:
    """One case on the device, in calls on the rows between cuts."""

    def __init__(
        self, case: Case, max_positions: int | None = None, device: DeviceLimits | None = None
    ) -> None:
        self.case = case
        shape = AttentionShape(case.num_heads, case.num_kv_heads, case.head_dim, case.cache_type, case.window)
        self.kernels = AttentionKernels(shape, device or device_limits())
        self.tensors = [tensor.cuda() for tensor in case.inputs()]
        self.caches = Caches(*(cache.cuda() for cache in case.caches()))
        num_rows = len(case.positions)
        values, stats = DecodeWorkspace.shapes(shape, num_rows, max_positions or case.num_positions)
        self.workspace = DecodeWorkspace(
            torch.full(values, torch.nan, device="cuda"),
            torch.full(stats, torch.nan, device="cuda"),
        )

    def prepare(self, part: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """Prepared queries, the query_gate they came from, and their rows."""
        query_gate, key, value, q_norm, k_norm, angles = self.tensors
        rows = Rows(self.case.positions[part].cuda(), self.case.slots[part].cuda())
        inputs = AttentionInputs(query_gate[part], key[part], value[part], q_norm, k_norm, angles[part], EPS)
        query = Guarded(len(rows.slots), self.case.num_heads, self.case.head_dim)
        self.kernels.prepare(inputs, self.caches, rows, query.tensor)
        query.checked()
        return query.tensor, query_gate[part], rows

    def decode(self, part: slice = slice(None)) -> torch.Tensor:
        query, query_gate, rows = self.prepare(part)
        out = Guarded(len(query), self.case.num_heads * self.case.head_dim)
        self.kernels.decode(query, query_gate, self.caches, rows, self.workspace, out=out.tensor)
        return out.checked()

    def prefill(self, part: slice = slice(None)) -> torch.Tensor:
        query, query_gate, rows = self.prepare(part)
        out = Guarded(len(query), self.case.num_heads * self.case.head_dim)
        self.kernels.prefill(query, query_gate, self.caches, rows, out.tensor)
        return out.checked()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(
        x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
    )


def check(case: Case, device: DeviceLimits | None = None) -> None:
    """Decode, and prefill by tiles of every height."""
    out, *caches = case.expected()
    runner = Runner(case, device=device)
    assert same_bits(runner.decode(), out)
    for got, want in zip((runner.caches.k, runner.caches.v), caches, strict=True):
        assert same_bits(got.cpu(), want)
    for tile in runner.kernels.prefill_tiles:
        runner = Runner(case, device=device)
        runner.kernels.prefill_tiles = (tile,)
        assert same_bits(runner.prefill(), out), tile


@pytest.mark.gpu
@pytest.mark.parametrize("count", AWKWARD_ROWS)
def test_row_counts(count: int) -> None:
    check(make_case((0, 5, count)))


@pytest.mark.gpu
def test_a_thousand_rows() -> None:
    # The reference takes long for each row, and rows do not depend on each other.
    case = make_case((0, 0, 1000), num_heads=2, num_kv_heads=1, head_dim=32, rope_dims=8)
    some = torch.tensor([0, 1, 63, 64, 127, 255, 256, 257, 500, 511, 512, 767, 998, 999])
    runner = Runner(case)
    decoded = runner.decode()
    query_gate, key, value, q_norm, k_norm, angles = case.inputs()
    rows = Rows(case.positions[some], case.slots[some])
    caches = runner.caches.k.cpu(), runner.caches.v.cpu()
    expected = attention_exact(
        query_gate[some], key[some], value[some], q_norm, k_norm, EPS, angles[some], *caches, rows
    )
    assert same_bits(decoded[some], expected)
    for tile in runner.kernels.prefill_tiles:
        runner.kernels.prefill_tiles = (tile,)
        assert same_bits(runner.prefill(), decoded), tile


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 62, 63, 64, 191, 254, 255, 256, 257, 511, 700])
def test_block_and_chunk_edges(first: int) -> None:
    check(make_case((0, first, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_name", ["f16", "f32", "q8_0", "q4_0", "tq3_0"])
def test_head_sizes_and_cache_types(head_dim: int, cache_name: str) -> None:
    check(make_case((0, 250, 9), head_dim=head_dim, rope_dims=head_dim // 4, cache_name=cache_name))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", ["q8_0", "q4_0", "tq3_0"])
def test_scales_of_extreme_values(cache_name: str) -> None:
    case = make_case((0, 0, len(EXTREMES)), cache_name=cache_name)
    value = case.inputs()[2] * torch.tensor(EXTREMES).unsqueeze(-1)
    runner = Runner(case, device=H200)
    runner.tensors[2] = value.cuda()
    runner.prepare()
    kept = runner.caches.v[0, : len(EXTREMES)].cpu()
    assert same_bits(kept, case.cache_type.encode(value.unflatten(-1, (case.num_kv_heads, case.head_dim))))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 40, 80, 512])
def test_odd_head_sizes(head_dim: int) -> None:
    check(make_case((0, 250, 9), head_dim=head_dim, rope_dims=8))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 2), (16, 2), (8, 1), (7, 1), (20, 2)]
)
def test_head_groups(num_heads: int, num_kv_heads: int) -> None:
    check(make_case((0, 60, 10), num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.gpu
def test_rows_of_several_slots() -> None:
    check(make_case((3, 300, 1), (0, 0, 5), (2, 63, 2), (1, 250, 20), num_heads=16))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 160])
def test_turned_heads_of_odd_numbers_of_blocks(head_dim: int) -> None:
    # Seven heads of 160 leave the last group of activations half empty.
    case = make_case((3, 300, 1), (0, 0, 5), (1, 250, 20), num_heads=7, num_kv_heads=1, head_dim=head_dim)
    check(replace(case, cache_name="tq3_0", window=100))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3, 64, 100, 300])
def test_window(window: int) -> None:
    check(make_case((0, 290, 12), (1, 0, 20), window=window))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_name", ["f16", "q8_0", "tq3_0"])
def test_less_shared_memory_changes_nothing(cache_name: str) -> None:
    check(make_case((0, 250, 9), head_dim=256, cache_name=cache_name), device=SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [Runner.decode, Runner.prefill])
def test_no_cut_changes_a_bit(call: Callable[[Runner, slice], torch.Tensor]) -> None:
    case = make_case((0, 0, 600), num_heads=16, head_dim=128)
    whole = Runner(case).prefill()
    for cuts in ([0, 7, 15, 16, 64, 65, 200, 320, 600], [0, 599, 600]):
        runner = Runner(case)
        parts = [call(runner, slice(start, stop)) for start, stop in pairwise(cuts)]
        assert same_bits(torch.cat(parts), whole)


@pytest.mark.gpu
def test_long_contexts_have_many_chunks() -> None:
    # More chunks than fit into one batch of merge factors, and more items than blocks.
    case = make_case((0, 20000, 2), (1, 40, 1), num_heads=16, head_dim=64)
    decoded = Runner(case, max_positions=32768).decode()
    assert same_bits(decoded, Runner(case).prefill())
    assert not decoded.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "num_heads"), [(256, 16), (128, 4), (64, 8), (80, 4)])
def test_quantised_results(head_dim: int, num_heads: int) -> None:
    case = make_case((0, 300, 5), head_dim=head_dim, num_heads=num_heads)
    runner, width = Runner(case), num_heads * head_dim
    query, query_gate, rows = runner.prepare()
    groups = -(-width // 256)
    codes, scales = Guarded(5, groups * 256, dtype=torch.int8), Guarded(5, groups)
    sums, out = Guarded(5, groups * 16, dtype=torch.int16), Guarded(5, width)
    quantised = QuantActivations(codes.tensor, scales.tensor, sums.tensor)
    runner.kernels.decode(
        query, query_gate, runner.caches, rows, runner.workspace, out=out.tensor, quantised=quantised
    )
    expected = quantize_activations(torch.nn.functional.pad(out.checked(), (0, groups * 256 - width)))
    assert same_bits(codes.checked(), expected.q)
    assert same_bits(scales.checked(), expected.scales)
    assert same_bits(sums.checked(), expected.sums)


@pytest.mark.gpu
def test_one_graph_serves_every_length() -> None:
    case = make_case((0, 0, 1), (1, 0, 1), num_heads=16, head_dim=128)
    long = make_case((0, 900, 1), (1, 3, 1), num_heads=16, head_dim=128)
    runner = Runner(long)
    query, query_gate, rows = runner.prepare()
    out = torch.zeros(2, 16 * 128, device="cuda")

    def step() -> None:
        runner.kernels.decode(query, query_gate, runner.caches, rows, runner.workspace, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for positions in (
        long.positions,
        case.positions,
        torch.tensor([300, 2], dtype=torch.int32),
        long.positions,
    ):
        rows.positions.copy_(positions)
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)
    assert same_bits(out.cpu(), long.expected()[0])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("head_dim", "cache_name", "device"),
    [(256, "f16", H200), (64, "q8_0", SMALL), (80, "f32", SMALL), (96, "tq3_0", SMALL), (256, "tq3_0", H200)],
)
def test_kernels_compile_without_a_gpu(
    arch: str, head_dim: int, cache_name: str, device: DeviceLimits, tmp_path: Path
) -> None:
    kernels = AttentionKernels(AttentionShape(16, 2, head_dim, CACHE_TYPES[cache_name]), device)
    for file, instance in kernels.instances:
        source = Path(__file__).parents[2] / "src/coldstream/kernels/attention" / file
        compile_instance(source, instance, arch, tmp_path)


@pytest.mark.parametrize("device", [H200, SMALL])
@pytest.mark.parametrize(
    ("head_dim", "cache_name"),
    [(256, "f16"), (256, "q8_0"), (80, "f32"), (160, "q4_0"), (160, "tq3_0"), (256, "tq3_0")],
)
def test_shared_memory_is_what_the_kernels_take(
    head_dim: int, cache_name: str, device: DeviceLimits, tmp_path: Path
) -> None:
    kernels = AttentionKernels(AttentionShape(16, 2, head_dim, CACHE_TYPES[cache_name]), device)
    wide, _ = kernels.shape.decode_heads
    blocks, stages = kernels.decode_stages
    head = f"coldstream::cache_{cache_name}, {head_dim}"
    decoder = f"coldstream::decoder<{head}, {wide}, {blocks}, {stages}>"
    prefill = [
        f"sizeof(coldstream::prefill_shape<{head}, {', '.join(map(str, tile))}>::shared_memory) == "
        f"{kernels.prefill_shared_bytes(tile)}"
        for tile in kernels.prefill_tiles
    ]
    source = tmp_path / "sizes.cu"
    source.write_text(
        '#include "attention/decode.cu"\n#include "attention/merge.cu"\n#include "attention/prefill.cu"\n'
        f"static_assert(coldstream::merge_shared_bytes == {MERGE_SHARED_BYTES});\n"
        f"static_assert({decoder}::shared_bytes == {kernels.decode_shared_bytes});\n"
        + "".join(f"static_assert({fact});\n" for fact in prefill)
        + "template <int> __global__ void empty() {}\n"
    )
    compile_instance(source, "empty<0>", "sm_90", tmp_path)
