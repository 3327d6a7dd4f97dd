"""Times the C++ float ops beside PyTorch's, at the shapes of Qwen3.6-35B-A3B.

    python -m bench.kernels.float_kernels [--threads 2] [--tier auto] [--json]

The ceiling comes first: what a copy and a matrix product reach on this machine. Each op runs as a captured
graph; its time and PyTorch's are medians of interleaved runs, so that a busy machine slows both. GB/s counts
the bytes that must move at least once, GFLOP/s the products (2 a multiply-add).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.gated_delta_net.reference import chunked, recurrent
from coldstream.kernels.ops import AttentionHeads, RopeSpec
from coldstream.kernels.rope.reference import rope_angles

HIDDEN, EXPERTS, TOP_K = 2048, 256, 8
HEADS, KV_HEADS, HEAD_DIM, ROPE_DIMS = 16, 2, 256, 64
KEY_HEADS, VALUE_HEADS, DELTA_DIM, TAPS = 16, 32, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM
FLOAT_BYTES = 4

SETTLE_S = 0.005  # until the idle threads of the other side have stopped polling
WARMING_CALLS = 3  # wake one's own threads, bring one's own data back into the caches


@dataclass(frozen=True)
class Case:
    """One op at one shape: how to record it, what PyTorch would do, and what it moves and computes."""

    name: str
    num_rows: int
    record: Callable[[_csrc.Runtime], None]
    torch_version: Callable[[], object]
    num_bytes: float
    num_flops: float = 0


def row_cases(num_rows: int) -> Iterator[Case]:
    x, y, out = (torch.randn(num_rows, HIDDEN) for _ in range(3))
    weight = torch.randn(HIDDEN)
    num_bytes = 3 * num_rows * HIDDEN * FLOAT_BYTES
    yield Case(
        "add", num_rows, lambda rt: _csrc.add(rt, x, y, out), lambda: torch.add(x, y, out=out), num_bytes
    )
    yield Case(
        "swiglu",
        num_rows,
        lambda rt: _csrc.glu(rt, x, y, out),
        lambda: functional.silu(x).mul_(y),
        num_bytes,
    )
    yield Case(
        "rms_norm",
        num_rows,
        lambda rt: _csrc.rms_norm(rt, x, weight, 1e-6, out),
        lambda: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        num_bytes * 2 / 3,
    )
    routed, topk_weights = torch.randn(num_rows, TOP_K, HIDDEN), torch.rand(num_rows, TOP_K)
    gate = torch.randn(num_rows, 1)
    yield Case(
        "combine_experts",
        num_rows,
        lambda rt: _csrc.combine_experts(rt, routed, topk_weights, x, gate, out),
        lambda: torch.baddbmm((gate.sigmoid() * x)[:, None], topk_weights[:, None], routed),
        (TOP_K + 2) * num_rows * HIDDEN * FLOAT_BYTES,
    )
    positions, angles = torch.arange(num_rows, dtype=torch.int32), torch.empty(num_rows, ROPE_DIMS // 2, 2)
    yield Case(
        "rope_angles",
        num_rows,
        lambda rt: _csrc.rope_angles(rt, positions, 1e7, angles),
        lambda: rope_angles(positions, RopeSpec(ROPE_DIMS, 1e7)),
        angles.numel() * FLOAT_BYTES,
    )


def router_case(num_rows: int) -> Case:
    x, matrix = torch.randn(num_rows, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    weight = _csrc.Weight.from_array(matrix.view(torch.uint8).flatten(), int(QuantType.F32), EXPERTS, HIDDEN)
    ids, weights = torch.empty(num_rows, TOP_K, dtype=torch.int32), torch.empty(num_rows, TOP_K)

    def torch_version() -> object:
        values, chosen = functional.linear(x, matrix).softmax(-1).topk(TOP_K)
        return values / values.sum(-1, keepdim=True), chosen

    return Case(
        "router",
        num_rows,
        lambda rt: _csrc.router(rt, x, weight, ids, weights),
        torch_version,
        (matrix.numel() + x.numel()) * FLOAT_BYTES,
        2 * num_rows * matrix.numel(),
    )


def attention_case(num_rows: int, num_cached: int) -> Case:
    """`num_rows` tokens after `num_cached` others, float16 caches; PyTorch gets float32 keys, no append."""
    length = num_cached + num_rows
    query_gate = torch.randn(num_rows, HEADS * 2 * HEAD_DIM)
    key, value = (torch.randn(num_rows, KV_HEADS * HEAD_DIM) for _ in range(2))
    norm, out = torch.ones(HEAD_DIM), torch.empty(num_rows, HEADS * HEAD_DIM)
    heads = AttentionHeads(norm, norm, 1e-6)
    positions = torch.arange(num_cached, length, dtype=torch.int32)
    state_ids = torch.zeros(num_rows, dtype=torch.int32)
    angles = rope_angles(positions, RopeSpec(ROPE_DIMS, 1e7))
    caches = [torch.randn(1, length, KV_HEADS, HEAD_DIM).half() for _ in range(2)]
    keys, values = (cache[0].transpose(0, 1).float().contiguous()[None] for cache in caches)
    query = torch.randn(1, HEADS, num_rows, HEAD_DIM)
    mask = torch.arange(length) <= positions[:, None] if num_cached and num_rows > 1 else None
    pairs = sum(range(num_cached + 1, length + 1))
    return Case(
        f"attention @ {num_cached}",
        num_rows,
        lambda rt: _csrc.attention(
            rt, query_gate, key, value, angles, heads, *caches, positions, state_ids, out
        ),
        lambda: functional.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=num_cached == 0, enable_gqa=True
        ),
        2 * length * KV_HEADS * HEAD_DIM * 2,
        4 * pairs * HEADS * HEAD_DIM,
    )


def delta_net_case(num_rows: int) -> Case:
    """PyTorch gets the delta rule alone: token by token for one row, in chunks for many."""
    qkv, z = torch.randn(num_rows, CHANNELS), torch.randn(num_rows, VALUE_HEADS * DELTA_DIM)
    alpha, beta = torch.randn(num_rows, VALUE_HEADS), torch.randn(num_rows, VALUE_HEADS)
    taps, a = torch.randn(CHANNELS, TAPS), -torch.rand(VALUE_HEADS)
    key_head_ids = torch.arange(VALUE_HEADS, dtype=torch.int32) % KEY_HEADS
    conv_state, state = torch.zeros(1, TAPS - 1, CHANNELS), torch.zeros(1, VALUE_HEADS, DELTA_DIM, DELTA_DIM)
    state_ids, out = torch.zeros(num_rows, dtype=torch.int32), torch.empty_like(z)
    inputs, weights = (qkv, z, alpha, beta), (taps, a, a, torch.ones(DELTA_DIM), key_head_ids)
    heads = torch.nn.functional.normalize(torch.randn(3, num_rows, VALUE_HEADS, DELTA_DIM), dim=-1)
    rule = recurrent if num_rows == 1 else chunked
    return Case(
        "gated_delta_net",
        num_rows,
        lambda rt: _csrc.gated_delta_net(
            rt, *inputs, *weights, KEY_HEADS, 1e-6, conv_state, state, state_ids, out
        ),
        lambda: rule(*heads, -alpha.abs(), beta.sigmoid(), state[0]),
        (2 * state.numel() + qkv.numel() + 2 * z.numel()) * FLOAT_BYTES,
        num_rows * state.numel() * 7,
    )


def median_times(calls: list[Callable[[], object]], budget_s: float) -> list[float]:
    """Median seconds of each call, interleaved until `budget_s` has passed (five times at least)."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + budget_s
    while len(times[0]) < 5 or time.perf_counter() < end:
        for call, measured in zip(calls, times, strict=True):
            time.sleep(SETTLE_S)
            for _ in range(WARMING_CALLS):
                call()
            start = time.perf_counter()
            call()
            measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def measure(case: Case, runtime: _csrc.Runtime, budget_s: float) -> dict[str, str | int | float]:
    runtime.begin_capture(case.num_rows)
    case.record(runtime)
    graph = runtime.end_capture()
    ours, theirs = median_times([lambda: graph.run(case.num_rows), case.torch_version], budget_s)
    return {
        "op": case.name,
        "rows": case.num_rows,
        "us": ours * 1e6,
        "torch_us": theirs * 1e6,
        "gb_s": case.num_bytes / ours / 1e9,
        "gflop_s": case.num_flops / ours / 1e9,
    }


