"""Times the CUDA C++ decode kernels at the shapes of Qwen3.6-35B-A3B, beside their byte floor.

    python -m bench.kernels.gpu_skinny [--rows 1 2 4 8] [--kernels-from DIR] [--all-types] [--json]

The ceiling comes first: what a copy between buffers of the device reaches. A case runs LAUNCHES times in one
captured graph, each time on other weights, so that none is in the L2 cache when it is read; the time of one
launch is the median of the graph's replays. The floor counts every weight byte once. Experts are timed with
up to 16 rows, pair by pair.

With --kernels-from the CUDA sources of another tree, whose kernels take the same arguments, are timed in
turns with this tree's; DIR is its src/coldstream/kernels. With --all-types experts go through kernels for
every type at once, which no model takes.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.device import graph_seconds, measure_bandwidth
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda import compiler
from coldstream.kernels.cuda.program import Kernel
from coldstream.kernels.cuda.skinny_shapes import SKINNY_TYPES, instance_for
from coldstream.kernels.experts import cuda as experts
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, launch_down, launch_gate_up
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear import cuda as linear
from coldstream.kernels.linear.cuda import linear_skinny_cuda
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda

HIDDEN, FFN, EXPERTS, TOP_K, VOCAB = 2048, 512, 256, 8, 248320
EXPERT_ROWS = 16
LAUNCHES = 24
REPEATS = 5  # of each tree's kernels
ROTATION_BYTES = 256 << 20  # several times the L2 cache
Q4K, Q6K, F32 = QuantType.Q4_K, QuantType.Q6_K, QuantType.F32
Matrix = tuple[QuantType, int]

LINEAR_CASES: dict[str, tuple[int, list[Matrix]]] = {
    "DeltaNet qkv+z+alpha+beta": (HIDDEN, [(Q4K, 8192), (Q4K, 4096), (F32, 32), (F32, 32)]),
    "ssm_out": (4096, [(Q4K, HIDDEN)]),
    "attention q+k+v": (HIDDEN, [(Q4K, 8192), (Q4K, 512), (Q6K, 512)]),
    "router+gate": (HIDDEN, [(F32, EXPERTS), (F32, 1)]),
    "head": (HIDDEN, [(Q6K, VOCAB)]),
}


@dataclass(frozen=True)
class Case:
    """One launch, as a function of a running number that chooses the weights."""

    name: str
    num_rows: int
    launch: Callable[[int], None]
    num_bytes: int


def random_matrix(quant_type: QuantType, *shape: int) -> QuantTensor:
    """Blocks of random bytes; the values 0 … 63 keep every scale finite."""
    num_bytes = torch.Size(shape[:-1]).numel() * quant_type.row_bytes(shape[-1])
    data = torch.randint(0, 64, (num_bytes,), dtype=torch.uint8, device="cuda")
    return QuantTensor.from_bytes(data, quant_type, shape)


def linear_case(name: str, cols: int, matrices: list[Matrix], rows: int) -> Case:
    num_bytes = sum(quant_type.row_bytes(cols) * size for quant_type, size in matrices)
    copies = max(1, min(LAUNCHES, -(-ROTATION_BYTES // num_bytes)))
    weights = [[random_matrix(kind, size, cols) for kind, size in matrices] for _ in range(copies)]
    x = torch.randn(rows, cols, device="cuda")
    quantized = empty_activations(rows, cols, x.device)
    quantize_cuda(x, quantized)
    outs = [torch.empty(rows, size, device="cuda") for _, size in matrices]

    def launch(i: int) -> None:
        linear_skinny_cuda(weights[i % copies], outs, activations=quantized, x=x)

    return Case(name, rows, launch, num_bytes)


def table(quant_type: QuantType, rows: int, cols: int) -> tuple[ExpertTable, torch.Tensor]:
    stack = random_matrix(quant_type, EXPERTS, rows, cols)
    step = rows * quant_type.row_bytes(cols)
    addresses = stack.blocks.data_ptr() + step * torch.arange(EXPERTS, device="cuda")
    return ExpertTable(addresses, quant_type, rows, cols), stack.blocks


def expert_cases(down_type: QuantType, rows: int, with_shared: bool = True) -> Iterator[Case]:
    shapes = [(Q4K, FFN, HIDDEN), (Q4K, FFN, HIDDEN), (down_type, HIDDEN, FFN)]
    tables, memory = zip(*(table(*shape) for shape in shapes), strict=True)
    shared = [[random_matrix(*shape) for shape in shapes] for _ in range(LAUNCHES)]
    layers = [ExpertMatrices(*tables, tuple(tensors) if with_shared else None) for tensors in shared]
    # Tokens in a launch share no expert where there are enough of them.
    order = [torch.randperm(EXPERTS, device="cuda").int()[: rows * TOP_K] for _ in range(LAUNCHES)]
    ids = [chosen.reshape(rows, TOP_K).contiguous() for chosen in order]
    x = torch.randn(rows, HIDDEN, device="cuda")
    quantized = empty_activations(rows, HIDDEN, x.device)
    quantize_cuda(x, quantized)
    shared_rows = [
        torch.randn(rows, width, device="cuda") if with_shared else None for width in (FFN, HIDDEN)
    ]
    hidden = PairRows(torch.randn(rows, TOP_K, FFN, device="cuda"), shared_rows[0])
    outs = PairRows(torch.empty(rows, TOP_K, HIDDEN, device="cuda"), shared_rows[1])
    expert_bytes = [kind.row_bytes(cols) * size for kind, size, cols in shapes]
    num_experts = rows * TOP_K + with_shared

    def gate_up(i: int, keep: object = memory) -> None:
        launch_gate_up(layers[i % LAUNCHES], ids[i % LAUNCHES], hidden, quantized, None)

    def down(i: int, keep: object = memory) -> None:
        launch_down(layers[i % LAUNCHES], ids[i % LAUNCHES], hidden, outs)

    if down_type == Q4K:
        yield Case("experts gate·up", rows, gate_up, num_experts * sum(expert_bytes[:2]))
    yield Case(f"experts down {down_type.name}", rows, down, num_experts * expert_bytes[2])


def all_cases(rows: int) -> Iterator[Case]:
    for name, (cols, matrices) in LINEAR_CASES.items():
        yield linear_case(name, cols, matrices, rows)
    for down_type in (Q4K, Q6K) if rows <= EXPERT_ROWS else ():
        yield from expert_cases(down_type, rows)


def time_launch(launch: Callable[[int], None], num_bytes: int) -> float:
    """Microseconds of one launch within a graph of LAUNCHES."""
    launches = 4 if num_bytes > ROTATION_BYTES else LAUNCHES
    return 1e6 * graph_seconds([functools.partial(launch, i) for i in range(launches)])


class OtherSources:
    """The GEMV and skinny kernels of another tree, in place of this one's while `used`."""

    def __init__(self, kernels: Path) -> None:
        self._kernels = kernels
        self._compiled: list[dict[str, Kernel]] = [{} for _ in (linear.PROGRAM, experts.PROGRAM)]

    @contextmanager
    def used(self) -> Iterator[None]:
        ours, programs = compiler.KERNELS, (linear.PROGRAM, experts.PROGRAM)
        kept = [(program.source, program._kernels) for program in programs]
        compiler.KERNELS = self._kernels
        for program, compiled in zip(programs, self._compiled, strict=True):
            program.source, program._kernels = (
                self._kernels / program.source.resolve().relative_to(ours),
                compiled,
            )
        try:
            yield
        finally:
            compiler.KERNELS = ours
            for program, (source, compiled) in zip(programs, kept, strict=True):
                program.source, program._kernels = source, compiled


