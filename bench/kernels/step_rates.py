"""What a GPU's kernels reach, beside the shares that forecasts estimate, and the forecasts of both.

    python -m bench.kernels.step_rates --out docs/results/gpu/step_rates.json

Measures all rates of this machine as a first start does, with the seconds of each, and those of steps twice.
Then come the same layers with other numbers of experts, where they lie and who computes them, dense products
of one row, products of prompts, and what the launching thread takes. Less than a minute.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.device import describe
from bench.full_size_forecast import TYPED_SIZES
from bench.kernels.gpu_types import dense_case, experts_case, new_ops
from bench.results import add_result_options, write_result
from coldstream.kernels.cuda.device import find_gpu, measure_copy_bandwidth
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.experts.cpu_rates import measure_expert_rates, written_codes
from coldstream.kernels.experts.gpu_rates import (
    LAUNCHES,
    LayerShape,
    MeasuredLayers,
    best_beside,
    best_graph_seconds,
    measure_step_rates,
    needed_kernels,
)
from coldstream.kernels.experts.shapes import MEASURED_TYPE
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.linear.cpu_rates import RowProduct, measure_product_rates
from coldstream.kernels.mixer_rates import measure_mixer_rates
from coldstream.placement.forecast import Known, decode_forecast
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import PUBLISHED
from coldstream.placement.kernel_shares import KernelShares
from coldstream.placement.prompt_cost import prefill_seconds
from coldstream.placement.rates import Rates
from coldstream.planning.machine import hardware_with

NUMBERS = (1, 2, 4, 8)
PROMPT_ROWS = (128, 512, 2048)
PIECES = (4 << 10, 128 << 10, 2 << 20)
COPIES = 200
GPU_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of experts that are in the GPU's memory
Row = dict[str, Any]


class Clock:
    """Results of measurements, and the seconds of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.first_steps: StepRates | None = None

    def timed(self, name: str, measure: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = measure()
        self.seconds[name] = round(time.perf_counter() - start, 3)
        print(f"{self.seconds[name]:7.3f} s  {name}", file=sys.stderr, flush=True)
        return found


def machine_rates(clock: Clock, hardware: Hardware) -> Hardware:
    """The machine with its rates, in the order of `measure_rates`."""
    threads = hardware.num_physical_cores
    codes = clock.timed("memory", lambda: written_codes(threads, hardware.measured_bytes))
    link = clock.timed("reading, and the bus", lambda: measure_link(threads, codes))
    products = clock.timed("products of types", lambda: measure_product_rates(threads))
    row = RowProduct(threads, codes)
    row_rate = clock.timed("a row of weights in RAM", row.bytes_per_s)
    mixers = clock.timed("what is between products", lambda: measure_mixer_rates(threads, row.run, codes))
    handshake_s = clock.timed("handshake", lambda: min(measure_handshake(threads) for _ in range(3)))
    experts = clock.timed("experts", lambda: measure_expert_rates(threads, codes))
    steps = [
        clock.timed(f"steps, {turn}", lambda: measure_step_rates(threads, codes))
        for turn in ("first", "second")
    ]
    assert hardware.gpu is not None
    gpu = replace(
        hardware.gpu,
        copy_bytes_per_s=clock.timed("copy", measure_copy_bandwidth),
        product_ops_per_s=clock.timed("products", measure_products),
        link_bytes_per_s=link.alone,
        link_beside_read=link.beside_read,
        read_beside_link=link.read_beside,
        handshake_s=handshake_s,
        expert_bytes_per_s=experts,
        steps=steps[-1],
    )
    clock.first_steps = steps[0]
    return replace(
        hardware,
        cpu_flags=(),
        read_bytes_per_s=max(link.windows),
        product_values_per_s=products,
        row_bytes_per_s=row_rate,
        mixers=mixers,
        gpu=gpu,
    )


def beside_estimates(hardware: Hardware) -> Iterator[Row]:
    """Each share, as it is estimated, as it follows from measured steps, and how many times the estimate."""
    measured, estimated = KernelShares.of(hardware), KernelShares()
    for name in measured.measured:
        pair = getattr(estimated, name), getattr(measured, name)
        ratio = round(pair[1] / pair[0], 3) if pair[0] else None
        yield {"share": name, "estimated": pair[0], "measured": pair[1], "ratio": ratio}


def forecasts(hardware: Hardware) -> Iterator[Row]:
    """Of the full-size model, by estimated shares and by measured ones: tokens a second."""
    measured = Rates.of(hardware)
    both = {"estimated": replace(measured, shares=KernelShares()), "measured": measured}
    for share in GPU_SHARES:
        hit_rates = (1.0 if share == 1.0 else PUBLISHED.at(share),) * TYPED_SIZES.num_layers
        resident = np.zeros((TYPED_SIZES.num_layers, TYPED_SIZES.num_experts), np.bool_)
        resident[:, : round(share * TYPED_SIZES.num_experts)] = True
        for by, rates in both.items():
            decode, _ = decode_forecast(Known(TYPED_SIZES, rates, PUBLISHED), hit_rates)
            prompts = {
                rows: rows / prefill_seconds(TYPED_SIZES, rates, resident, None, rows, max(PROMPT_ROWS))
                for rows in PROMPT_ROWS
            }
            yield {"experts_share": share, "shares": by, "decode": 1 / decode, "prompts": prompts}


def layers_by_number(layers: MeasuredLayers, threads: int) -> Iterator[Row]:
    """Microseconds of a layer with so many experts, by where they are, and of requests to the CPU."""
    shape = layers.shape
    resident_s = {
        number: best_graph_seconds(layers.graph(layers.resident, number, shape.num_layers)) / shape.num_layers
        for number in NUMBERS
    }
    with layers.requests(threads, resident_s[NUMBERS[-1]]) as requests:
        for number in NUMBERS:
            over_bus = layers.graph(layers.mapped, number, shape.bus_layers)
            staged = layers.staging_graph(number, shape.bus_layers)
            bus_bytes = shape.bus_layers * number * shape.expert_bytes
            alone_s, staged_s = best_graph_seconds(over_bus), best_graph_seconds(staged)
            request_s = requests.best_seconds(number)
            bus = best_beside(over_bus, alone_s, bus_bytes, requests, shape.expert_bytes)
            staging = best_beside(staged, staged_s, bus_bytes, requests, shape.expert_bytes)
            row = {
                "resident_us": resident_s[number],
                "bus_us": alone_s / shape.bus_layers,
                "staged_us": staged_s / shape.bus_layers,
                "request_us": request_s,
                "bus_beside_8_us": bus[0] / shape.bus_layers,
                "staged_beside_8_us": staging[0] / shape.bus_layers,
                "request_of_8_beside_bus_us": bus[1],
                "request_of_8_beside_staged_us": staging[1],
            }
            yield {"experts": number} | {name: round(1e6 * value, 2) for name, value in row.items()}


def products_of_prompts() -> Iterator[Row]:
    """Microseconds of a dense product and of routed experts, of MEASURED_TYPE."""
    for what, case in (("dense", dense_case), ("experts", experts_case)):
        for rows in (1, *PROMPT_ROWS):
            us = case(new_ops(), MEASURED_TYPE, rows).microseconds()
            yield {"what": what, "rows": rows, "us": round(us, 2)}


def thread_seconds(layers: MeasuredLayers) -> Row:
    """Of the launching thread: a launch that no graph has; and a copy, which the device takes longer for."""
    step = layers.step(layers.resident, 1, layers.shape.num_layers)
    stream = streams.current_stream()
    source = allocations.page_locked((PIECES[-1],), "uint8")
    target = allocations.block(PIECES[-1])
    stream.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        stream.synchronize()
    found: Row = {"launch_s": statistics.median(times) / (LAUNCHES * layers.shape.num_layers)}
    for size in PIECES:
        begin, end = (streams.Event(has_time=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        for _ in range(COPIES):
            copies.to_device(target.address, source[:size])
        end.record()
        queued = time.perf_counter() - start
        end.synchronize()
        device_s = end.milliseconds_since(begin) / 1e3
        found[f"copy_of_{size}"] = {"thread_s": queued / COPIES, "device_s": device_s / COPIES}
    return found


def measured(clock: Clock) -> Row:
    hardware = hardware_with(find_gpu())
    threads = hardware.num_physical_cores

    def load() -> None:
        with KernelLoading.beside(needed_kernels()):
            pass

    clock.timed("loading kernels", load)
    hardware = machine_rates(clock, hardware)
    codes = written_codes(threads, hardware.measured_bytes)
    with closing(MeasuredLayers(codes, LayerShape())) as layers:
        by_number = clock.timed("layers by number", lambda: list(layers_by_number(layers, threads)))
        thread = clock.timed("the launching thread", lambda: thread_seconds(layers))
    return {
        "hardware": asdict(hardware),
        "first_steps": asdict(clock.first_steps) if clock.first_steps else None,
        "shares": list(beside_estimates(hardware)),
        "forecasts": list(forecasts(hardware)),
        "layers": by_number,
        "products": clock.timed("products of prompts", lambda: list(products_of_prompts())),
        "thread": thread,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_result_options(parser)
    options = parser.parse_args()
    clock = Clock()
    result = measured(clock)
    for row in (*result["shares"], *result["forecasts"]):
        print("  ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
    write_result(
        {
            "command": "python -m bench.kernels.step_rates",
            "machine": describe("cuda"),
            **result,
            "seconds": clock.seconds,
        },
        options.out,
        options.commit,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