def print_ceiling(budget_s: float) -> None:
    source, target = torch.randn(1 << 26), torch.empty(1 << 26)
    matrix = torch.randn(2048, 2048)
    copy_s, product_s = median_times([lambda: target.copy_(source), lambda: matrix @ matrix], budget_s)
    print(f"ceiling: copy {2 * source.numel() * FLOAT_BYTES / copy_s / 1e9:.1f} GB/s, ", end="")
    print(f"float32 matrix product {2 * 2048**3 / product_s / 1e9:.0f} GFLOP/s (PyTorch)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per op")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    runtime = _csrc.Runtime(arguments.threads, arguments.tier)
    cases: list[Case] = []
    for num_rows, contexts in ((1, (500, 16000)), (512, (0, 3584))):
        cases += [*row_cases(num_rows), router_case(num_rows), delta_net_case(num_rows)]
        cases += [attention_case(num_rows, num_cached) for num_cached in contexts]
    if not arguments.json:
        print_ceiling(arguments.budget)
        print(f"{runtime.threads} threads, {runtime.tier}; PyTorch {torch.__version__}")
        print(f"{'op':20} {'rows':>5} {'µs':>10} {'torch µs':>10} {'ratio':>7} {'GB/s':>7} {'GFLOP/s':>8}")
    for case in cases:
        row = measure(case, runtime, arguments.budget)
        if arguments.json:
            print(json.dumps(row))
        else:
            print(
                f"{row['op']:20} {row['rows']:5} {row['us']:10.1f} {row['torch_us']:10.1f} "
                f"{row['torch_us'] / row['us']:6.1f}× {row['gb_s']:7.1f} {row['gflop_s']:8.1f}"
            )


if __name__ == "__main__":
    main()
