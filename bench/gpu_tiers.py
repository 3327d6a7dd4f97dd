"""Triton and CUDA C++ beside each other: every kernel that exists in both, on the same data, in one run.

    python bench/gpu_tiers.py --out docs/results/gpu/tiers.json

Shapes are those of Qwen3.6-35B-A3B in its Q4_K_M mix. A figure is the median over replays of a CUDA graph of
launches that follow each other, over weights and states that rotate through more memory than the caches hold.
Where a tier needs another launch to come from the same inputs to the same outputs, that counts.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import gpu_attention
import gpu_delta
import gpu_few
import gpu_many
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts import cuda_many as experts_many
from coldstream.kernels.experts import triton_groups
from coldstream.kernels.experts.triton import ExpertMatrices
from coldstream.kernels.linear.cuda_float_many import float_linear_many
from coldstream.kernels.linear.cuda_many import linear_many
from coldstream.kernels.linear.triton import linear, linear_float
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import empty_activations, quantize_cuda
from coldstream.kernels.quantize.triton import quantize
from coldstream.kernels.rms_norm.cuda import rms_norm_cuda
from coldstream.kernels.rms_norm.triton import rms_norm
from device import describe, graph_seconds
from results import write_result

HIDDEN, FFN, VOCAB, EXPERTS, TOP_K = 2048, 512, 248320, 256, 8
FEW, MANY = (1, 8), 2048  # rows
DECODE_CONTEXTS = (256, 16384)
LAUNCHES = 24
LAUNCHES_MANY = 8
CACHE_BYTES = 150 << 20  # more than any level holds
CUDA = torch.device("cuda")
Q4K, Q6K, F32 = QuantType.Q4_K, QuantType.Q6_K, QuantType.F32

Seconds = Callable[[], float]
Launch = Callable[[int], None]  # of a running number, which chooses the data


@dataclass(frozen=True)
class Pair:
    """One kernel in both tiers; `rows` of activations. The functions measure when they are called."""

    kernel: str
    rows: int
    triton: Seconds
    cuda: Seconds


def timed(launch: Launch, count: int) -> Seconds:
    """The time of one of `count` launches."""
    return lambda: graph_seconds([functools.partial(launch, i) for i in range(count)])


def copies(num_bytes: int) -> int:
    """How many sets of operands to rotate through."""
    return max(1, min(LAUNCHES, CACHE_BYTES // num_bytes + 1))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA)


def products_few() -> Iterator[Pair]:
    cases = ((Q4K, 8192, FEW), (Q6K, 4096, FEW), (Q6K, VOCAB, FEW[:1]), (F32, EXPERTS, FEW))
    for quant_type, size, row_counts in cases:
        for rows in row_counts:
            case = gpu_few.linear_case(
                f"product {quant_type.name} {size}x{HIDDEN}", HIDDEN, [(quant_type, size)], rows
            )
            count = 4 if size == VOCAB else LAUNCHES
            yield Pair(case.name, rows, timed(case.triton, count), timed(case.launch, count))


def products_many() -> Iterator[Pair]:
    for quant_type, size in ((Q4K, 8192), (Q6K, 4096)):
        number = copies(quant_type.row_bytes(HIDDEN) * size)
        weights = [gpu_many.random_blocks(quant_type, size, HIDDEN) for _ in range(number)]
        x, out = gpu_many.random_activations(MANY, HIDDEN), torch.empty(MANY, size, device=CUDA)

        def product(
            i: int,
            launch: Callable[..., None],
            x: object = x,
            out: torch.Tensor = out,
            weights: list[QuantTensor] = weights,
        ) -> None:
            launch(x, weights[i % len(weights)], out)

        yield Pair(
            f"product {quant_type.name} {size}x{HIDDEN}",
            MANY,
            timed(functools.partial(product, launch=linear), LAUNCHES_MANY),
            timed(functools.partial(product, launch=linear_many), LAUNCHES_MANY),
        )
    weight = QuantTensor(random(EXPERTS, HIDDEN).view(torch.uint8), F32, (EXPERTS, HIDDEN))
    values, logits = random(MANY, HIDDEN), torch.empty(MANY, EXPERTS, device=CUDA)
    yield Pair(
        f"product F32 {EXPERTS}x{HIDDEN}",
        MANY,
        timed(lambda _: linear_float(values, weight, logits), LAUNCHES_MANY),
        timed(lambda _: float_linear_many(values, weight, logits), LAUNCHES_MANY),
    )


def experts_few() -> Iterator[Pair]:
    for rows in FEW:
        for down_type in (Q4K, Q6K):
            for case in gpu_few.expert_cases(down_type, rows, with_shared=False):
                yield Pair(case.name, rows, timed(case.triton, LAUNCHES), timed(case.launch, LAUNCHES))


def experts_of_many(down_type: QuantType) -> Iterator[Pair]:
    """One layer of evenly spread random routing; a layer's experts are more than the caches hold."""
    num_pairs = MANY * TOP_K
    ids = torch.rand(MANY, EXPERTS, device=CUDA).topk(TOP_K).indices.int().contiguous()
    stacks = [gpu_many.random_blocks(Q4K, EXPERTS, FFN, HIDDEN) for _ in range(2)]
    stacks.append(gpu_many.random_blocks(down_type, EXPERTS, HIDDEN, FFN))
    addresses = [gpu_many.addresses(stack) for stack in stacks]
    x, h = gpu_many.random_activations(MANY, HIDDEN), gpu_many.random_activations(num_pairs, FFN)
    hidden = torch.empty(num_pairs, FFN, device=CUDA)
    out = torch.empty(MANY, TOP_K, HIDDEN, device=CUDA)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=CUDA)

    tables = experts_many.ExpertTables(*addresses)
    first, last = experts_many.choose_tilings(num_pairs, EXPERTS, Q4K, down_type)
    most = experts_many.max_tiles(num_pairs, EXPERTS) + 1
    groups = experts_many.Groups(ints(num_pairs), ints(num_pairs), ints(EXPERTS, 2), ints(most, 4))
    gate, up, down = (
        ExpertMatrices(table, stack.quant_type, *stack.shape[1:])
        for table, stack in zip(addresses, stacks, strict=True)
    )
    tile_pairs = triton_groups.choose_tile_pairs(num_pairs, EXPERTS)
    most = triton_groups.max_tiles(num_pairs, EXPERTS)
    theirs = triton_groups.PairGroups(tile_pairs, ints(EXPERTS), ints(num_pairs), ints(most, 3), ints(1))

    def group_in_triton(_: int) -> None:
        triton_groups.group_pairs(ids, gate, up, down, theirs)

    def group_in_cuda(_: int, keep: object = stacks) -> None:
        experts_many.group_experts(ids, tables, groups, min(first.tokens, last.tokens))

    group_in_triton(0)
    group_in_cuda(0)
    if down_type == Q4K:
        yield Pair(
            "experts, grouping", MANY, timed(group_in_triton, LAUNCHES), timed(group_in_cuda, LAUNCHES)
        )
        yield Pair(
            "experts gate·up",
            MANY,
            timed(
                lambda _: triton_groups.experts_gate_up_grouped(x, TOP_K, gate, up, theirs, hidden),
                LAUNCHES_MANY,
            ),
            timed(
                lambda _: experts_many.experts_gate_up_many(x, tables, first, FFN, HIDDEN, groups, hidden),
                LAUNCHES_MANY,
            ),
        )
    yield Pair(
        f"experts down {down_type.name}",
        MANY,
        timed(lambda _: triton_groups.experts_down_grouped(h, down, theirs, out), LAUNCHES_MANY),
        timed(
            lambda _: experts_many.experts_product_many(
                h, tables.down, last, HIDDEN, FFN, groups, out, by_token=False
            ),
            LAUNCHES_MANY,
        ),
    )


