"""The rates of this machine: RAM, link and both together, GPU memory, products, and the handshake.

    python -m bench.kernels.hardware                 one JSON object, in less than half a minute

These are the figures that `coldstream plan` keeps and the cost model takes.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.results import write_result
from coldstream.errors import DeviceError
from coldstream.kernels.cuda.device import find_gpu, measure_copy_bandwidth
from coldstream.kernels.experts.cpu_rates import written_codes
from coldstream.placement.hardware import GpuHardware, Hardware, measure_read_bandwidth

REPETITIONS = 3


def repeated(measure: Callable[[], Any]) -> dict[str, Any]:
    """Every value that `measure` gave, what it took, and why it failed if it did: the others go on."""
    values, start = [], time.perf_counter()
    try:
        for _ in range(REPETITIONS):
            value = measure()
            values.append(value if isinstance(value, (int, float)) else asdict(value))
    except Exception:
        return {"values": values, "failed": traceback.format_exc(limit=4)}
    return {"values": values, "seconds": round(time.perf_counter() - start, 2)}


def gpu_figures(hardware: Hardware, threads: int) -> dict[str, Any]:
    """Rates of the current device."""
    from coldstream.kernels.cuda.driver import driver_version
    from coldstream.kernels.cuda.link import measure_handshake, measure_link, measure_products

    gpu, memory = find_gpu(), written_codes(threads, hardware.measured_bytes)
    return {
        "gpu": asdict(GpuHardware(gpu.name, driver_version(), gpu.total_bytes, gpu.free_bytes)),
        "gpu_copy_bytes_per_s": repeated(measure_copy_bandwidth),
        "product_ops_per_s": repeated(measure_products),
        "link": repeated(lambda: measure_link(threads, memory)),
        "link_fewer_threads": repeated(lambda: measure_link(max(1, threads // 2), memory)),
        "handshake_s": repeated(lambda: measure_handshake(threads)),
        "handshake_one_thread_s": repeated(lambda: measure_handshake(1)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    hardware = replace(Hardware.measure(), cpu_flags=())
    threads = options.threads or hardware.num_physical_cores
    result = {
        "command": "python -m bench.kernels.hardware",
        "hardware": asdict(hardware),
        "threads": threads,
        "read_bytes_per_s": repeated(lambda: measure_read_bandwidth(threads)),
    }
    try:
        result |= gpu_figures(hardware, threads)
    except DeviceError as error:
        result["gpu"] = str(error)
    write_result(result, options.out)
    return int(any("failed" in value for value in result.values() if isinstance(value, dict)))


if __name__ == "__main__":
    sys.exit(main())
