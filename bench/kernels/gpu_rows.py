"""Time of the row-wise kernels on a GPU, beside the time their bytes take at the measured copy bandwidth.

Every figure is the median over replays of a CUDA graph of many launches that follow each other as in a
model: a launch may start while the one before it ends. Weights, and all rows of a prefill, rotate through
more memory than the caches hold; those of a decoded token stay in the cache, as their producer has
just written them.

    python -m bench.kernels.gpu_rows
"""

import json
from collections.abc import Callable, Sequence

import torch

from bench.device import graph_seconds, measure_bandwidth
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.ops import ExpertOutputs, Routing
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda, rms_norm_cuda
from coldstream.kernels.router.cuda import RouterBuffers, router_choose_cuda, router_gemv_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda

LAUNCHES = 40
CACHE_BYTES = 150 << 20  # more than any level holds
HIDDEN, FFN, RANKS = 2048, 512, 8
EPS = 1e-6
CUDA = torch.device("cuda")

Launch = Callable[[], None]


def microseconds(launches: Sequence[Launch]) -> float:
    """Median time of one of `launches` when they run one after another."""
    return 1e6 * graph_seconds([launches[i % len(launches)] for i in range(LAUNCHES)])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA)


def copies(num_bytes: int, rows: int) -> int:
    """How many sets of operands to rotate through."""
    return 1 if rows <= 8 else max(1, min(LAUNCHES, CACHE_BYTES // num_bytes + 1))


def norms(rows: int) -> dict[str, tuple[list[Launch], int]]:
    """Launches and the bytes that one of them moves."""
    weight, size = random(HIDDEN), 4 * rows * HIDDEN
    both = size + size // 4

    def plain() -> Launch:
        x, out, codes = random(rows, HIDDEN), random(rows, HIDDEN), empty_activations(rows, HIDDEN, CUDA)
        return lambda: rms_norm_cuda(x, weight, EPS, out, codes)

    def after_sum() -> Launch:
        x, update, out = random(rows, HIDDEN), 1e-3 * random(rows, HIDDEN), random(rows, HIDDEN)
        codes = empty_activations(rows, HIDDEN, CUDA)
        return lambda: add_rms_norm_cuda(x, update, x, weight, EPS, out, codes)

    def after_experts() -> Launch:
        x, out, codes = random(rows, HIDDEN), random(rows, HIDDEN), empty_activations(rows, HIDDEN, CUDA)
        weights, gate = random(rows, RANKS).softmax(-1), random(rows, 1)
        routing = Routing(torch.zeros(rows, RANKS, dtype=torch.int32, device=CUDA), weights, gate)
        experts = ExpertOutputs(1e-3 * random(rows, RANKS, HIDDEN), random(rows, HIDDEN), routing)
        return lambda: add_rms_norm_cuda(x, experts, x, weight, EPS, out, codes)

    return {
        "norm": ([plain() for _ in range(copies(size + both, rows))], size + both),
        "add, norm": ([after_sum() for _ in range(copies(3 * size + both, rows))], 3 * size + both),
        "combine, norm": (
            [after_experts() for _ in range(copies((RANKS + 3) * size + both, rows))],
            (RANKS + 3) * size + both,
        ),
    }


def after_norm(router: Launch, rows: int) -> Launch:
    """Both, one after the other."""
    (norm,), _ = norms(rows)["combine, norm"]

    def both() -> None:
        norm()
        router()

    return both


def routers(rows: int, num_experts: int) -> dict[str, tuple[list[Launch], int]]:
    ids = torch.empty(rows, RANKS, dtype=torch.int32, device=CUDA)
    weights, gate, logits = random(rows, RANKS), random(rows, 1), random(rows, num_experts)
    arrivals = torch.zeros(1, dtype=torch.int32, device=CUDA)
    num_bytes = 4 * (num_experts + 1) * HIDDEN

    def in_one_launch() -> Launch:
        x, shared = random(rows, HIDDEN), random(1, HIDDEN)
        weight = HIDDEN**-0.5 * random(num_experts, HIDDEN)
        return lambda: router_gemv_cuda(
            x, weight, shared, RouterBuffers(ids, weights, gate, logits, arrivals)
        )

    choose: list[Launch] = [lambda: router_choose_cuda(logits, ids, weights)]
    choice = {f"choice of {num_experts}": (choose, 4 * rows * num_experts)}
    if rows <= 8:
        alone = [in_one_launch() for _ in range(CACHE_BYTES // num_bytes + 1)]
        return choice | {
            f"router of {num_experts}": (alone, num_bytes),
            f"norm and router of {num_experts}": ([after_norm(router, rows) for router in alone], num_bytes),
        }
    return choice


def activation(rows: int) -> dict[str, tuple[list[Launch], int]]:
    def one() -> Launch:
        gate_up, codes = random(rows, 2 * FFN), empty_activations(rows, FFN, CUDA)
        gate, up = gate_up.split(FFN, dim=1)
        return lambda: swiglu_cuda(gate, up, None, codes)

    num_bytes = 9 * rows * FFN
    number = copies(num_bytes, rows)
    return {"swiglu": ([one() for _ in range(number)], num_bytes)}


def main() -> None:
    bandwidth = 1e-6 * measure_bandwidth("cuda", 0)
    print(f"copy: {1e-6 * bandwidth:.2f} TB/s")
    for rows in (1, 4, 8, 2048, 8192):
        cases = norms(rows) | activation(rows) | routers(rows, 256) | routers(rows, 512)
        for name, (launches, num_bytes) in cases.items():
            us = microseconds(launches)
            share = num_bytes / bandwidth / us
            result = {"kernel": name, "rows": rows, "us": round(us, 2), "share": round(share, 3)}
            print(json.dumps(result), flush=True)
        del cases
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
