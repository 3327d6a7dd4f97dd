"""Holds the quantised products of the GPU against those of the C++ kernels: every bit of every row.

    python -m bench.kernels.same_bits --out docs/results/gpu/same_bits.json

For each type 2^20 random weight rows are multiplied by 1, 8, 16 and 64 rows of activations, which takes the
GPU's GEMV, skinny and GEMM kernels; and stacks of experts, whose gate, up and down matrices have more
rows than that together, compute whole FFNs. Needs the C++ extension and a GPU;
exits with 1 if any bit differs.
"""

import argparse
import os
import shlex
import sys
from typing import Any

import numpy as np
import torch

from bench.device import describe
from bench.kernels.random_blocks import random_blocks
from bench.results import add_result_options, write_result
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.contents import CudaArray, read, write
from coldstream.kernels.cuda.memory import DeviceMemory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.ops import ExpertWeights, Routing
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda

ROWS, COLS = 2**20, 512
TOKENS = (1, 8, 16, 64)
EXPERTS, FFN, HIDDEN = 512, 1024, 512
RANKS = 8
MEMORY_BYTES = 8 * 2**30


def on_gpu(x: np.ndarray[Any, Any], ops: CudaOps) -> Activations:
    """Rows in both of their forms."""
    out = ops.activations(*x.shape)
    write(out.values, x)
    quantize_cuda(out.values, out.quantised)
    return out


def differing(actual: CudaArray, expected: np.ndarray[Any, Any]) -> int:
    """Values whose bits are not the same; any NaN equals any other."""
    ours = read(actual)
    different = ours.view(np.uint32) != expected.view(np.uint32)
    return int(np.count_nonzero(different & ~(np.isnan(ours) & np.isnan(expected))))


def compare_products(runtime: Any, ops: CudaOps, quant_type: QuantType) -> int:
    """Differing values of products with ROWS weight rows."""
    blocks = random_blocks(quant_type, (ROWS, COLS), int(quant_type))
    weight = _csrc.Weight.from_array(blocks.reshape(-1), int(quant_type), ROWS, COLS)
    tensor = QuantTensor(torch.from_numpy(blocks).cuda(), quant_type, (ROWS, COLS))
    count = 0
    for tokens in TOKENS:
        x = np.random.default_rng(tokens).standard_normal((tokens, COLS), dtype=np.float32)
        expected = np.empty((tokens, ROWS), np.float32)
        _csrc.linear(runtime, x, [weight], [expected])
        (out,) = ops.linear(on_gpu(x, ops), (tensor,))
        count += differing(out, expected)
    return count


def compare_experts(runtime: Any, ops: CudaOps, quant_type: QuantType) -> int:
    """Differing values of FFNs that use every expert of a stack, few tokens at a time and all at once."""
    shapes = ((EXPERTS, FFN, HIDDEN), (EXPERTS, FFN, HIDDEN), (EXPERTS, HIDDEN, FFN))
    blocks = [random_blocks(quant_type, shape, 100 * i + int(quant_type)) for i, shape in enumerate(shapes)]
    weights = [
        _csrc.Weight.from_array(part.reshape(-1), int(quant_type), *shape[1:], shape[0])
        for part, shape in zip(blocks, shapes, strict=True)
    ]
    rng = np.random.default_rng(int(quant_type))
    ids = rng.permutation(EXPERTS).reshape(-1, RANKS).astype(np.int32)
    x = rng.standard_normal((len(ids), HIDDEN), dtype=np.float32)
    expected = np.empty((*ids.shape, HIDDEN), np.float32)
    _csrc.routed_experts(runtime, x, ids, *weights, expected)
    on_device = [torch.from_numpy(part).cuda() for part in blocks]
    stacks = [ops.stack(part, quant_type, shape) for part, shape in zip(on_device, shapes, strict=True)]
    count = 0
    for tokens in (1, 8, len(ids)):
        for first in range(0, len(ids), tokens):
            part = slice(first, first + tokens)
            count += differing(run_experts(ops, x[part], ids[part], stacks), expected[part])
    return count


def run_experts(
    ops: CudaOps, x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], stacks: list[ExpertTable]
) -> CudaArray:
    """The routed outputs; the shared expert is a small one of zeros."""
    shared = [
        QuantTensor.from_bytes(
            torch.zeros(rows * cols * 4, dtype=torch.uint8, device="cuda"), QuantType.F32, (rows, cols)
        )
        for rows, cols in ((32, HIDDEN), (32, HIDDEN), (HIDDEN, 32))
    ]
    routing = Routing(torch.from_numpy(ids).cuda(), torch.empty(0), torch.empty(0))
    routed: CudaArray = ops.experts(on_gpu(x, ops), routing, ExpertWeights(*stacks, *shared)).routed
    return routed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=[kind.name for kind in sorted(INTEGER_TYPES)])
    add_result_options(parser)
    options = parser.parse_args()
    runtime = _csrc.Runtime(len(os.sched_getaffinity(0)))
    counts: dict[str, dict[str, int]] = {}
    for quant_type in (QuantType[name] for name in options.types):
        ops = CudaOps(DeviceMemory(2**20, MEMORY_BYTES), max_positions=1, max_rows=1)
        products, experts = (
            compare_products(runtime, ops, quant_type),
            compare_experts(runtime, ops, quant_type),
        )
        counts[quant_type.name] = {"products": products, "experts": experts}
        print(f"{quant_type.name}: {products} and {experts} values differ", flush=True)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe("cuda"),
        "cpu_tier": runtime.tier,
        "rows": ROWS,
        "cols": COLS,
        "tokens": list(TOKENS),
        "expert_rows": EXPERTS * (2 * FFN + HIDDEN),
        "differing_values": counts,
    }
    write_result(result, options.out, options.commit)
    return int(any(sum(parts.values()) for parts in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
