"""One layer's step whose missing experts are read on demand over the bus, beside the same step prefetched.

    python -m bench.kernels.gpu_prefetch --out docs/results/gpu/prefetch.json

Two layers of the full-size shape, one token. The experts of the first are all resident, and it guesses at
those of the second, of whose eight some are in page-locked RAM only. The routers are alike and see the same
x, so that every guess is right and both ways move the same experts. Between the layers the GPU idles for a
window, which stands for the rest of a layer; the experts of the first layer come on top of it. The CPU
computes nothing.

The floor is the same graph with all experts resident. A figure is the median of batches of replays, each of
which finds nothing of the experts in the L2 cache; the time of a replay includes the start of its graph. All
three ways must give the same bits, and what each moved is counted on the device.
"""

import argparse
import functools
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from bench.device import captured, describe, graph_seconds
from bench.full_size_model import FULL_SHAPE
from bench.kernels.prefetch_layers import NUM_LAYERS, Layers, expert_bytes, make_layers, matrices_of
from bench.results import ROOT, add_result_options, write_result
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.memory import DeviceMemory, Memory, MemoryPlan
from coldstream.kernels.cuda.program import Noted, note_kernels
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.experts.prefetch import TALLIES
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MAX_NS, MissTimes
from coldstream.kernels.experts.stamps import read_stamps
from coldstream.kernels.ops import RouterWeights
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.planning.machine import measured_hardware

MISSING = (1, 2, 4)
WINDOWS_US = (0, 20, 40, 80, 160, 320)
BATCHES, REPLAYS = 5, 40
STEPS = BATCHES * REPLAYS
LAST = NUM_LAYERS - 1  # the layer that is guessed at
EPS = 1e-6
FLUSH_BYTES = 512 << 20  # several times the L2 cache, and long enough to queue what follows it
CALIBRATION_CYCLES = 2_000_000
COUNTS = ("bus_pairs", *TALLIES)

Pause = Callable[[], None]


def make_ops(memory: Memory, mailbox: Mailbox, layers: Layers, prefetching: Prefetching | None) -> CudaOps:
    """Without a CPU; all missing experts of a token are read over the bus."""
    shape, ring_bytes = layers.shape, 0
    if prefetching is not None:
        aligned = expert_bytes(shape) + len(matrices_of(shape)) * ALIGNMENT
        ring_bytes = (prefetching.distance + 1) * prefetching.experts * aligned
    is_plan = isinstance(memory, MemoryPlan)
    executor = functools.partial(
        PartialExecutor,
        num_layers=NUM_LAYERS,
        mailbox=mailbox,
        host=None,
        ring_bytes=ring_bytes,
        prefetching=prefetching,
    )
    ops = CudaOps(memory, 1, 64, executor, notes_kernels=is_plan)
    partial = executor_of(ops)
    partial.number_layers(
        (router_of(layers, gate), weights)
        for gate, weights in zip(layers.routers, layers.experts, strict=True)
    )
    if not is_plan:
        partial.decode.set_times(MissTimes(1, (MAX_NS,) * MAX_MAILBOX_ROWS, layer=MAX_NS))
    return ops


def router_of(layers: Layers, gate: QuantTensor) -> RouterWeights:
    """The router of a layer, of its matrix."""
    return RouterWeights(gate, layers.shared_gate, layers.shape.experts_per_token)


def executor_of(ops: CudaOps) -> PartialExecutor:
    """The executor of `make_ops`."""
    assert isinstance(ops.executor, PartialExecutor)
    return ops.executor


def no_pause() -> None:
    """The layers follow each other."""


def run_step(ops: CudaOps, layers: Layers, pause: Pause) -> tuple[DeviceArray, ...]:
    """Outputs of the last layer's experts, routed and shared, and their sum."""
    x = ops.rms_norm(layers.x, layers.norm, EPS)
    for layer, (router, weights) in enumerate(zip(layers.routers, layers.experts, strict=True)):
        if layer > 0:
            pause()
        routing = ops.router(x, router_of(layers, router), weights)
        outputs = ops.experts(x, routing, weights)
        total, _ = ops.add_norm(layers.x, outputs, layers.norm, EPS)
    ops.finish_step()
    return outputs.routed, outputs.shared, total


def plan_steps(layers: Layers, prefetching: Prefetching | None) -> tuple[MemoryPlan, Noted]:
    """The memory of a step while the outputs of two others are held, and the kernels that it takes."""
    shape, memory = layers.shape, MemoryPlan()
    mailbox = Mailbox.planned(shape.experts_per_token, shape.hidden)
    ops = make_ops(memory, mailbox, layers, prefetching)
    with note_kernels() as noted:
        _ = [run_step(ops, layers, no_pause) for _ in range(3)]
    return memory, noted


