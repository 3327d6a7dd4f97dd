"""Times every variant of the decode kernels, and checks their bits against those of the older kernels.

    python -m bench.kernels.gpu_skinny_variants [--only experts ...] [--rows 1 2 ...] [--quick] [--out FILE]

The constants that choose a kernel are set to every value in turn, so that their thresholds can be read off.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import device
from bench.kernels import gpu_skinny
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda.kernel_loading import KernelLoading
from coldstream.kernels.cuda.program import note_kernels
from coldstream.kernels.experts import cuda as pairwise
from coldstream.kernels.experts import cuda_gemm, cuda_layer
from coldstream.kernels.experts import cuda_grouped as grouped
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows
from coldstream.kernels.linear import skinny_layouts
from coldstream.kernels.linear.cuda import linear_skinny_cuda
from coldstream.kernels.linear.cuda_gemm import linear_gemm
from coldstream.kernels.linear.skinny_layouts import Walk
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda
from coldstream.kernels.router.cuda import MAX_TOKENS, NormBefore, RouterBuffers, router_gemv_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda

HIDDEN, FFN, EXPERTS, TOP_K, LAUNCHES = (
    gpu_skinny.HIDDEN,
    gpu_skinny.FFN,
    gpu_skinny.EXPERTS,
    gpu_skinny.TOP_K,
    gpu_skinny.LAUNCHES,
)
Q4K, Q5K, Q6K, Q8, F32 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.F32
ROWS = [1, 2, 4, 8, 9, 16, 24, 32, 64]
ALL = range(1, 65)
CUDA = torch.device("cuda")
Call = Callable[[int], None]


def microseconds(call: Call) -> float:
    return 1e6 * device.graph_seconds([functools.partial(call, i) for i in range(LAUNCHES)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, where −0 equals 0 and any NaN any other."""
    return bool(torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30)))


