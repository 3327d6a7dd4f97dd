"""The properties and bandwidth of a device, for the machine's part of a result."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from cuda.bindings import driver

from coldstream.kernels.cuda.runtime import allocations, streams
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.placement.hardware import Hardware, measure_read_bandwidth

Outputs = TypeVar("Outputs")

REPLAYS = 15
WARM_S = 0.25  # of work before a measurement: an idle GPU runs at a fraction of its clock


def captured(step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
    """`Graph.capture`, with PyTorch's operations recorded as well."""

    def on_both() -> Outputs:
        with torch.cuda.stream(torch.cuda.ExternalStream(streams.current_stream().handle)):
            return step()

    return Graph.capture(on_both)


def graph_seconds(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median seconds over `replays` of one of `calls`, captured one after the other in a CUDA graph.

    Let them rotate through more memory than the L2 cache holds.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, _ = captured(lambda: [call() for call in calls])
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        graph.launch()
        torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(replays):
        begin.record()
        graph.launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / len(calls)


def describe(device: str) -> dict[str, Any]:
    """Names and versions of everything under the program."""
    about = {
        "cpu": Hardware.measure().cpu_name,
        "cores": Hardware.measure().num_physical_cores,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device != "cuda":
        return about
    properties = torch.cuda.get_device_properties()
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        **about,
    }


def measure_bandwidth(device: str, threads: int) -> float:
    """Bytes per second of a copy in device memory, read and written together; on the CPU of reading."""
    if device != "cuda":
        return measure_read_bandwidth(threads)
    from coldstream.kernels.cuda.device import measure_copy_bandwidth

    return measure_copy_bandwidth()


@contextmanager
def no_memory_left(but: int = 0) -> Iterator[None]:
    """Another program has taken all of the device's memory, `but` so many bytes."""
    allocations.trim()
    torch.cuda.empty_cache()
    spare = driver.cuMemAlloc(but)[1] if but else None
    taken, size = [], 2**36
    while size >= 2**12:
        status, address = driver.cuMemAlloc(size)
        if status == driver.CUresult.CUDA_SUCCESS:
            taken.append(address)
        else:
            size //= 2
    if spare is not None:
        driver.cuMemFree(spare)
    try:
        yield
    finally:
        for address in taken:
            driver.cuMemFree(address)


def gpu_memory_used() -> int | None:
    """Bytes in use on the first GPU, by all processes and the driver; None where there is no GPU."""
    said = _nvidia_smi("memory.used")
    return int(said) * 2**20 if said else None


def _driver_version() -> str:
    return _nvidia_smi("driver_version") or "unknown"


def _nvidia_smi(property_name: str) -> str | None:
    """What `nvidia-smi` says of the first GPU, without a unit; None if it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={property_name}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
