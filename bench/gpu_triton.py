"""Time of the Triton products on a GPU, beside what reading their weights alone would take.

Every figure is the median over replays of a CUDA graph of many launches, with weights that rotate through
more memory than the caches hold. `TB/s` counts the bytes of the weights that are read once, `TOPS` a
multiplication and an addition as two.

    python bench/gpu_triton.py --rows 1,64,2048
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.dequantize.triton import dequantize
from coldstream.kernels.dequantize.triton_blocks import code_table
from coldstream.kernels.experts.triton import ExpertMatrices, experts_down, experts_gate_up
from coldstream.kernels.experts.triton_groups import (
    PairGroups,
    choose_tile_pairs,
    experts_down_grouped,
    experts_gate_up_grouped,
    group_pairs,
    max_tiles,
)
from coldstream.kernels.linear.triton import linear, linear_float
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.triton import quantize
from device import graph_seconds

COPY_TBS = 4.3  # measured copy bandwidth of an H200
CACHE_BYTES = 150 << 20  # more than any level holds
LAUNCHES = 20
NUM_EXPERTS, NUM_RANKS, HIDDEN, FFN = 256, 8, 2048, 512
FEW_TOKENS = 8  # up to here the experts' kernels for few tokens are timed
DENSE = (
    (QuantType.Q4_K, 8192, 2048),
    (QuantType.Q4_K, 2048, 4096),
    (QuantType.Q5_K, 4096, 2048),
    (QuantType.Q6_K, 4096, 2048),
    (QuantType.Q8_0, 4096, 2048),
    (QuantType.Q4_0, 4096, 2048),
    (QuantType.Q5_0, 4096, 2048),
)
HEAD = (QuantType.Q6_K, 248320, 2048)

Launch = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """One kernel (or a few that belong together) at one shape."""

    name: str
    rows: int
    microseconds: float
    weight_bytes: int
    operations: int

    def line(self) -> str:
        tbs = self.weight_bytes / self.microseconds / 1e6
        tops = self.operations / self.microseconds / 1e6
        share = f"{tbs / COPY_TBS:5.0%}"
        return f"{self.name:34s} {self.rows:5d} {self.microseconds:9.2f} {tbs:6.2f} {share} {tops:7.1f}"


def microseconds(launches: Sequence[Launch], replays: int) -> float:
    """Time of one of `launches` when they run one after another, at least LAUNCHES of them."""
    count = max(LAUNCHES, len(launches))
    return 1e6 * graph_seconds([launches[i % len(launches)] for i in range(count)], replays)


def copies_of(num_bytes: int) -> int:
    return min(LAUNCHES, CACHE_BYTES // num_bytes + 1)


def random_blocks(quant_type: QuantType, *shape: int) -> QuantTensor:
    """Random bytes, which mean something in every type but the floats."""
    size = (*shape[:-1], quant_type.row_bytes(shape[-1]))
    return QuantTensor(torch.randint(0, 64, size, dtype=torch.uint8, device="cuda"), quant_type, shape)


def random_activations(num_rows: int, num_cols: int) -> QuantActivations:
    groups = -(-num_cols // GROUP_SIZE)
    q = torch.randint(-127, 128, (num_rows, groups * GROUP_SIZE), dtype=torch.int8, device="cuda")
    sums = q.view(num_rows, -1, SUM_SIZE).sum(dim=-1, dtype=torch.int16)
    return QuantActivations(q, torch.rand(num_rows, groups, device="cuda"), sums)


def time_dense(quant_type: QuantType, num_rows: int, num_cols: int, tokens: int, replays: int) -> Timing:
    num_bytes = num_rows * quant_type.row_bytes(num_cols)
    weights = [random_blocks(quant_type, num_rows, num_cols) for _ in range(copies_of(num_bytes))]
    x, out = random_activations(tokens, num_cols), torch.empty(tokens, num_rows, device="cuda")
    launches = [lambda weight=weight: linear(x, weight, out) for weight in weights]
    name = f"linear {quant_type.name} {num_rows}x{num_cols}"
    return Timing(name, tokens, microseconds(launches, replays), num_bytes, 2 * tokens * num_rows * num_cols)


def time_router(tokens: int, replays: int) -> Timing:
    weights = [torch.randn(NUM_EXPERTS, HIDDEN, device="cuda") for _ in range(LAUNCHES)]
    shape = (NUM_EXPERTS, HIDDEN)
    tensors = [QuantTensor(weight.view(torch.uint8), QuantType.F32, shape) for weight in weights]
    x, out = torch.randn(tokens, HIDDEN, device="cuda"), torch.empty(tokens, NUM_EXPERTS, device="cuda")
    launches = [lambda weight=weight: linear_float(x, weight, out) for weight in tensors]
    operations = 2 * tokens * NUM_EXPERTS * HIDDEN
    return Timing(
        "linear F32 256x2048", tokens, microseconds(launches, replays), 4 * NUM_EXPERTS * HIDDEN, operations
    )


def tables(stacks: Sequence[QuantTensor]) -> list[ExpertMatrices]:
    """A table of addresses for each stack of experts, which must outlive it."""
    result = []
    for stack in stacks:
        addresses = (
            stack.blocks.data_ptr() + torch.arange(len(stack.blocks), device="cuda") * stack.blocks[0].numel()
        )
        result.append(ExpertMatrices(addresses, stack.quant_type, *stack.shape[1:]))
    return result


def time_experts(down_type: QuantType, tokens: int, replays: int) -> list[Timing]:
    layers, pairs = 4, tokens * NUM_RANKS
    types = ((QuantType.Q4_K, FFN, HIDDEN), (QuantType.Q4_K, FFN, HIDDEN), (down_type, HIDDEN, FFN))
    stacks = [
        [random_blocks(quant_type, NUM_EXPERTS, *shape) for _ in range(layers)]
        for quant_type, *shape in types
    ]
    gate, up, down = map(tables, stacks)
    ids = torch.rand(LAUNCHES, tokens, NUM_EXPERTS, device="cuda").argsort(dim=-1)[..., :NUM_RANKS]
    ids = ids.int().contiguous()
    x, hidden = random_activations(tokens, HIDDEN), torch.empty(pairs, FFN, device="cuda")
    middle, out = random_activations(pairs, FFN), torch.empty(tokens, NUM_RANKS, HIDDEN, device="cuda")
    used = [len(part.unique()) for part in ids]
    gate_bytes = 2 * FFN * QuantType.Q4_K.row_bytes(HIDDEN) * sum(used) // LAUNCHES
    down_bytes = HIDDEN * down_type.row_bytes(FFN) * sum(used) // LAUNCHES
    operations = 2 * pairs * FFN * HIDDEN
    calls: dict[str, list[Launch]] = {"gate_up": [], "down": [], "group": []}
    for i in range(LAUNCHES):
        at = i % layers
        if tokens <= FEW_TOKENS:
            calls["gate_up"].append(lambda i=i, at=at: experts_gate_up(x, ids[i], gate[at], up[at], hidden))
            calls["down"].append(lambda i=i, at=at: experts_down(middle, ids[i], down[at], out))
            continue
        sizes = ((NUM_EXPERTS,), (pairs,), (max_tiles(pairs, NUM_EXPERTS), 3), (1,))
        parts = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)
        groups = PairGroups(choose_tile_pairs(pairs, NUM_EXPERTS), *parts)
        calls["group"].append(
            lambda i=i, at=at, groups=groups: group_pairs(ids[i], gate[at], up[at], down[at], groups)
        )
        calls["gate_up"].append(
            lambda at=at, groups=groups: experts_gate_up_grouped(
                x, NUM_RANKS, gate[at], up[at], groups, hidden
            )
        )
        calls["down"].append(lambda at=at, groups=groups: experts_down_grouped(middle, down[at], groups, out))
    costs = {"gate_up": (gate_bytes, 2 * operations), "down": (down_bytes, operations), "group": (0, 0)}
    names = {"gate_up": "experts gate_up Q4_K", "down": f"experts down {down_type.name}", "group": "group"}
    return [
        Timing(names[name], tokens, microseconds(calls[name], replays), *costs[name])
        for name in ("group", "gate_up", "down")
        if calls[name]
    ]


def time_values(tokens: int, replays: int) -> list[Timing]:
    """Quantisation of activations, and a matrix of every type as floats."""
    x, out = torch.randn(tokens, HIDDEN, device="cuda"), random_activations(tokens, HIDDEN)
    result = [Timing("quantize 2048", tokens, microseconds([lambda: quantize(x, out)], replays), 0, 0)]
    if tokens > 1:
        return result
    values = torch.empty(8192, HIDDEN, device="cuda")
    for quant_type in QuantType:
        weight, table = random_blocks(quant_type, 8192, HIDDEN), code_table(quant_type, values.device)
        time = microseconds([lambda weight=weight, table=table: dequantize(weight, values, table)], replays)
        name = f"dequantize {quant_type.name} 8192x2048"
        result.append(Timing(name, 0, time, weight.blocks.numel() + 4 * values.numel(), 0))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,64,2048", help="rows of activations, separated by commas")
    parser.add_argument("--replays", type=int, default=10)
    options = parser.parse_args()
    timings = []
    for tokens in map(int, options.rows.split(",")):
        timings += [time_dense(*shape, tokens, options.replays) for shape in DENSE]
        if tokens <= 64:
            timings.append(time_dense(*HEAD, tokens, options.replays))
        timings.append(time_router(tokens, options.replays))
        for down_type in (QuantType.Q4_K, QuantType.Q6_K):
            timings += time_experts(down_type, tokens, options.replays)
        timings += time_values(tokens, options.replays)
    print(f"{'':34s} {'rows':>5s} {'µs':>9s} {'TB/s':>6s} {'copy':>5s} {'TOPS':>7s}")
    for timing in timings:
        print(timing.line())
    print(json.dumps([vars(timing) for timing in timings]))


if __name__ == "__main__":
    main()
