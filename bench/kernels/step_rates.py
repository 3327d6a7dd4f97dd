"""What a GPU's kernels of one row reach, beside the constants with which forecasts estimate it.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.device import describe
from bench.kernels.gpu_types import dense_case, experts_case, new_ops
from bench.results import write_result
from coldstream.kernels.best_runs import best_seconds
from coldstream.kernels.cuda.device import find_gpu, measure_copy_bandwidth
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.experts.cpu_rates import measure_expert_rates
from coldstream.kernels.experts.gpu_rates import (
    KERNELS,
    LAUNCHES,
    CpuExperts,
    LayerShape,
    MeasuredLayers,
    StepRates,
    best_graph_seconds,
    best_window,
    measure_step_rates,
)
from coldstream.kernels.experts.shapes import MEASURED_TYPE
from coldstream.kernels.linear.cpu_rates import measure_product_rates
from coldstream.placement import cost, prompt_cost
from coldstream.placement.hardware import Hardware, read_windows
from coldstream.planning.machine import hardware_with

NUMBERS = (1, 2, 4, 8)
PROMPT_ROWS = (128, 512, 2048)
PIECES = (4 << 10, 128 << 10, 2 << 20)
COPIES = 200
SHARES = (
    ("launch_s", cost.LAUNCH_S, "launch_s", None),
    ("VRAM_SHARE", cost.VRAM_SHARE, "row_bytes_per_s", "copy"),
    ("BUS_SHARE", cost.BUS_SHARE, "row_bus_alone", "link"),
    ("BUS_BESIDE_SHARE", cost.BUS_BESIDE_SHARE, "row_bus_beside", "link_beside"),
    ("STAGED_SHARE", cost.STAGED_SHARE, "staged_beside", "link_beside"),
    ("MISSES_SHARE", cost.MISSES_SHARE, "misses_alone", "read"),
    ("MISSES_SHARE beside", cost.MISSES_SHARE, "misses_beside", "read_beside"),
)
Row = dict[str, Any]


class Clock:
    """Results of measurements, and the seconds of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, measure: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = measure()
        self.seconds[name] = round(time.perf_counter() - start, 3)
        print(f"{self.seconds[name]:7.3f} s  {name}", file=sys.stderr, flush=True)
        return found


def machine_rates(clock: Clock, hardware: Hardware) -> dict[str, float]:
    """Rates that constants are shares of, in the order of `measure_rates`."""
    threads = hardware.num_physical_cores
    read = max(clock.timed("read", lambda: read_windows(threads, hardware.reader_bytes)))
    clock.timed("products of types", lambda: measure_product_rates(threads))
    link = clock.timed("link", lambda: measure_link(threads, hardware.reader_bytes))
    handshake_s = clock.timed("handshake", lambda: min(measure_handshake(threads) for _ in range(3)))
    experts = clock.timed("experts", lambda: measure_expert_rates(threads, hardware.reader_bytes))
    return {
        "read": read,
        "link": link.alone,
        "link_beside": link.beside_read,
        "read_beside": link.read_beside,
        "handshake_s": handshake_s,
        "experts": experts,
        "copy": clock.timed("copy", measure_copy_bandwidth),
        "products": clock.timed("products", measure_products),
    }


def beside_constants(rates: StepRates, machine: dict[str, Any]) -> Iterator[Row]:
    """Each constant, and what this machine has in its place."""
    for name, constant, of_steps, of_machine in SHARES:
        value = getattr(rates, of_steps)
        share = None if value is None else value / (machine[of_machine] if of_machine else 1.0)
        yield {"constant": name, "fitted": constant, "measured": share, "value": value}


def layers_by_number(layers: MeasuredLayers, threads: int) -> Iterator[Row]:
    """Microseconds of a layer with so many experts, by where they are."""
    shape = layers.shape
    for number in NUMBERS:
        resident = layers.graph(layers.resident, number, shape.num_layers)
        over_bus = layers.graph(layers.mapped, number, shape.bus_layers)
        staged = layers.staging_graph(number, shape.bus_layers)
        run, run_bytes = layers.cpu_run(threads, number)
        bus_bytes = shape.bus_layers * number * shape.expert_bytes
        alone_s, staged_s = best_graph_seconds(over_bus), best_graph_seconds(staged)
        row = {
            "experts": number,
            "resident_us": best_graph_seconds(resident) / shape.num_layers,
            "bus_us": alone_s / shape.bus_layers,
            "staged_us": staged_s / shape.bus_layers,
            "cpu_us": best_seconds(run, 0.0, 0.05),
        }
        with CpuExperts.running(run, run_bytes) as cpu:
            bus, cpu_beside_bus = best_window(over_bus, alone_s, bus_bytes, cpu)
            staging, cpu_beside_staging = best_window(staged, staged_s, bus_bytes, cpu)
        row |= {
            "bus_beside_us": bus / shape.bus_layers,
            "staged_beside_us": staging / shape.bus_layers,
            "cpu_beside_bus_us": run_bytes / cpu_beside_bus,
            "cpu_beside_staged_us": run_bytes / cpu_beside_staging,
        }
        yield {name: value if name == "experts" else round(1e6 * value, 2) for name, value in row.items()}


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
        with KernelLoading.beside(KERNELS):
            pass

    clock.timed("loading kernels", load)
    machine = machine_rates(clock, hardware)
    steps = [
        clock.timed("steps", lambda: measure_step_rates(threads, hardware.reader_bytes)) for _ in range(2)
    ]
    with closing(MeasuredLayers(hardware.reader_bytes, LayerShape())) as layers:
        by_number = clock.timed("layers by number", lambda: list(layers_by_number(layers, threads)))
        thread = clock.timed("the launching thread", lambda: thread_seconds(layers))
    return {
        "rates": machine,
        "steps": [asdict(each) for each in steps],
        "beside_constants": list(beside_constants(steps[-1], machine)),
        "layers": by_number,
        "products": clock.timed("products of prompts", lambda: list(products_of_prompts())),
        "thread": thread,
        "prompt_constants": {
            name: getattr(prompt_cost, name) for name in ("HOST_LAUNCH_S", "HOST_COPY_S", "PIECE_S")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    options = parser.parse_args()
    clock = Clock()
    result = measured(clock)
    for row in result["beside_constants"]:
        print(f"{row['constant']:20} fitted {row['fitted']:.3g}, measured {row['measured']}", file=sys.stderr)
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