def rows_of(rows: int) -> Iterator[Pair]:
    """Norm and quantisation. Few rows come out of the cache, as in a model."""
    number = 1 if rows <= max(FEW) else copies(9 * rows * HIDDEN)
    sets = [(random(rows, HIDDEN), random(rows, HIDDEN)) for _ in range(number)]
    weight, codes = random(HIDDEN), empty_activations(rows, HIDDEN, CUDA)

    def norm(i: int, launch: Callable[..., None]) -> None:
        x, out = sets[i % number]
        launch(x, weight, 1e-6, out, codes)

    def to_codes(i: int, launch: Callable[..., None]) -> None:
        launch(sets[i % number][0], codes)

    for kernel, call, in_triton, in_cuda in (
        ("norm", norm, rms_norm, rms_norm_cuda),
        ("quantise", to_codes, quantize, quantize_cuda),
    ):
        yield Pair(
            kernel,
            rows,
            timed(functools.partial(call, launch=in_triton), LAUNCHES),
            timed(functools.partial(call, launch=in_cuda), LAUNCHES),
        )


def attention() -> Iterator[Pair]:
    for context in DECODE_CONTEXTS:
        number = copies(2 * context * gpu_attention.KV_HEADS * 2 * gpu_attention.HEAD_DIM)
        layers = [gpu_attention.Layer("f16", 1, context) for _ in range(number)]
        workspace = layers[0].workspace(gpu_attention.PLANNED_POSITIONS)
        for layer in layers:
            layer.prepare()

        def decode(
            i: int, method: str, layers: list[gpu_attention.Layer] = layers, workspace: object = workspace
        ) -> None:
            getattr(layers[i % len(layers)], method)(workspace)

        yield Pair(
            f"attention decode at {context}",
            1,
            timed(functools.partial(decode, method="decode_triton"), LAUNCHES),
            timed(functools.partial(decode, method="decode"), LAUNCHES),
        )
    layer = gpu_attention.Layer("f16", MANY, MANY)
    layer.prepare()
    yield Pair(
        "attention prefill",
        MANY,
        timed(lambda _: layer.prefill_triton(), 1),
        timed(lambda _: layer.prefill(), 1),
    )


