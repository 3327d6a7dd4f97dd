"""Time of the prefill products on a GPU, beside what the arithmetic and the bytes alone would take.

Every figure is the median over replays of a CUDA graph of many launches; weights rotate through more memory
than the caches hold. `TOPS` counts a multiplication and an addition as two.

    python -m bench.kernels.gpu_gemm --rows 168,2048,8192
"""

import argparse
import json
from collections.abc import Callable, Sequence

import torch

from bench.device import graph_seconds
from bench.kernels.random_blocks import random_blocks
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import GROUP_SIZE, SUM_SIZE, QuantActivations
from coldstream.kernels.cuda.gemm_tiles import Tiling
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.experts import cuda_gemm as experts
from coldstream.kernels.linear import cuda_gemm as linear
from coldstream.kernels.linear.cuda_float_gemm import float_linear_gemm
from coldstream.kernels.linear.integer_types import activation_scale_size
from coldstream.kernels.quant_tensor import QuantTensor

LAUNCHES = 20
CACHE_BYTES = 150 << 20  # more than any level holds
NUM_EXPERTS, NUM_RANKS, HIDDEN, FFN = 256, 8, 2048, 512
RANDOM_ROWS = 64


def random_weights(quant_type: QuantType, *shape: int) -> QuantTensor:
    """Random blocks; a part of the rows is repeated, as making all takes long."""
    part = torch.from_numpy(random_blocks(quant_type, (RANDOM_ROWS, shape[-1]), int(quant_type))).cuda()
    repeats = torch.Size(shape[:-1]).numel() // RANDOM_ROWS
    return QuantTensor.from_bytes(part.repeat(repeats, 1).reshape(-1), quant_type, shape)


