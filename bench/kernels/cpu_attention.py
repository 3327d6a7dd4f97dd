"""Attention of one layer on the CPU by type of cache, as ratios to f16 in the same run: heads of a 35B model.

    python -m bench.kernels.cpu_attention --out docs/results/cpu_attention.json

One row and a prompt's part of 512 rows, behind so many positions of random keys and values. Times are medians
of calls interleaved, so that a busy machine slows all types.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.kernels.float_kernels import HEAD_DIM, HEADS, KV_HEADS, ROPE_DIMS, median_times
from bench.results import write_result
from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.ops import AttentionHeads, RopeSpec
from coldstream.kernels.rope.reference import rope_angles
from coldstream.placement.hardware import Hardware

DEPTHS, ROWS = (2048, 8192), (1, 512)


@dataclass(frozen=True)
class Call:
    """A recorded operation and the arrays that it points to."""

    graph: _csrc.Graph
    arrays: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        """Once, for all rows."""
        self.graph.run(len(self.arrays[0]))


def recorded(runtime: _csrc.Runtime, cache_name: str, num_rows: int, depth: int) -> Call:
    """One call of attention for rows at `depth` and after."""
    length = depth + num_rows
    query_gate = torch.randn(num_rows, HEADS * 2 * HEAD_DIM)
    key, value = (torch.randn(num_rows, KV_HEADS * HEAD_DIM) for _ in range(2))
    norm, out = torch.ones(HEAD_DIM), torch.empty(num_rows, HEADS * HEAD_DIM)
    positions = torch.arange(depth, length, dtype=torch.int32)
    states = torch.zeros(num_rows, dtype=torch.int32)
    angles = rope_angles(positions, RopeSpec(ROPE_DIMS, 1e7))
    cache_type = CACHE_TYPES[cache_name]
    caches = [cache_type.encode(torch.randn(1, length, KV_HEADS, HEAD_DIM)) for _ in range(2)]
    heads, arrays = AttentionHeads(norm, norm, 1e-6), (*caches, positions, states, out)
    runtime.begin_capture(num_rows)
    _csrc.attention(runtime, query_gate, key, value, angles, heads, *arrays)
    return Call(runtime.end_capture(), (query_gate, key, value, angles, norm, *arrays))


def measure(runtime: _csrc.Runtime, num_rows: int, depth: int, budget_s: float) -> dict[str, Any]:
    """Milliseconds of f16, and how many times faster each other type is."""
    calls = [recorded(runtime, name, num_rows, depth) for name in CACHE_TYPES]
    seconds = dict(zip(CACHE_TYPES, median_times(calls, budget_s), strict=True))
    return {
        "tier": runtime.tier,
        "rows": num_rows,
        "depth": depth,
        "f16_ms": seconds["f16"] * 1e3,
        "speed": {name: seconds["f16"] / each for name, each in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tiers", nargs="+", default=_csrc.supported_tiers()[1:], help="default: all but generic"
    )
    parser.add_argument(
        "--budget", type=float, default=2.0, help="seconds for a tier, depth and number of rows"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    runtimes = [_csrc.Runtime(options.threads, tier) for tier in options.tiers]
    result = {
        "command": "python -m bench.kernels.cpu_attention",
        "machine": asdict(Hardware.measure()),
        "threads": options.threads,
        "cases": [
            measure(runtime, num_rows, depth, options.budget)
            for runtime in runtimes
            for num_rows in ROWS
            for depth in DEPTHS
        ],
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
