"""Times attention over integers on the GPU: 16 query heads, 2 key/value heads of 256 (Qwen3.6-35B-A3B).

    python -m bench.kernels.gpu_integer_attention

One layer at a time, in a captured graph over enough layers that no cache of theirs stays in L2; medians of
replays. Rows of one sequence lie behind `depth` positions: few of them, whose chunks are computed beside each
other, and many, which walk over all their positions. Beside each time stand the bytes of keys and values over
what a copy reaches, and the operations on planes over what int8 tensor cores can do. `--head-dim 512` times
heads of gemma4 instead.
"""

import argparse
import sys
from itertools import product
from typing import Any

import torch

from bench.device import describe, graph_seconds, measure_bandwidth
from bench.engine.gpu import numbers
from bench.results import ROOT, add_result_options, write_result
from coldstream.kernels.attention.arguments import (
    AttentionShape,
    DecodeWorkspace,
    IntegerQueries,
)
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.chunks import CHUNK_SIZE
from coldstream.kernels.attention.cuda import SPLIT_ROWS, IntegerKernels, kind_of, takes_warpgroups
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.ops import (
    BLOCK_POSITIONS,
    SHORT_CONTEXT,
    AttentionHeads,
    AttentionInputs,
    BatchRows,
    Caches,
    RopeSpec,
    Rows,
)
from coldstream.kernels.rope.reference import rope_angles

HEADS, KV_HEADS = 16, 2
ROPE = RopeSpec(64, 1e7)
CACHE_NAMES = "i16", "i8", "i4", "i3"
DEPTHS = (512, 32768, 131072)
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 512, 2048)
QUERY_PLANES = 2  # of queries, and of weights in the second product
INT8_OPS_S = 1979e12  # dense, of an H100 or H200 with SXM, by its data sheet
CACHED_BYTES = 150e6  # more than twice what L2 holds
MOST_LAYERS = 24