@dataclass(frozen=True)
class Stepper:
    """Operations that have run, so that their steps can be captured, and that guess if they ever do."""

    ops: CudaOps
    layers: Layers

    @classmethod
    def ready(cls, layers: Layers, prefetching: Prefetching | None) -> "Stepper":
        planned, noted = plan_steps(layers, prefetching)
        with KernelLoading.beside(noted):
            pass
        shape = layers.shape
        mailbox = Mailbox.create(shape.experts_per_token, shape.hidden)
        memory = DeviceMemory(planned.persistent_bytes, planned.workspace_bytes)
        stepper = cls(make_ops(memory, mailbox, layers, prefetching), layers)
        for _ in range(2):
            run_step(stepper.ops, layers, no_pause)
        torch.cuda.synchronize()
        return stepper

    def capture(self, pause: Pause) -> tuple[Graph, tuple[torch.Tensor, ...]]:
        """A step as a graph, and what it writes."""
        graph, outputs = captured(lambda: run_step(self.ops, self.layers, pause))
        return graph, tuple(torch.as_tensor(output, device="cuda") for output in outputs)

    def chosen(self) -> list[int]:
        """By the routers in the last step, which the device has ended; RuntimeError if a guess was wrong."""
        executor = executor_of(self.ops)
        ids = executor.decode.chosen
        chosen: list[list[int]] = np.asarray(ids.used)[:, 0].tolist()
        if executor.prefetch is not None:
            chosen.append(np.asarray(ids.guessed)[LAST, 0].tolist())
        if any(experts != chosen[0] for experts in chosen):
            raise RuntimeError(f"routers that are alike chose {chosen}")
        return chosen[0]

    def counted(self) -> dict[str, int]:
        """Counts of the last layer so far: pairs read over the bus on demand, and the ring's tallies."""
        _, bus_pairs = read_stamps(executor_of(self.ops).decode.stamps)
        ring = executor_of(self.ops).prefetch
        tallies = [0] * len(TALLIES) if ring is None else np.asarray(ring.tallies)[LAST].tolist()
        return dict(zip(COUNTS, (int(bus_pairs[LAST]), *tallies), strict=True))


def slot_addresses(num_experts: int, chosen: Sequence[int], missing: int, first: int, step: int) -> list[int]:
    """By expert, where slots begin at `first` in the order of `chosen`; the last `missing` have none."""
    addresses = [0] * num_experts
    for rank, expert in enumerate(chosen[: len(chosen) - missing]):
        addresses[expert] = first + rank * step
    return addresses


class Slots:
    """Copies of the chosen experts on the device, of each layer its own."""

    def __init__(self, layers: Layers, chosen: list[int]) -> None:
        self._layers, self._chosen = layers, chosen
        self._copies = [[data[chosen].to("cuda") for data in layers.host] for _ in range(NUM_LAYERS)]
        for layer in range(NUM_LAYERS):
            self._write(layer, 0)

    def leave_out(self, missing: int) -> None:
        """From now on as many of the last layer's experts have no slot."""
        self._write(LAST, missing)

    def _write(self, layer: int, missing: int) -> None:
        weights = self._layers.experts[layer]
        tables = (weights.gate, weights.up, weights.down)
        for table, copies in zip(tables, self._copies[layer], strict=True):
            first, num_experts = copies.data_ptr(), len(table.addresses)
            addresses = slot_addresses(num_experts, self._chosen, missing, first, table.step)
            table.addresses.copy_(torch.tensor(addresses))


@dataclass
class Way:
    """One of the three ways to the same result, and what was measured of it."""

    stepper: Stepper
    graph: Graph
    outputs: tuple[torch.Tensor, ...]
    missing: int
    samples_us: list[float] = field(default_factory=list)  # medians of batches
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))  # of all batches

    def results(self) -> list[torch.Tensor]:
        """Copies of the results of one replay."""
        for output in self.outputs:
            output.fill_(torch.nan)
        self.graph.launch()
        return [output.clone() for output in self.outputs]

    def run_batch(self, flush: torch.Tensor) -> None:
        before = self.stepper.counted()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for begin, end in events:
            flush.sum()
            begin.record()
            self.graph.launch()
            end.record()
        torch.cuda.synchronize()
        self.samples_us.append(statistics.median(1e3 * begin.elapsed_time(end) for begin, end in events))
        for name, count in self.stepper.counted().items():
            self.counts[name] += count - before[name]


def check_same_bits(ways: Mapping[str, Way], slots: Slots) -> None:
    """RuntimeError unless all give the same finite numbers."""
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        slots.leave_out(way.missing)
        results = way.results()
        expected = expected or results
        for result, other in zip(results, expected, strict=True):
            is_same = torch.equal(result.view(torch.int32), other.view(torch.int32))
            if not is_same or not result.isfinite().all():
                raise RuntimeError(f"{name}, {way.missing} missing: not the bits of resident experts")