def random_activations(quant_type: QuantType, num_rows: int, num_values: int) -> QuantActivations:
    """Rows as weights of a type read them."""
    groups = -(-num_values // GROUP_SIZE)
    q = torch.randint(-127, 128, (num_rows, groups * GROUP_SIZE), dtype=torch.int8, device="cuda")
    sums = q.view(num_rows, -1, SUM_SIZE).sum(dim=-1, dtype=torch.int16)
    num_scales = q.shape[1] // activation_scale_size(quant_type)
    return QuantActivations(q, torch.rand(num_rows, num_scales, device="cuda"), sums)


def dense(tiling: Tiling, num_rows: int, shape: tuple[int, int], replays: int) -> dict[str, object]:
    """One product with a matrix of `shape`."""
    program = CudaProgram(linear.PROGRAM.source, (linear.instance(tiling),))
    num_bytes = tiling.quant_type.row_bytes(shape[1]) * shape[0]
    weights = [random_weights(tiling.quant_type, *shape) for _ in range(min(8, CACHE_BYTES // num_bytes + 1))]
    x = random_activations(tiling.quant_type, num_rows, shape[1])
    out = torch.empty(num_rows, shape[0], device="cuda")

    def launch(weight: QuantTensor) -> Callable[[], None]:
        return lambda: linear.launch_linear(program, tiling, x, weight, out)

    us = 1e6 * graph_seconds([launch(weights[i % len(weights)]) for i in range(LAUNCHES)], replays)
    return line(
        f"dense {shape[0]}x{shape[1]}", tiling, num_rows, us, num_rows * shape[0] * shape[1], num_bytes
    )


def line(
    what: str, tiling: Tiling, num_rows: int, us: float, products: int, num_bytes: int
) -> dict[str, object]:
    return {
        "what": what,
        "tiling": tiling.name,
        "rows": num_rows,
        "us": round(us, 1),
        "tops": round(2e-6 * products / us, 1),
        "weights_gb_per_s": round(1e-3 * num_bytes / us),
    }


def routed(gate_tiling: Tiling, down_tiling: Tiling, num_rows: int, replays: int) -> list[dict[str, object]]:
    """The grouping and the two products of one layer with evenly spread random routing."""
    ids = torch.rand(num_rows, NUM_EXPERTS, device="cuda").topk(NUM_RANKS).indices.int()
    num_pairs = num_rows * NUM_RANKS
    gate, up = (random_weights(gate_tiling.quant_type, NUM_EXPERTS, FFN, HIDDEN) for _ in range(2))
    down = random_weights(down_tiling.quant_type, NUM_EXPERTS, HIDDEN, FFN)
    tables = experts.ExpertTables(*[addresses(stack) for stack in (gate, up, down)])
    groups = experts.Groups(
        torch.empty(num_pairs, dtype=torch.int32, device="cuda"),
        torch.empty(num_pairs, dtype=torch.int32, device="cuda"),
        torch.empty(NUM_EXPERTS, 2, dtype=torch.int32, device="cuda"),
        torch.empty(experts.max_tiles(num_pairs, NUM_EXPERTS) + 1, 4, dtype=torch.int32, device="cuda"),
    )
    x = random_activations(gate_tiling.quant_type, num_rows, HIDDEN)
    h = random_activations(down_tiling.quant_type, num_pairs, FFN)
    hidden = torch.empty(num_pairs, FFN, device="cuda")
    out = torch.empty(num_pairs, HIDDEN, device="cuda")
    program = CudaProgram(
        experts.PROGRAM.source, (experts.instance(gate_tiling, True), experts.instance(down_tiling, False))
    )
    tile_tokens = min(gate_tiling.tokens, down_tiling.tokens)

    def group() -> None:
        experts.group_pairs(ids, len(tables.gate), groups)
        experts.plan_tiles(ids.numel(), tables, groups, tile_tokens)

    def gate_up() -> None:
        job = experts.gate_up_job(x, tables, gate_tiling, FFN, HIDDEN, groups, hidden)
        experts.launch_experts(program, gate_tiling, True, job, groups)

    def down_product() -> None:
        job = experts.product_job(h, tables.down, down_tiling, HIDDEN, FFN, groups, out, by_token=False)
        experts.launch_experts(program, down_tiling, False, job, groups)

    products = num_pairs * HIDDEN * FFN
    return [
        line("group pairs", gate_tiling, num_rows, 1e6 * graph_seconds([group] * LAUNCHES, replays), 0, 0),
        line(
            "gate up",
            gate_tiling,
            num_rows,
            1e6 * graph_seconds([gate_up] * LAUNCHES, replays),
            2 * products,
            2 * gate.blocks.numel(),
        ),
        line(
            "down",
            down_tiling,
            num_rows,
            1e6 * graph_seconds([down_product] * LAUNCHES, replays),
            products,
            down.blocks.numel(),
        ),
    ]


def floats(num_rows: int, shape: tuple[int, int], replays: int) -> dict[str, object]:
    """A product with an F32 matrix of `shape`."""
    values = torch.randn(shape, device="cuda")
    weight = QuantTensor(values.view(torch.uint8), QuantType.F32, shape)
    x, out = torch.randn(num_rows, shape[1], device="cuda"), torch.empty(num_rows, shape[0], device="cuda")
    us = 1e6 * graph_seconds([lambda: float_linear_gemm(x, weight, out)] * LAUNCHES, replays)
    products = num_rows * shape[0] * shape[1]
    return {
        "what": f"float {shape[0]}x{shape[1]}",
        "rows": num_rows,
        "us": round(us, 1),
        "tflops": round(2e-6 * products / us, 1),
    }


def addresses(stack: QuantTensor) -> torch.Tensor:
    starts = [stack[e].blocks.data_ptr() for e in range(stack.shape[0])]
    return torch.tensor(starts, dtype=torch.int64, device="cuda")


def candidates(tilings: Sequence[Tiling], choices: str) -> list[Tiling]:
    """`tilings` and `choices`: the numbers of a `Tiling` with dots between, the last 1 for warpgroups."""
    found = list(tilings)
    for choice in filter(None, choices.split(",")):
        *numbers, by_warpgroups = map(int, choice.split("."))
        found.append(Tiling(tilings[0].quant_type, *numbers, bool(by_warpgroups)))
    return found


def routed_tilings(num_rows: int, gate_type: QuantType, down_type: QuantType) -> list[tuple[Tiling, Tiling]]:
    """For gate and up, and for down: what the engine takes, and what devices without warpgroups take."""
    chosen = tuple(
        experts.choose_tilings(num_rows * NUM_RANKS, NUM_EXPERTS, quant_type)[0]
        for quant_type in (gate_type, down_type)
    )
    others = tuple(experts.LARGE_TILINGS[tiling.quant_type][-1] for tiling in chosen)
    return list(dict.fromkeys(((chosen[0], chosen[1]), (others[0], others[1]))))


def show(result: dict[str, object]) -> None:
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="168,2048,8192")
    parser.add_argument("--types", default="Q4_K,Q6_K")
    parser.add_argument("--gate-type", default="Q4_K", help="of gates and ups; `same`: the type of downs")
    parser.add_argument("--tilings", default="", help="more tiles to try")
    parser.add_argument("--parts", default="dense,routed,float")
    parser.add_argument("--replays", type=int, default=5)
    arguments = parser.parse_args()
    for num_rows in map(int, arguments.rows.split(",")):
        if "float" in arguments.parts:
            for width in (256, 32):
                show(floats(num_rows, (width, HIDDEN), arguments.replays))
        for quant_type in (QuantType[name] for name in arguments.types.split(",")):
            if "dense" in arguments.parts:
                for tiling in candidates(linear.TILINGS[quant_type], arguments.tilings):
                    show(dense(tiling, num_rows, (8192, 2048), arguments.replays))
            if "routed" in arguments.parts:
                is_same = arguments.gate_type == "same"
                gate_type = quant_type if is_same else QuantType[arguments.gate_type]
                for tilings in routed_tilings(num_rows, gate_type, quant_type):
                    for result in routed(*tilings, num_rows, arguments.replays):
                        show(result)


if __name__ == "__main__":
    main()
