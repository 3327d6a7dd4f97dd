"""Whether one launch for several layers of a token would pay: a prototype of two layers and of forty.

    python bench/persistent_layers.py [--layers 2 40] [--out FILE]

A layer is a sequence of phases, each of which reads as many bytes as one of the full-size model's launches,
multiplies them as 4-bit codes by what the phase before wrote, and writes what the next one reads. As launches
in a graph, each begins to load its weights before the one before has ended, as the product's kernels do; as
one launch, blocks meet at a barrier in global memory, and load the next phase's first weights before it. Both
compute the same numbers. *Phases* are the launches of a layer today; *folded* ones leave out those that read
no weights, as if norms were computed by their readers. Times are medians over graphs, in microseconds a
layer; the floor is the bytes at the measured rate of copies.
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from coldstream.kernels.cuda.program import CudaProgram
from device import describe, measure_bandwidth
from results import write_result

PROGRAM = CudaProgram(Path(__file__).with_name("persistent_layers.cu"), ("one_phase", "all_phases"))
THREADS, STAGES, INPUTS = 512, 12, 1024
PIECE_BYTES = 16
SHARED_BYTES = STAGES * THREADS * PIECE_BYTES
# KiB that the launches of a DeltaNet layer of the 35B read: norm, projections, state, output, norm, router,
# gate and up of eight experts and the shared one, down.
PHASES_KIB = (0, 19_968, 4_096, 6_720, 0, 2_048, 10_368, 6_048)
REPETITIONS = 30


class Phase(ctypes.Structure):
    """As in persistent_layers.cu."""

    _fields_ = (("weights", ctypes.c_void_p), ("count", ctypes.c_int64))


def make_layers(num_layers: int, phases_kib: Sequence[int]) -> tuple[list[Phase], list[torch.Tensor]]:
    """Phases of all layers, each with weights of its own, and these."""
    weights = [
        torch.randint(0, 256, (max(1, kib) * 1024,), dtype=torch.uint8, device="cuda")
        for _ in range(num_layers)
        for kib in phases_kib
    ]
    counts = [kib * 1024 // PIECE_BYTES for _ in range(num_layers) for kib in phases_kib]
    return [Phase(each.data_ptr(), count) for each, count in zip(weights, counts, strict=True)], weights


class Ways:
    """The same phases in both ways, from and into `outputs`."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases
        self._blocks = torch.cuda.get_device_properties(0).multi_processor_count
        table = (Phase * len(phases))(*phases)
        self._table = torch.frombuffer(bytearray(bytes(table)), dtype=torch.uint8).cuda()
        self.outputs = torch.zeros(2 * INPUTS, dtype=torch.int32, device="cuda")
        self._counts = torch.zeros(2, dtype=torch.int32, device="cuda")

    def launches(self) -> None:
        """One for each phase."""
        kernel = PROGRAM.kernel("one_phase")
        for number, phase in enumerate(self._phases):
            halves = self.outputs.view(2, INPUTS)
            args = (phase, halves[number % 2], halves[(number + 1) % 2])
            kernel.launch((self._blocks, 1, 1), THREADS, args, shared_bytes=SHARED_BYTES, overlap=True)

    def persistent(self) -> None:
        """A single one."""
        arrivals, turn = self._counts[:1], self._counts[1:]
        args = (self._table, len(self._phases), self.outputs, arrivals, turn)
        kernel = PROGRAM.kernel("all_phases")
        kernel.launch((self._blocks, 1, 1), THREADS, args, shared_bytes=SHARED_BYTES)


def graph_of(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median of a replay, between events around it."""
    times = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def results_of(ways: Ways, work: Callable[[], None]) -> torch.Tensor:
    """What the phases write from inputs that are always the same."""
    ways.outputs.copy_(torch.arange(2 * INPUTS, dtype=torch.int32))
    work()
    return ways.outputs.clone()


def measure(num_layers: int, name: str, phases_kib: Sequence[int], bandwidth: float) -> dict[str, Any]:
    phases, weights = make_layers(num_layers, phases_kib)
    ways = Ways(phases)
    same = torch.equal(results_of(ways, ways.launches), results_of(ways, ways.persistent))
    graphs = {"launches_us": graph_of(ways.launches), "persistent_us": graph_of(ways.persistent)}
    times = {way: microseconds(graph) / num_layers for way, graph in graphs.items()}
    num_bytes = sum(each.numel() for each in weights if each.numel() > 1024) / num_layers
    return {
        "layers": num_layers,
        "phases": name,
        "phases_of_a_layer": len(phases_kib),
        "bytes_of_a_layer": num_bytes,
        **times,
        "floor_us": 1e6 * num_bytes / bandwidth,
        "same_numbers": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 40])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    options = parser.parse_args()
    bandwidth = measure_bandwidth("cuda", 1)
    kinds = {"launches": PHASES_KIB, "folded": tuple(kib for kib in PHASES_KIB if kib)}
    rows = [measure(layers, name, kib, bandwidth) for layers in options.layers for name, kib in kinds.items()]
    for row in rows:
        print(
            f"{row['layers']:3} layers, {row['phases']:8}: {row['launches_us']:6.1f} us a layer as launches, "
            f"{row['persistent_us']:6.1f} as one, floor {row['floor_us']:5.1f}, "
            f"{'same' if row['same_numbers'] else 'OTHER'} numbers"
        )
    command = f"python bench/persistent_layers.py --layers {' '.join(map(str, options.layers))}"
    about = {"command": command, "machine": describe("cuda"), "bandwidth_bytes_s": bandwidth}
    write_result({**about, "rows": rows}, options.out, options.commit)


if __name__ == "__main__":
    main()
