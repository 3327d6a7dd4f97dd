"""Times attention to the blocks that an indexer chooses, beside attention to all positions, on the GPU.

    python -m bench.kernels.gpu_indexer

Heads of Qwen3.8-Flash-Next: 24 query heads, 2 key/value heads of 256; an indexer of 4 heads of 128, which
chooses 512 blocks of 4 positions. One layer at a time, in a captured graph over enough layers that no cache
stays in L2; medians of replays. Random keys scatter the choice over the text, which leaves most to be read.
The last 2,048 positions leave least.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.device import describe, graph_seconds, measure_bandwidth
from bench.engine.gpu import numbers
from bench.kernels.gpu_integer_attention import CACHED_BYTES, Layer
from bench.results import ROOT, add_result_options, write_result
from coldstream.kernels.attention.arguments import AttentionShape
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.workspace_sizes import SPLIT_ROWS
from coldstream.kernels.indexer.cuda import IndexerWorkspace, choose_blocks_cuda
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.indexer.workspace_sizes import rows_at_once
from coldstream.kernels.ops import BLOCK_POSITIONS, RopeSpec
from coldstream.kernels.rope.reference import rope_angles

HEADS, KV_HEADS, HEAD_DIM = 24, 2, 256
INDEX_HEADS, INDEX_DIM, TOP_K, BLOCK_SIZE = 4, 128, 2048, 4
ROPE = RopeSpec(64, 1e7)
MOST_LAYERS = 12


class Indexer:
    """Random inputs of the rows of a layer, a cache of random keys, and what is chosen of them."""

    def __init__(self, layer: Layer) -> None:
        self.rows = layer.rows
        assert self.rows.batch is not None
        num_rows, num_blocks = len(layer.out), self.rows.batch.tables.shape[1]
        positions, random = self.rows.positions.cpu(), partial(torch.randn, device="cuda")
        block_rope = replace(ROPE, block_size=BLOCK_SIZE)
        self.inputs = IndexerInputs(
            random(num_rows, INDEX_HEADS * INDEX_DIM),
            random(num_rows, INDEX_DIM),
            *(rope_angles(positions, rope).cuda() for rope in (ROPE, block_rope)),
        )
        norms = (torch.ones(INDEX_DIM, device="cuda") for _ in "qk")
        self.heads = IndexerHeads(*norms, 1e-6, TOP_K, BLOCK_SIZE)
        self.cache = random(num_blocks, BLOCK_POSITIONS, 1, INDEX_DIM).half()
        scored = num_blocks * BLOCK_POSITIONS // BLOCK_SIZE
        self.workspace = IndexerWorkspace(
            torch.zeros(num_rows, INDEX_HEADS, INDEX_DIM, device="cuda"),
            torch.zeros(rows_at_once(num_rows, scored), scored, device="cuda"),
        )
        shape = (num_rows, self.heads.num_words(num_blocks * BLOCK_POSITIONS))
        self.words = torch.zeros(shape, dtype=torch.int32, device="cuda")

    def choose(self) -> None:
        choose_blocks_cuda(self.inputs, self.heads, self.cache, self.rows, self.workspace, self.words)

    def last_blocks(self) -> torch.Tensor:
        """Words of a choice of the last TOP_K positions before each row."""
        bits = torch.arange(self.words.shape[1] * 32, device="cuda")
        last = self.rows.positions.unsqueeze(1) // BLOCK_SIZE
        chosen = (bits <= last) & (bits > last - TOP_K // BLOCK_SIZE)
        shifted = chosen.view(len(chosen), -1, 32).long() << torch.arange(32, device="cuda")
        words = shifted.sum(dim=-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def seconds_of(layers: list[Layer], num_positions: int) -> float:
    """Of attention and its merge, a layer."""
    workspace = layers[0].workspace(num_positions)

    def both(layer: Layer) -> None:
        layer.attend(workspace)
        layer.merge(workspace)

    return graph_seconds([partial(both, layer) for layer in layers])


def measured(cache_name: str, num_rows: int, depth: int) -> dict[str, Any]:
    cache_type, end = CACHE_TYPES[cache_name], depth + num_rows
    num_bytes = 2 * end * KV_HEADS * cache_type.row_bytes(HEAD_DIM)
    count = max(2, min(MOST_LAYERS, int(CACHED_BYTES / num_bytes))) if num_rows <= SPLIT_ROWS else 1
    seconds = {}
    for has_choice in (False, True):
        shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, cache_type, has_choice=has_choice)
        layers = [Layer(shape, num_rows, depth) for _ in range(count)]
        if not has_choice:
            seconds["dense"] = seconds_of(layers, end)
            continue
        indexers = [Indexer(layer) for layer in layers]
        seconds["indexer"] = graph_seconds([indexer.choose for indexer in indexers])
        for name in ("scattered", "last"):
            for layer, indexer in zip(layers, indexers, strict=True):
                words = indexer.words if name == "scattered" else indexer.last_blocks()
                layer.queries = replace(layer.queries, chosen=ChosenBlocks(words, BLOCK_SIZE))
            seconds[name] = seconds_of(layers, end)
    times = {f"{name}_us": round(each * 1e6, 2) for name, each in seconds.items()}
    return {"cache_type": cache_name, "rows": num_rows, "depth": depth, **times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", type=lambda text: text.split(","), default=["i16", "i8"])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 2048])
    parser.add_argument("--depths", type=numbers, default=[8192, 32768])
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "indexer.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = measure_bandwidth("cuda", 0)
    cases = []
    for name, num_rows, depth in product(options.types, options.rows, options.depths):
        cases.append(measured(name, num_rows, depth))
        torch.cuda.empty_cache()
        print("  ".join(f"{key} {value}" for key, value in cases[-1].items()), flush=True)
    result = {
        "command": "python -m bench.kernels.gpu_indexer",
        "machine": describe("cuda"),
        "copy_bytes_s": bandwidth,
        "heads": [HEADS, KV_HEADS, HEAD_DIM],
        "indexer": {"heads": INDEX_HEADS, "size": INDEX_DIM, "top_k": TOP_K, "block_size": BLOCK_SIZE},
        "cases": cases,
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