def routing(kind: str, rows: int, seed: int) -> torch.Tensor:
    """int32 [rows, K]: independent rows, rows that share a good part of their experts, or all of them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, EXPERTS, generator=generator)
    if kind == "alike":
        scores += 1.2 * torch.rand(1, EXPERTS, generator=generator)
    if kind == "equal":
        scores = scores[:1].expand(rows, -1)
    return scores.argsort(dim=-1, descending=True)[:, :TOP_K].int().contiguous().cuda()


class ExpertLayer:
    """The experts of a layer of the 35B shape, and every way to compute them for some rows."""

    def __init__(self, down_type: QuantType) -> None:
        shapes = [(Q4K, FFN, HIDDEN), (Q4K, FFN, HIDDEN), (down_type, HIDDEN, FFN)]
        pairs = [gpu_skinny.table(*shape) for shape in shapes]
        self.tables, self.memory = [p[0] for p in pairs], [p[1] for p in pairs]
        self.shared = [tuple(gpu_skinny.random_matrix(*shape) for shape in shapes) for _ in range(LAUNCHES)]
        self.layers = [ExpertMatrices(*self.tables, each) for each in self.shared]
        self.bytes = sum(kind.row_bytes(cols) * size for kind, size, cols in shapes)

    def variants(
        self, rows: int, kind: str
    ) -> tuple[dict[str, Call], dict[str, Callable[[], list[torch.Tensor]]], float]:
        ids = [routing(kind, rows, 100 * rows + i) for i in range(LAUNCHES)]
        distinct = sum(len(each.unique()) for each in ids) / len(ids)
        x = torch.randn(rows, HIDDEN, device=CUDA)
        codes = empty_activations(rows, HIDDEN, CUDA)
        quantize_cuda(x, codes)
        hidden = PairRows(torch.empty(rows, TOP_K, FFN, device=CUDA), torch.empty(rows, FFN, device=CUDA))
        outs = PairRows(torch.empty(rows, TOP_K, HIDDEN, device=CUDA), torch.empty(rows, HIDDEN, device=CUDA))

        def by_pairs(i: int) -> None:
            pairwise.launch_gate_up(self.layers[i], ids[i], hidden, codes, x)
            pairwise.launch_down(self.layers[i], ids[i], hidden, outs)

        def by_groups(item_rows: int, i: int) -> None:
            chosen = grouped.ChosenIds(ids[i], EXPERTS)
            grouped.launch_grouped_gate_up(self.layers[i], chosen, hidden, codes, x, item_rows)
            grouped.launch_grouped_down(self.layers[i], chosen, hidden, outs, item_rows)

        calls: dict[str, Call] = {"pairs": by_pairs, "gemm": self._gemm(rows, ids, x, codes, outs)}
        if rows <= grouped.MAX_GROUPED_ROWS:
            for item_rows in (1, 2, 4, 8):
                if item_rows <= rows:
                    calls[f"grouped {item_rows}"] = functools.partial(by_groups, item_rows)
            calls["pairs gate_up"] = lambda i: pairwise.launch_gate_up(
                self.layers[i], ids[i], hidden, codes, x
            )
            calls["grouped gate_up"] = lambda i: grouped.launch_grouped_gate_up(
                self.layers[i], grouped.ChosenIds(ids[i], EXPERTS), hidden, codes, x
            )
        results = {name: lambda: [outs.routed, outs.shared] for name in calls if "gate_up" not in name}
        return calls, results, distinct

    def _gemm(
        self, rows: int, ids: list[torch.Tensor], x: torch.Tensor, codes: object, outs: PairRows
    ) -> Call:
        num_pairs = rows * TOP_K
        groups = cuda_gemm.Groups(
            torch.empty(num_pairs, dtype=torch.int32, device=CUDA),
            torch.empty(num_pairs, dtype=torch.int32, device=CUDA),
            torch.empty(EXPERTS, 2, dtype=torch.int32, device=CUDA),
            torch.empty(cuda_gemm.max_tiles(num_pairs, EXPERTS) + 1, 4, dtype=torch.int32, device=CUDA),
        )
        product = torch.empty(num_pairs, FFN, device=CUDA)
        hidden = empty_activations(num_pairs, FFN, CUDA)
        parts = [torch.empty(rows, FFN, device=CUDA) for _ in range(3)]
        act = empty_activations(rows, FFN, CUDA)

        def run(i: int) -> None:
            gate, up, down = self.shared[i]
            linear_skinny_cuda((gate, up), parts[:2], activations=codes, x=x)
            swiglu_cuda(parts[0], parts[1], parts[2], act)
            linear_skinny_cuda((down,), (outs.shared,), activations=act, x=parts[2])
            cuda_gemm.group_pairs(ids[i], EXPERTS, groups)
            cuda_layer.gate_up_gemm((codes, codes), ids[i], tuple(self.tables), groups, (product,))
            quantize_cuda(product, hidden)
            cuda_layer.down_gemm(hidden, ids[i], tuple(self.tables), groups, outs.routed)

        return run


def router_variants(rows: int) -> tuple[dict[str, Call], list[torch.Tensor], int]:
    """The norm of a sum and the router behind it, in two launches and in one."""
    experts = [torch.randn(EXPERTS, HIDDEN, device=CUDA) * HIDDEN**-0.5 for _ in range(LAUNCHES)]
    gate, norm_weight = torch.randn(1, HIDDEN, device=CUDA), torch.randn(HIDDEN, device=CUDA)
    x, update = (torch.randn(rows, HIDDEN, device=CUDA) for _ in range(2))
    total, normed = torch.empty_like(x), torch.empty_like(x)
    codes, arrivals = empty_activations(rows, HIDDEN, CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=CUDA)
    weights, shared = torch.empty(rows, TOP_K, device=CUDA), torch.empty(rows, 1, device=CUDA)
    chosen = ids, weights, shared, torch.empty(rows, EXPERTS, device=CUDA), arrivals
    norm = NormBefore(x, update, total, norm_weight, 1e-6, codes)

    def apart(i: int) -> None:
        add_rms_norm_cuda(x, update, total, norm_weight, 1e-6, normed, codes)
        router_gemv_cuda(normed, experts[i], gate, RouterBuffers(*chosen))

    def at_once(i: int) -> None:
        router_gemv_cuda(normed, experts[i], gate, RouterBuffers(*chosen), norm=norm)

    outs = [total, normed, codes.scales, weights, shared]
    return {"apart": apart, "at once": at_once}, outs, experts[0].nbytes


@contextmanager
def forced(walk: Walk | None, sets: int | None):
    kept_of, kept_sets = Walk.of, {each: dict(by_slices) for each, by_slices in skinny_layouts.SETS.items()}
    if walk is not None:
        Walk.of = lambda *_, **__: walk
    if walk in skinny_layouts.SETS and sets is not None:
        skinny_layouts.SETS[walk].update({4: sets, 8: sets})
    try:
        yield
    finally:
        Walk.of = kept_of
        skinny_layouts.SETS.update(kept_sets)


def linear_variants(
    cols: int, matrices: list[tuple[QuantType, int]], rows: int
) -> tuple[dict[str, Call], list[torch.Tensor], int]:
    num_bytes = sum(kind.row_bytes(cols) * size for kind, size in matrices)
    copies = max(1, min(LAUNCHES, -(-gpu_skinny.ROTATION_BYTES // num_bytes)))
    weights: list[list[QuantTensor]] = [
        [gpu_skinny.random_matrix(kind, size, cols) for kind, size in matrices] for _ in range(copies)
    ]
    x = torch.randn(rows, cols, device=CUDA)
    codes, by_block = empty_activations(rows, cols, CUDA), empty_activations(rows, cols, CUDA, 32)
    quantize_cuda(x, codes)
    quantize_cuda(x, by_block)
    outs = [torch.empty(rows, size, device=CUDA) for _, size in matrices]

    def skinny(walk: Walk | None, sets: int | None, i: int) -> None:
        with forced(walk, sets):
            linear_skinny_cuda(weights[i % copies], outs, activations=codes, x=x, block_rows=by_block)

    def gemm(i: int) -> None:
        for weight, out in zip(weights[i % copies], outs, strict=True):
            linear_gemm(by_block if weight.quant_type == Q8 else codes, weight, out)

    calls: dict[str, Call] = {}
    if rows == 1:
        calls["one"] = functools.partial(skinny, Walk.ONE, None)
    else:
        calls["tiles"] = functools.partial(skinny, Walk.TILES, 1)
        if rows > 16:
            calls["tiles, 2 sets"] = functools.partial(skinny, Walk.TILES, 2)
            calls["parts, 2 sets"] = functools.partial(skinny, Walk.PARTS, 2)
        if rows <= 32:
            calls["parts"] = functools.partial(skinny, Walk.PARTS, 1)
        if rows <= 8:
            calls["rows"] = functools.partial(skinny, Walk.ROWS, None)
    calls["default"] = functools.partial(skinny, None, None)
    if rows > 4 and all(kind != F32 for kind, _ in matrices):
        calls["gemm"] = gemm
    return calls, outs, num_bytes


def load(calls: dict[str, Call]) -> dict[str, str]:
    """Compiles all kernels of the calls together; returns the calls that are refused."""
    refused, noted = {}, set()
    for name, call in calls.items():
        try:
            with note_kernels() as found:
                call(0)
            noted |= found
        except ValueError as error:
            refused[name] = str(error)
    with KernelLoading.beside(noted):
        return refused


def measure(
    record: dict, calls: dict[str, Call], outs_of: Callable[[str], list[torch.Tensor] | None]
) -> None:
    refused, expected = load(calls), None
    record["us"], record["same"] = {}, {}
    for name, call in calls.items():
        if name in refused:
            record["us"][name] = refused[name]
            continue
        outs = outs_of(name)
        for out in outs or ():
            out.fill_(float("nan"))
        call(0)
        torch.cuda.synchronize()
        if outs is not None:
            found = [out.clone() for out in outs]
            expected = expected or found
            record["same"][name] = all(map(same, found, expected))
        record["us"][name] = round(microseconds(call), 2)
    times = {name: us for name, us in record["us"].items() if not isinstance(us, str)}
    floor = record["floor_us"]
    print(
        f"{record['case']:34} {record['rows']:3} floor {floor:7.2f}  "
        + "  ".join(f"{name} {us:.1f} ({floor / us:.0%})" for name, us in times.items())
        + "".join(f"  DIFFERS: {name}" for name, ok in record["same"].items() if not ok),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["experts", "linear", "router"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and routings")
    arguments = parser.parse_args()
    device.WARM_S = 0.02
    bandwidth = 1e-6 * device.measure_bandwidth("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e6:.2f} TB/s", flush=True)
    results, begin = [], time.perf_counter()
    document = {"gpu": torch.cuda.get_device_name(), "bytes_per_us": bandwidth, "cases": results}

    def keep(record: dict[str, Any]) -> None:
        results.append(record)
        if arguments.out:  # at once, as a run may be cut off
            arguments.out.write_text(json.dumps(document))

    if "experts" in arguments.only:
        for down_type in (Q6K,) if arguments.quick else (Q5K, Q6K):
            layer = ExpertLayer(down_type)
            for rows in arguments.rows:
                for kind in ("independent", "alike", "equal"):
                    calls, with_results, distinct = layer.variants(rows, kind)
                    floor = (distinct + 1) * layer.bytes / bandwidth
                    record = {
                        "case": f"experts {down_type.name} {kind} ({distinct:.0f})",
                        "rows": rows,
                        "floor_us": floor,
                    }
                    measure(record, calls, lambda name, of=with_results: of[name]() if name in of else None)
                    keep(record | {"distinct": distinct})
            del layer
            torch.cuda.empty_cache()
    if "linear" in arguments.only:
        shapes = {
            f"{cols} to {size} {kind.name}": (cols, [(kind, size)])
            for cols, size in ((2048, 8192), (4096, 2048), (5120, 17408), (17408, 5120))
            for kind in ((Q4K,) if arguments.quick else (Q4K, Q6K, Q8))
        }
        shapes["DeltaNet qkv+z+alpha+beta"] = (2048, [(Q4K, 8192), (Q4K, 4096), (F32, 32), (F32, 32)])
        for name, (cols, matrices) in shapes.items():
            for rows in arguments.rows:
                calls, outs, num_bytes = linear_variants(cols, matrices, rows)
                record = {"case": name, "rows": rows, "floor_us": num_bytes / bandwidth}
                measure(record, calls, lambda _, outs=outs: outs)
                keep(record)
            torch.cuda.empty_cache()
    if "router" in arguments.only:
        for rows in sorted({rows for rows in arguments.rows if rows <= MAX_TOKENS} | {2, 4}):
            calls, outs, num_bytes = router_variants(rows)
            record = {"case": "norm and router", "rows": rows, "floor_us": num_bytes / bandwidth}
            measure(record, calls, lambda _, outs=outs: outs)
            keep(record)
    wrong = [record["case"] for record in results if not all(record["same"].values())]
    print(f"{time.perf_counter() - begin:.0f} s; {'all bits equal' if not wrong else f'DIFFERENT: {wrong}'}")


if __name__ == "__main__":
    main()