def row_of(
    missing: int,
    window_us: int,
    samples_us: Mapping[str, Sequence[float]],
    counts: Mapping[str, Mapping[str, int]],
    num_bytes: int,
    link_bytes_per_s: float,
) -> dict[str, Any]:
    """A step in figures. num_bytes: of an expert; samples_us and counts of all STEPS by way.

    A copy that was given up has moved a part of an expert, or nothing: that stands apart, as the most that it
    can have been. RuntimeError for counts that cannot be.
    """
    check_counts(missing, counts)
    times = {f"{way}_us": statistics.median(samples) for way, samples in samples_us.items()}
    ahead = {name: count / STEPS for name, count in counts["prefetched"].items()}
    return {
        "missing": missing,
        "window_us": window_us,
        **times,
        "saved_us": times["on_demand_us"] - times["prefetched_us"],
        "link_floor_us": 1e6 * missing * num_bytes / link_bytes_per_s,
        **{name: ahead[name] for name in (*TALLIES, "bus_pairs")},
        "on_demand_bytes": counts["on_demand"]["bus_pairs"] / STEPS * num_bytes,
        "prefetched_bytes": (ahead["fetched"] + ahead["bus_pairs"]) * num_bytes,
        "given_up_bytes_at_most": ahead["given_up"] * num_bytes,
        "samples_us": {way: list(samples) for way, samples in samples_us.items()},
    }


def check_counts(missing: int, counts: Mapping[str, Mapping[str, int]]) -> None:
    """RuntimeError unless every missing expert came in just one way, and was fetched or given up if guessed.

    What a step has fetched is counted in the next one, so that sums may be off by one step's.
    """
    ahead = counts["prefetched"]
    is_right = (
        counts["resident"]["bus_pairs"] == 0
        and counts["on_demand"]["bus_pairs"] == missing * STEPS
        and abs(ahead["used"] + ahead["bus_pairs"] - missing * STEPS) <= missing
        and abs(ahead["fetched"] + ahead["given_up"] - missing * STEPS) <= missing
    )
    if not is_right:
        raise RuntimeError(f"{missing} missing experts in {STEPS} steps, but counted {dict(counts)}")


def measure(layers: Layers, link_bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """All cases, one row after the other."""
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    calibration = functools.partial(torch.cuda._sleep, CALIBRATION_CYCLES)
    cycles_per_us = CALIBRATION_CYCLES / (1e6 * graph_seconds([calibration]))
    on_demand = Stepper.ready(layers, None)
    chosen = on_demand.chosen()
    slots = Slots(layers, chosen)
    for missing in MISSING:
        ahead = Stepper.ready(layers, Prefetching(1, missing))
        for window_us in WINDOWS_US:
            pause: Pause = no_pause
            if window_us > 0:
                pause = functools.partial(torch.cuda._sleep, round(window_us * cycles_per_us))
            plain, fetching = on_demand.capture(pause), ahead.capture(pause)
            ways = {
                "resident": Way(on_demand, *plain, 0),
                "on_demand": Way(on_demand, *plain, missing),
                "prefetched": Way(ahead, *fetching, missing),
            }
            check_same_bits(ways, slots)
            for _ in range(BATCHES):
                for way in ways.values():
                    slots.leave_out(way.missing)
                    way.run_batch(flush)
            check_same_bits(ways, slots)
            torch.cuda.synchronize()
            if ahead.chosen() != chosen:
                raise RuntimeError(f"{ahead.chosen()} were chosen instead of {chosen}, which have slots")
            samples = {name: way.samples_us for name, way in ways.items()}
            counts = {name: way.counts for name, way in ways.items()}
            yield row_of(missing, window_us, samples, counts, expert_bytes(layers.shape), link_bytes_per_s)


def run() -> dict[str, Any]:
    """Everything; see the module docstring."""
    hardware = measured_hardware(find_gpu())
    gpu = hardware.gpu
    assert gpu is not None
    assert gpu.link_bytes_per_s is not None
    rows = []
    for row in measure(make_layers(FULL_SHAPE, "cuda", torch.Tensor.pin_memory), gpu.link_bytes_per_s):
        print({name: value for name, value in row.items() if name != "samples_us"}, flush=True)
        rows.append(row)
    return {
        "command": shlex.join(["python", "-m", "bench.kernels.gpu_prefetch"]),
        "machine": describe("cuda"),
        "hardware": asdict(hardware),
        "expert_bytes": expert_bytes(FULL_SHAPE),
        "steps": STEPS,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "prefetch.json")
    options = parser.parse_args()
    write_result(run(), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
