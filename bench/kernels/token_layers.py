"""A token's layers in one launch beside the launches of today: the same bits, and their times.

    python -m bench.kernels.token_layers --out token_layers.json --commit HASH

Layers are mixtures of experts in the shape of the full-size model with random weights, whose bytes and types
are those of the file. Both ways begin with one residual stream and have to end with the same bits. Times are
medians of launches of all layers; those of today are replayed as one graph.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.device import describe, graph_seconds, measure_bandwidth
from bench.full_size_mixes import PLAIN
from bench.full_size_model import FULL_SHAPE
from bench.results import add_result_options, write_result
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.runtime import calls
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, experts_gemv_cuda
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertOutputs, Routing
from coldstream.kernels.persistent.cuda import (
    NOTHING_FAILED,
    LayerArrays,
    Signals,
    TokenMemory,
    check_report,
    launch_token,
    num_counters,
    packed_layers,
    packed_lists,
)
from coldstream.kernels.persistent.program import (
    ROUTED,
    ROUTER,
    SHARED,
    SHARED_GATE,
    MoeShape,
    TokenLists,
    plan,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda, rms_norm_cuda
from coldstream.kernels.router.cuda import RouterBuffers, router_gemv_cuda

EPS = 1e-6
SCALES = {QuantType.Q4_K: (0, 2), QuantType.Q5_K: (0, 2), QuantType.Q6_K: (208,)}  # of a block, float16
SIGNALS = {
    "words": Signals(by_words=True),
    "words, first alone": Signals(by_words=True, is_patient=True),
    "counters": Signals(by_words=False),
}


def random_blocks(quant_type: QuantType, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Bytes of random weights [..., rows, row bytes] on the generator's device."""
    device = generator.device
    if quant_type == QuantType.F32:
        values = torch.randn(shape, generator=generator, device=device)
        return (values * shape[-1] ** -0.5).view(torch.uint8)
    row_bytes = quant_type.row_bytes(shape[-1])
    blocks = torch.randint(
        0, 256, (*shape[:-1], row_bytes), generator=generator, device=device, dtype=torch.uint8
    )
    by_block = blocks.view(-1, quant_type.block_bytes)
    for place in SCALES[quant_type]:
        scales = torch.rand(len(by_block), generator=generator, device=device) * 1e-3 + 1e-4
        by_block[:, place : place + 2] = scales.half().view(torch.uint8).view(-1, 2)
    return blocks


@dataclass(frozen=True)
class MoeLayer:
    """A layer's weights: bytes by name, and the norm before its router."""

    kind: int
    shape: MoeShape
    matrices: dict[str, torch.Tensor]
    norm: torch.Tensor

    @classmethod
    def random(cls, kind: int, shape: MoeShape, generator: torch.Generator) -> "MoeLayer":
        made = {}
        for name, matrix in shape.matrices.items():
            stack = (shape.experts,) if name in ROUTED else ()
            made[name] = random_blocks(matrix.quant_type, (*stack, matrix.rows, matrix.cols), generator)
        norm = 1 + 0.1 * torch.randn(shape.hidden, generator=generator, device=generator.device)
        return cls(kind, shape, made, norm)

    def arrays(self) -> LayerArrays:
        return LayerArrays(self.kind, self.matrices, {"ffn_norm": self.norm})

    def floats(self, name: str) -> torch.Tensor:
        return self.matrices[name].view(torch.float32).view(-1, self.shape.hidden)

    def experts(self) -> ExpertMatrices:
        """As the launches of today take them."""
        tables = []
        for name in ROUTED:
            matrix, stack = self.shape.matrices[name], self.matrices[name]
            begin, size = stack.data_ptr(), matrix.rows * matrix.row_bytes
            addresses = torch.arange(self.shape.experts, device=stack.device) * size + begin
            tables.append(ExpertTable(addresses, matrix.quant_type, matrix.rows, matrix.cols))
        shared = [
            QuantTensor(self.matrices[name], matrix.quant_type, (matrix.rows, matrix.cols))
            for name, matrix in ((name, self.shape.matrices[name]) for name in SHARED)
        ]
        return ExpertMatrices(tables[0], tables[1], tables[2], (shared[0], shared[1], shared[2]))


class ByLaunches:
    """The layers by the launches of one row, with memory that all layers share."""

    def __init__(self, layers: Sequence[MoeLayer], stream: torch.Tensor) -> None:
        self.layers, self.experts = layers, [layer.experts() for layer in layers]
        shape, device = layers[0].shape, stream.device

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        self.stream, self.totals = stream, [empty(1, shape.hidden) for _ in range(2)]
        self.normed = empty(1, shape.hidden)
        self.codes = empty_activations(1, shape.hidden, device)
        self.ids = empty(1, shape.chosen, dtype=torch.int32)
        self.weights, self.gate = empty(1, shape.chosen), empty(1, 1)
        arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        self.buffers = RouterBuffers(self.ids, self.weights, self.gate, empty(1, shape.experts), arrivals)
        self.hidden = PairRows(empty(1, shape.chosen, shape.ffn), empty(1, shape.ffn))
        self.outs = PairRows(empty(1, shape.chosen, shape.hidden), empty(1, shape.hidden))

    def run(self) -> torch.Tensor:
        """The stream behind all layers."""
        x = self.stream
        rms_norm_cuda(x, self.layers[0].norm, EPS, self.normed, self.codes)
        for index, (layer, experts) in enumerate(zip(self.layers, self.experts, strict=True)):
            router, gate = layer.floats(ROUTER), layer.floats(SHARED_GATE)
            router_gemv_cuda(self.normed, router, gate, self.buffers)
            experts_gemv_cuda(
                experts, self.ids, self.hidden, self.outs, activations=self.codes, x=self.normed
            )
            outputs = ExpertOutputs(
                self.outs.routed, self.outs.shared, Routing(self.ids, self.weights, self.gate)
            )
            total = self.totals[index % 2]
            norm = self.layers[min(index + 1, len(self.layers) - 1)].norm
            add_rms_norm_cuda(x, outputs, total, norm, EPS, self.normed, self.codes)
            x = total
        return x