def compare(case: Case, other: OtherSources) -> tuple[float, float, list[float]]:
    """Medians of this tree's and the other's microseconds, and the ratio other / ours of each turn."""
    ours, theirs = [], []
    for _ in range(REPEATS):
        ours.append(time_launch(case.launch, case.num_bytes))
        with other.used():
            theirs.append(time_launch(case.launch, case.num_bytes))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), ratios


def all_types_instance(kernel: str, _types: object) -> str:
    return instance_for(kernel, SKINNY_TYPES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kernels-from", type=Path)
    parser.add_argument("--all-types", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    other = OtherSources(arguments.kernels_from.resolve()) if arguments.kernels_from else None
    if arguments.all_types:
        experts.instance_for = all_types_instance
    bandwidth = 1e-6 * measure_bandwidth("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e6:.2f} TB/s")
    print(f"{'case':28} {'rows':>4} {'MB':>7} {'floor':>8} {'µs':>8} {'TB/s':>6} {'share':>6} {'other':>8} x")
    results = []
    for rows in arguments.rows:
        for case in all_cases(rows):
            floor = case.num_bytes / bandwidth
            result = {"case": case.name, "rows": rows, "bytes": case.num_bytes, "floor_us": floor}
            beside = ""
            if other is None:
                time = time_launch(case.launch, case.num_bytes)
            else:
                time, other_time, ratios = compare(case, other)
                result |= {"other_us": other_time, "ratios": ratios}
                beside = f"{other_time:8.2f} {statistics.median(ratios):5.3f}"
            print(
                f"{case.name:28} {rows:4} {case.num_bytes / 1e6:7.1f} {floor:8.2f} {time:8.2f} "
                f"{case.num_bytes / time / 1e6:6.2f} {floor / time:6.0%} {beside}"
            )
            results.append(result | {"us": time})
    if arguments.json:
        print(json.dumps({"copy_bytes_per_us": bandwidth, "cases": results}))


if __name__ == "__main__":
    main()
