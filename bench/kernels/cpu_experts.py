"""Speed of a layer's routed experts on the CPU, by rows an expert has, beside what memory and cores allow.

    python -m bench.kernels.cpu_experts --threads 8,15 --rows 1,4,16,64 --out FILE

The experts of the 35B-A3B shape, gate and up Q4_K of [512, 2048] and down Q6_K of [2048, 512], each with
the rows asked for. A token chooses neighbours, so that it has eight of them. A line gives the time of an
expert, the bytes of weights and the operations a second, and the rate at which the same threads read memory.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from bench.results import add_result_options, write_result
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.experts.cpu_rates import experts_of_rows, experts_run, random_weight
from coldstream.placement.hardware import measure_read_bandwidth

HIDDEN, FEED_FORWARD = 2048, 512
INNER, OUTER = QuantType.Q4_K, QuantType.Q6_K  # of gate and up, and of down
WARM_RUNS = 2


def layer(num_experts: int) -> tuple["_csrc.Weight", "_csrc.Weight", "_csrc.Weight"]:
    """Gate, up and down of so many experts."""
    gate, up = (random_weight(INNER, FEED_FORWARD, HIDDEN, num_experts) for _ in range(2))
    return gate, up, random_weight(OUTER, HIDDEN, FEED_FORWARD, num_experts)


def expert_bytes() -> int:
    """Of one expert's weights."""
    return 2 * INNER.row_bytes(HIDDEN) * FEED_FORWARD + OUTER.row_bytes(FEED_FORWARD) * HIDDEN


def seconds_of(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    tiers: list[str], threads: list[int], rows: list[int], num_experts: int, runs: int
) -> Iterator[dict[str, Any]]:
    """A row of the result for each combination."""
    weights, size = layer(num_experts), expert_bytes()
    for tier, count in itertools.product(tiers, threads):
        runtime = _csrc.Runtime(count, tier)
        read = measure_read_bandwidth(count)
        for each in rows:
            ids = experts_of_rows(num_experts, each)
            run = experts_run(runtime, ids, weights)
            samples = [seconds_of(run) for _ in range(WARM_RUNS + runs)]
            seconds = median(samples[WARM_RUNS:]) / num_experts
            yield {
                "tier": runtime.tier,
                "threads": count,
                "rows": each,
                "expert_us": 1e6 * seconds,
                "bytes_per_s": size / seconds,
                "read_bytes_per_s": read,
                "ops_per_s": 6 * each * HIDDEN * FEED_FORWARD / seconds,
            }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=numbers, default=[2])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--tiers", help="comma-separated; the machine's best if not given")
    parser.add_argument("--experts", type=int, default=128, help="more bytes than caches hold")
    parser.add_argument("--runs", type=int, default=5)
    add_result_options(parser)
    options = parser.parse_args()
    tiers = options.tiers.split(",") if options.tiers else _csrc.supported_tiers()[-1:]
    found = []
    for row in measure(tiers, options.threads, options.rows, options.experts, options.runs):
        print(
            {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()},
            flush=True,
        )
        found.append(row)
    write_result(
        {"expert_bytes": expert_bytes(), "experts": options.experts, "rows": found},
        options.out,
        options.commit,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
