"""Time of products and of routed experts on a GPU by type of weights, as ratios to Q4_K in the same run.

    python -m bench.kernels.gpu_types [--types Q2_K IQ3_S …] [--rows 1 8 64 512 2048] --out FILE

The shapes are those of Qwen3.6-35B-A3B. What the engine launches for so many rows is timed, with the launches
that quantise its inputs: a dense product, and a layer's routed experts with all three matrices of the type
and evenly spread routing. Weights rotate through more memory than the caches hold. Every type is timed
beside Q4_K, alternating, and the ratio is the median. With up to eight rows the bytes of a type bound its
time, so that the bytes' ratio is printed beside it.

`python -m bench.kernels.gpu_type_table` makes the table of the forecasts of the results in docs/results/gpu.
"""

import argparse
import functools
import math
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.device import describe, graph_seconds
from bench.kernels.random_blocks import random_blocks
from bench.results import add_result_options, write_result
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import write
from coldstream.kernels.cuda.memory import DeviceMemory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.ops import ExpertWeights
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda

HIDDEN, FFN, EXPERTS, RANKS = 2048, 512, 256, 8
DENSE_ROWS = 8192
RANDOM_ROWS = 64
ROTATION_BYTES = 256 << 20  # several times the L2 cache
PERSISTENT_BYTES, WORKSPACE_BYTES = 4 << 30, 4 << 30
LAUNCHES = 16
TURNS, REPLAYS = 3, 5
REFERENCE = QuantType.Q4_K


@dataclass(frozen=True)
class Case:
    """A function of a running number that chooses the weights, and the bytes of those it reads."""

    launch: Callable[[int], None]
    num_bytes: int

    def microseconds(self) -> float:
        """Of one launch within a graph."""
        return 1e6 * graph_seconds([functools.partial(self.launch, i) for i in range(LAUNCHES)], REPLAYS)


def activations(ops: CudaOps, rows: int, cols: int) -> Activations:
    x = ops.activations(rows, cols, persistent=True)
    write(x.values, torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).numpy())
    quantize_cuda(x.values, x.quantised)
    return x


def weight_bytes(ops: CudaOps, quant_type: QuantType, *shape: int) -> DeviceArray:
    """Random blocks; a part of the rows is repeated, as making all takes long."""
    part = random_blocks(quant_type, (RANDOM_ROWS, shape[-1]), int(quant_type))
    memory = ops.memory.persistent((math.prod(shape[:-1]) // RANDOM_ROWS, *part.shape), "uint8")
    write(memory, np.broadcast_to(part, memory.shape))
    return memory.reshape(-1)


def dense_case(ops: CudaOps, quant_type: QuantType, rows: int) -> Case:
    num_bytes = DENSE_ROWS * quant_type.row_bytes(HIDDEN)
    copies = -(-ROTATION_BYTES // num_bytes)
    weights = [
        QuantTensor.from_bytes(
            weight_bytes(ops, quant_type, DENSE_ROWS, HIDDEN), quant_type, (DENSE_ROWS, HIDDEN)
        )
        for _ in range(copies)
    ]
    x = activations(ops, rows, HIDDEN)

    def launch(i: int) -> None:
        ops.memory.start_step()
        ops.linear(x, (weights[i % copies],))

    return Case(launch, num_bytes)


def experts_case(ops: CudaOps, quant_type: QuantType, rows: int) -> Case:
    shapes = ((EXPERTS, FFN, HIDDEN), (EXPERTS, FFN, HIDDEN), (EXPERTS, HIDDEN, FFN))
    memory = [weight_bytes(ops, quant_type, *shape) for shape in shapes]
    stacks = [ops.stack(part, quant_type, shape) for part, shape in zip(memory, shapes, strict=True)]
    weights, kernels = ExpertWeights(*stacks), MoeKernels(ops)
    generator = torch.Generator().manual_seed(rows)
    # Of a few tokens the next launch reads other experts, so that the caches hold none of them.
    scores = [torch.rand(rows, EXPERTS, generator=generator) for _ in range(LAUNCHES)]
    chosen = [each.topk(RANKS).indices.int() for each in scores]
    ids = [ops.memory.persistent((rows, RANKS), "int32") for _ in chosen]
    for array, values in zip(ids, chosen, strict=True):
        write(array, values.numpy())
    x = activations(ops, rows, HIDDEN)

    def launch(i: int) -> None:
        ops.memory.start_step()
        kernels.outputs(x, ids[i], weights)

    num_experts = len(chosen[0].unique())
    return Case(launch, num_experts * sum(part.numel() for part in memory) // EXPERTS)


CASES = {"dense": dense_case, "experts": experts_case}


def new_ops() -> CudaOps:
    return CudaOps(DeviceMemory(PERSISTENT_BYTES, WORKSPACE_BYTES), max_positions=1, max_rows=1)


def compare(what: str, quant_type: QuantType, rows: int) -> dict[str, Any]:
    """The type beside Q4_K, alternating."""
    ops = new_ops()
    case, other = (CASES[what](ops, kind, rows) for kind in (quant_type, REFERENCE))
    times = [(case.microseconds(), other.microseconds()) for _ in range(TURNS)]
    return {
        "what": what,
        "type": quant_type.name,
        "rows": rows,
        "us": round(statistics.median(own for own, _ in times), 2),
        "q4_k_us": round(statistics.median(theirs for _, theirs in times), 2),
        "ratio": round(statistics.median(own / theirs for own, theirs in times), 3),
        "bytes_ratio": round(case.num_bytes / other.num_bytes, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=[kind.name for kind in sorted(INTEGER_TYPES)])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    add_result_options(parser)
    options = parser.parse_args()
    print(f"{'case':8} {'type':8} {'rows':>5} {'µs':>9} {'Q4_K':>9} {'ratio':>6} {'bytes':>6}")
    results = []
    for rows in options.rows:
        for what in options.cases:
            for name in options.types:
                result = compare(what, QuantType[name], rows)
                results.append(result)
                numbers = f"{result['us']:9.2f} {result['q4_k_us']:9.2f} {result['ratio']:6.3f}"
                print(f"{what:8} {name:8} {rows:5} {numbers} {result['bytes_ratio']:6.3f}", flush=True)
    document = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe("cuda"),
        "results": results,
    }
    write_result(document, options.out, options.commit)


if __name__ == "__main__":
    main()
