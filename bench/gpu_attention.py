"""Times attention on the GPU at the shape of Qwen3.6-35B-A3B: 16 query heads, 2 key/value heads of 256.

    python bench/gpu_attention.py [--json]

The ceilings come first: what a copy of device memory reaches, and float32 products at their listed rate. One
layer at a time, in a captured graph over enough layers that no cache of theirs stays in L2; medians of
replays. A decoded row reads the keys and values of its context once; a prefilled one computes 4 · D
operations a head and position.
"""

import argparse
import json
from collections.abc import Callable

import torch

from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import (
    AttentionInputs,
    AttentionKernels,
    AttentionShape,
    Caches,
    DecodeWorkspace,
)
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.ops import RopeSpec, Rows
from coldstream.kernels.rope.reference import rope_angles
from device import graph_seconds, measure_bandwidth

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256
ROPE = RopeSpec(64, 1e7)
DECODE_CONTEXTS = (64, 256, 1024, 4096, 16384, 65536)
PREFILL_TOKENS = (168, 512, 2048, 8192)
PLANNED_POSITIONS = 65536
FLOAT32_PEAK = 67e12  # an H200's, as listed
CACHED_BYTES = 150e6  # more than twice what L2 holds


class Layer:
    """Random inputs of `num_rows` rows of one slot that end before position `context`, and their caches."""

    def __init__(self, cache_name: str, num_rows: int, context: int) -> None:
        shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, CACHE_TYPES[cache_name])
        self.kernels = AttentionKernels(shape, device_limits())
        self.rows = Rows(
            torch.arange(context - num_rows, context, dtype=torch.int32).cuda(),
            torch.zeros(num_rows, dtype=torch.int32).cuda(),
        )
        self.inputs = AttentionInputs(
            *(torch.randn(num_rows, size, device="cuda") for size in (HEADS * 2 * HEAD_DIM, 512, 512)),
            *(torch.ones(HEAD_DIM, device="cuda") for _ in range(2)),
            rope_angles(self.rows.positions.cpu(), ROPE).cuda(),
            1e-6,
        )
        block = torch.randn(1, 64, KV_HEADS, HEAD_DIM)
        rows = shape.cache_type.encode(block).cuda().repeat(1, -(-context // 64), 1, 1)
        self.caches = Caches(rows, rows.clone())
        self.query = torch.zeros(num_rows, HEADS, HEAD_DIM, device="cuda")
        self.out = torch.zeros(num_rows, HEADS * HEAD_DIM, device="cuda")

    def workspace(self, num_positions: int) -> DecodeWorkspace:
        shapes = DecodeWorkspace.shapes(self.kernels.shape, len(self.out), num_positions)
        return DecodeWorkspace(*(torch.zeros(shape, device="cuda") for shape in shapes))

    def prepare(self) -> None:
        self.kernels.prepare(self.inputs, self.caches, self.rows, self.query)

    def decode(self, workspace: DecodeWorkspace) -> None:
        self.kernels.decode(
            self.query, self.inputs.query_gate, self.caches, self.rows, workspace, out=self.out
        )

    def prefill(self) -> None:
        self.kernels.prefill(self.query, self.inputs.query_gate, self.caches, self.rows, self.out)


def decode_case(cache_name: str, num_rows: int, context: int, bandwidth: float) -> dict[str, object]:
    row_bytes = CACHE_TYPES[cache_name].row_bytes(HEAD_DIM)
    num_bytes = 2 * context * KV_HEADS * row_bytes
    layers = [
        Layer(cache_name, num_rows, context) for _ in range(max(2, min(24, int(CACHED_BYTES / num_bytes))))
    ]
    calls = layers * max(1, 24 // len(layers))
    workspace = layers[0].workspace(PLANNED_POSITIONS)
    for layer in layers:
        layer.prepare()

    def both(layer: Layer) -> None:
        layer.prepare()
        layer.decode(workspace)

    alone = graph_seconds([lambda layer=layer: layer.decode(workspace) for layer in calls])  # type: ignore[misc]
    together = graph_seconds([lambda layer=layer: both(layer) for layer in calls])  # type: ignore[misc]
    return {
        "case": f"decode {cache_name} {num_rows} rows at {context}",
        "us": round(alone * 1e6, 2),
        "us_with_prepare": round(together * 1e6, 2),
        "share_of_copy": round(num_bytes / alone / bandwidth, 3),
    }


def prefill_case(cache_name: str, num_rows: int) -> dict[str, object]:
    layer = Layer(cache_name, num_rows, num_rows)
    prepare = graph_seconds([layer.prepare] * 4)
    attend = graph_seconds([layer.prefill] * 2)
    flops = 4 * HEAD_DIM * HEADS * num_rows * (num_rows + 1) / 2
    return {
        "case": f"prefill {cache_name} {num_rows}",
        "us": round(attend * 1e6, 1),
        "us_with_prepare": round((attend + prepare) * 1e6, 1),
        "tflops": round(flops / attend / 1e12, 1),
        "share_of_float32": round(flops / attend / FLOAT32_PEAK, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one line of JSON")
    json_only = parser.parse_args().json
    torch.manual_seed(0)
    bandwidth = measure_bandwidth("cuda", 0)
    if not json_only:
        print(f"ceilings: copy {bandwidth / 1e12:.2f} TB/s, float32 {FLOAT32_PEAK / 1e12:.0f} TFLOP/s")
    results = []
    cases: list[Callable[[], dict[str, object]]] = [
        *(
            lambda name=name, rows=rows, context=context: decode_case(name, rows, context, bandwidth)  # type: ignore[misc]
            for name, rows, contexts in (
                ("f16", 1, DECODE_CONTEXTS),
                ("q8_0", 1, (256, 16384)),
                ("q4_0", 1, (16384,)),
                ("tq3_0", 1, (256, 16384)),
                ("f16", 4, (256, 16384)),
                ("f16", 16, (256, 16384)),
            )
            for context in contexts
        ),
        *(lambda tokens=tokens: prefill_case("f16", tokens) for tokens in PREFILL_TOKENS),  # type: ignore[misc]
        lambda: prefill_case("q8_0", 2048),
        lambda: prefill_case("tq3_0", 2048),
    ]
    for case in cases:
        results.append(case())
        torch.cuda.empty_cache()
        if not json_only:
            print("  ".join(f"{key} {value}" for key, value in results[-1].items()))
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "copy_tb_s": bandwidth / 1e12, "cases": results}))


if __name__ == "__main__":
    main()