def delta_net() -> Iterator[Pair]:
    measured = ((1, gpu_delta.decode_time), (MANY, gpu_delta.prefill_time))
    for rows, in_cuda in measured:
        yield Pair(
            "DeltaNet decode" if rows == 1 else "DeltaNet prefill",
            rows,
            functools.partial(gpu_delta.triton_time, 1, rows),
            functools.partial(in_cuda, 1, rows),
        )


PARTS: dict[str, Callable[[], Iterator[Pair]]] = {
    "products_few": products_few,
    "products_many": products_many,
    "experts_few": experts_few,
    "experts_many": lambda: (pair for kind in (Q4K, Q6K) for pair in experts_of_many(kind)),
    "rows": lambda: (pair for rows in (1, MANY) for pair in rows_of(rows)),
    "attention": attention,
    "delta_net": delta_net,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where there is no repository")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start, results = time.perf_counter(), []
    for part in arguments.parts:
        for pair in PARTS[part]():
            cuda_us, triton_us = 1e6 * pair.cuda(), 1e6 * pair.triton()
            results.append(
                {
                    "kernel": pair.kernel,
                    "rows": pair.rows,
                    "triton_us": round(triton_us, 2),
                    "cuda_us": round(cuda_us, 2),
                    "ratio": round(triton_us / cuda_us, 2),
                }
            )
            print(results[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    result = {
        "command": "python bench/gpu_tiers.py",
        "machine": describe("cuda"),
        "wall_s": round(time.perf_counter() - start, 1),
        "kernels": results,
    }
    write_result(result, arguments.out, arguments.commit)


if __name__ == "__main__":
    main()