class Layer:
    """Random inputs of `num_rows` rows of one sequence behind `depth` positions, and their caches."""

    def __init__(self, shape: AttentionShape, num_rows: int, depth: int) -> None:
        head_dim, cache_type = shape.head_dim, CACHE_TYPES[shape.cache_type.name]
        self.kernels = IntegerKernels(shape, device_limits())
        num_blocks = -(-(depth + num_rows) // BLOCK_POSITIONS)
        positions = torch.arange(depth, depth + num_rows, dtype=torch.int32)
        none, first = torch.full_like(positions, -1).cuda(), torch.zeros_like(positions).cuda()
        tables = torch.arange(num_blocks, dtype=torch.int32).view(1, -1).cuda()
        on_device = positions.cuda()
        is_deep = depth + num_rows > SHORT_CONTEXT
        batch = BatchRows(first, tables, on_device, none, none, has_trees=False, is_deep=is_deep)
        self.rows = Rows(on_device, first, batch)
        self.inputs = AttentionInputs(
            torch.randn(num_rows, shape.num_heads * 2 * head_dim, device="cuda"),
            *(torch.randn(num_rows, shape.num_kv_heads * head_dim, device="cuda") for _ in "kv"),
            rope_angles(positions, ROPE).cuda(),
        )
        self.heads = AttentionHeads(*(torch.ones(head_dim, device="cuda") for _ in range(2)), 1e-6)
        block = cache_type.encode(torch.randn(1, BLOCK_POSITIONS, shape.num_kv_heads, head_dim)).cuda()
        blocks = block.repeat(num_blocks, 1, 1, 1)
        self.caches = Caches(blocks, blocks.clone())
        self.queries = IntegerQueries(
            torch.zeros(num_rows, shape.num_heads, 2, head_dim, dtype=torch.int8, device="cuda"),
            torch.zeros(num_rows, shape.num_heads, device="cuda"),
        )
        self.out = torch.zeros(num_rows, shape.num_heads * head_dim, device="cuda")

    def workspace(self, num_positions: int) -> DecodeWorkspace:
        num_rows = len(self.out)
        positions = CHUNK_SIZE * self.kernels.num_chunks(num_rows, num_positions)
        shapes = DecodeWorkspace.shapes(self.kernels.shape, num_rows, positions)
        return DecodeWorkspace(*(torch.zeros(shape, device="cuda") for shape in shapes))

    def prepare(self) -> None:
        self.kernels.prepare(self.inputs, self.heads, self.caches, self.rows, self.queries)

    def attend(self, workspace: DecodeWorkspace) -> None:
        self.kernels.attend(self.queries, self.heads.window, self.caches, self.rows, workspace)

    def merge(self, workspace: DecodeWorkspace) -> None:
        gates = self.inputs.query_gate
        self.kernels.merge(gates, self.heads, self.rows, workspace, self.queries.chosen, out=self.out)


def measured(shape: AttentionShape, num_rows: int, depth: int, bandwidth: float) -> dict[str, Any]:
    cache_type, head_dim = shape.cache_type, shape.head_dim
    num_bytes = 2 * (depth + num_rows) * KV_HEADS * cache_type.row_bytes(head_dim)
    is_split = num_rows <= SPLIT_ROWS
    count = max(2, min(MOST_LAYERS, int(CACHED_BYTES / num_bytes))) if is_split else 1
    layers = [Layer(shape, num_rows, depth) for _ in range(count)]
    workspace = layers[0].workspace(depth + num_rows)
    calls = layers * max(1, (MOST_LAYERS if is_split else 2) // count)

    def both(layer: Layer) -> None:
        layer.attend(workspace)
        layer.merge(workspace)

    prepare = graph_seconds([layer.prepare for layer in calls])
    attend = graph_seconds([lambda layer=layer: layer.attend(workspace) for layer in calls])  # type: ignore[misc]
    together = graph_seconds([lambda layer=layer: both(layer) for layer in calls])  # type: ignore[misc]
    planes = QUERY_PLANES * (2 if cache_type.value_bits == 16 else 1)
    operations = planes * 4 * head_dim * HEADS * num_rows * (depth + (num_rows + 1) / 2)
    is_deep = depth + num_rows > SHORT_CONTEXT
    by_warpgroups = device_limits().has_warpgroups and takes_warpgroups(shape)
    return {
        "cache_type": cache_type.name,
        "rows": num_rows,
        "depth": depth,
        "kernel": kind_of(shape, num_rows, False, is_deep, by_warpgroups),
        "prepare_us": round(prepare * 1e6, 2),
        "attend_us": round(attend * 1e6, 2),
        "merge_us": round((together - attend) * 1e6, 2),
        "share_of_copy": round(num_bytes / attend / bandwidth, 3),
        "share_of_int8": round(operations / attend / INT8_OPS_S, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(CACHE_NAMES))
    parser.add_argument("--rows", type=numbers, default=list(NUM_ROWS))
    parser.add_argument("--depths", type=numbers, default=list(DEPTHS))
    parser.add_argument("--head-dim", type=int, default=256)
    default = ROOT / "docs" / "results" / "gpu" / "attention_shares.json"
    add_result_options(parser, default)
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = measure_bandwidth("cuda", 0)
    cases = []
    for name, num_rows, depth in product(options.types, options.rows, options.depths):
        shape = AttentionShape(HEADS, KV_HEADS, options.head_dim, CACHE_TYPES[name])
        cases.append(measured(shape, num_rows, depth, bandwidth))
        torch.cuda.empty_cache()
        print("  ".join(f"{key} {value}" for key, value in cases[-1].items()), flush=True)
    result = {
        "command": "python -m bench.kernels.gpu_integer_attention",
        "machine": describe("cuda"),
        "heads": [HEADS, KV_HEADS, options.head_dim],
        "copy_bytes_s": bandwidth,
        "int8_ops_s": INT8_OPS_S,
        "cases": cases,
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
