"""Speed of the quantised products: GB/s of weights for one row, GFLOP/s for many, per type and tier.

The ceiling comes first: what the same threads read from memory when there is next to nothing to compute,
which is a product of F32 weights. Every line gives the best of several runs.

    python -m bench.kernels.quant_kernels --types Q4_K,Q6_K --rows 1,8,512 --threads 2
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts.cpu_rates import random_weight

DECODE_BYTES = 256 << 20  # larger than a core's share of any cache this is meant for


def best_seconds(call: Callable[[], None], repeats: int) -> float:
    """The shortest of `repeats` runs after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(
    runtime: "_csrc.Runtime", quant_type: QuantType, num_rows: int, shape: tuple[int, int], repeats: int
) -> dict[str, object]:
    """One product of `num_rows` activation rows with a weight of `shape`."""
    weight = random_weight(quant_type, *shape)
    x = np.random.default_rng(1).standard_normal((num_rows, shape[1]), dtype=np.float32)
    out = np.empty((num_rows, shape[0]), dtype=np.float32)
    seconds = best_seconds(lambda: _csrc.linear(runtime, x, [weight], [out]), repeats)
    num_bytes = quant_type.row_bytes(shape[1]) * shape[0]
    return {
        "type": quant_type.name,
        "tier": runtime.tier,
        "threads": runtime.threads,
        "rows": num_rows,
        "shape": list(shape),
        "ms": round(1e3 * seconds, 3),
        "gb_per_s": round(num_bytes / seconds / 1e9, 2),
        "gflop_per_s": round(2 * num_rows * shape[0] * shape[1] / seconds / 1e9, 1),
    }


def shape_for(quant_type: QuantType, num_rows: int, cols: int) -> tuple[int, int]:
    """GEMV streams weights from memory; for GEMM, a matrix of a layer's size is enough."""
    if num_rows > 8:
        return 4096, cols
    return DECODE_BYTES // quant_type.row_bytes(cols), cols


def run(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    tiers = arguments.tiers.split(",") if arguments.tiers else _csrc.supported_tiers()
    for name in arguments.types.split(","):
        for tier in tiers:
            runtime = _csrc.Runtime(arguments.threads, tier)
            for rows in map(int, arguments.rows.split(",")):
                if tier != "generic" or rows <= 8:  # the plain loops would take minutes
                    quant_type = QuantType[name]
                    yield measure(
                        runtime,
                        quant_type,
                        rows,
                        shape_for(quant_type, rows, arguments.cols),
                        arguments.repeats,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="Q4_K,Q5_K,Q6_K,Q8_0,Q4_0,Q5_0")
    parser.add_argument("--tiers", help="comma-separated; all that this machine supports if not given")
    parser.add_argument("--rows", default="1,4,16,128,512")
    parser.add_argument("--cols", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    best = _csrc.Runtime(arguments.threads)
    ceiling = measure(best, QuantType.F32, 1, shape_for(QuantType.F32, 1, arguments.cols), arguments.repeats)
    bandwidth = float(str(ceiling["gb_per_s"]))
    if not arguments.json:
        print(f"{arguments.threads} threads read {bandwidth:.1f} GB/s")
        print(f"{'type':8}{'tier':9}{'rows':>5}{'ms':>10}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>10}")
    for result in run(arguments):
        share = float(str(result["gb_per_s"])) / bandwidth
        if arguments.json:
            print(json.dumps({**result, "share_of_read": round(share, 3)}), flush=True)
        else:
            print(
                f"{result['type']:8}{result['tier']:9}{result['rows']:5}{result['ms']:10}{result['gb_per_s']:8}"
                f"{share:9.0%}{result['gflop_per_s']:10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