class ByOneLaunch:
    """The same layers by lists."""

    def __init__(self, layers: Sequence[MoeLayer], lists: TokenLists, stream: torch.Tensor) -> None:
        self.lists, self.num_layers, self.stream = lists, len(layers), stream
        device = stream.device

        def on_device(data: bytes) -> torch.Tensor:
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)

        steps, pieces, heads, shapes = (on_device(each) for each in packed_lists(lists))
        self.memory = TokenMemory(
            (steps, pieces, heads, shapes),
            on_device(packed_layers([layer.arrays() for layer in layers])),
            torch.empty((len(layers) + 1) * lists.buffers.num_words, device=device),
            torch.zeros(num_counters(lists, len(layers)), dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device).to(torch.int32),
        )
        self.clear_report()

    def clear_report(self) -> None:
        self.memory.report[0] = 0
        self.memory.report[1] = -1

    def begin(self) -> None:
        buffers, hidden = self.lists.buffers, self.stream.shape[1]
        self.memory.activations.view(torch.int32).fill_(-1)
        self.memory.activations[buffers.stream : buffers.stream + hidden] = self.stream[0]
        self.memory.counters.zero_()

    def queue(self, signals: Signals) -> None:
        launch_token(self.lists, self.memory, self.num_layers, EPS, signals)

    def result(self) -> torch.Tensor:
        """The stream behind all layers. StuckError if a wait came to no end."""
        failed, number = (each & 0xFFFFFFFF for each in self.memory.report.tolist())
        self.clear_report()
        assert NOTHING_FAILED == (0, 0xFFFFFFFF)
        check_report(self.lists, failed, number)
        buffers, hidden = self.lists.buffers, self.stream.shape[1]
        begin = self.num_layers * buffers.num_words + buffers.stream
        return self.memory.activations[begin : begin + hidden].view(1, -1)


def full_size_kinds(layers: int) -> tuple[list[MoeShape], list[int]]:
    """Kinds of layers of the full-size file, and the kind of each layer."""
    shape = FULL_SHAPE
    kinds: list[MoeShape] = []
    numbers = []
    for layer in range(layers):
        types = [PLAIN.type_of(name, layer, shape.layers) for name in ROUTED]
        of_shared = [PLAIN.type_of(name, layer, shape.layers) for name in SHARED]
        sizes = (shape.hidden, shape.expert_ffn, shape.experts, shape.experts_per_token)
        kind = MoeShape.of(sizes, types, of_shared)
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return kinds, numbers


def read_bytes(layers: Sequence[MoeLayer]) -> int:
    """Weights that a token reads."""
    total = 0
    for layer in layers:
        for name, matrix in layer.shape.matrices.items():
            total += matrix.rows * matrix.row_bytes * (layer.shape.chosen if name in ROUTED else 1)
    return total


def measured(layers: Sequence[MoeLayer], kinds: Sequence[MoeShape], stream: torch.Tensor) -> dict[str, Any]:
    """Times of both ways, in µs a layer, and whether bits are the same."""
    by_launches = ByLaunches(layers, stream)
    want = by_launches.run().clone()
    rows: dict[str, Any] = {"launches": {"us_a_layer": graph_seconds([by_launches.run]) * 1e6 / len(layers)}}
    lists = plan(kinds, device_limits().num_processors)
    by_one = ByOneLaunch(layers, lists, stream)
    for name, signals in SIGNALS.items():

        def token(signals: Signals = signals) -> None:
            by_one.begin()
            by_one.queue(signals)

        try:
            token()
            same = bool((by_one.result() == want).all())
            us = graph_seconds([token]) * 1e6 / len(layers)
            by_one.result()
            rows[name] = {"us_a_layer": us, "same_bits": same}
        except Exception as error:  # the others still run
            rows[name] = {"error": str(error)}
        print(name, rows[name], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers)
    add_result_options(parser)
    options = parser.parse_args()
    calls.attach()
    machine, bandwidth = describe("cuda"), measure_bandwidth("cuda", 0)
    kinds, numbers = full_size_kinds(options.layers)
    generator = torch.Generator("cuda").manual_seed(1)
    layers = [MoeLayer.random(number, kinds[number], generator) for number in numbers]
    stream = torch.randn(1, FULL_SHAPE.hidden, generator=generator, device="cuda")
    floor = read_bytes(layers) / bandwidth * 1e6 / len(layers)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, floor {floor:.1f} µs a layer")
    result = {
        "command": "python -m bench.kernels.token_layers",
        "machine": machine,
        "copy_bytes_s": bandwidth,
        "layers": len(layers),
        "floor_us_a_layer": round(floor, 2),
    }
    rows = measured(layers, kinds, stream)
    write_result({**result, "rows": rows}, options.out, options.commit)
    return int(not all(row.get("same_bits", name == "launches") for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
