"""A token's layers in one launch beside the launches of today: the same bits, and their times.

    python -m bench.kernels.token_layers --out token_layers.json --commit HASH

Layers are a gated DeltaNet and a mixture of experts in the shape of the full-size model, with random weights
of the types of the file. Both ways begin with one residual stream, and have to end with the same bits and
states. Times are medians: of a graph of all launches, and of one launch with what clears its memory.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from coldstream.kernels.gated_delta_net.cuda import DecodeWorkspace, arrival_count, delta_net_decode_cuda
from coldstream.kernels.linear.cuda import linear_skinny_cuda
from coldstream.kernels.ops import DeltaNetInputs, DeltaNetWeights, ExpertOutputs, Routing, Rows
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
    plan,
)
from coldstream.kernels.persistent.shapes import (
    ATTENTION,
    ATTENTION_OUT,
    CONV_KERNEL,
    DELTA_OUT,
    HEAD_SIZE,
    PROJECTED,
    ROUTED,
    ROUTER,
    SHARED,
    SHARED_GATE,
    LayerShape,
    Part,
    Sizes,
    TokenLists,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda, rms_norm_cuda
from coldstream.kernels.router.cuda import NormBefore, RouterBuffers, router_gemv_cuda

EPS = 1e-6
SCALES = {QuantType.Q4_K: (0, 2), QuantType.Q5_K: (0, 2), QuantType.Q6_K: (208,)}  # of a block, float16
# How blocks wait for each other, and how many of their warps compute.
VERSIONS = {
    "words": (Signals(by_words=True), 8),
    "words, first alone": (Signals(by_words=True, is_patient=True), 8),
    "counters": (Signals(by_words=False), 8),
    "words, 12 warps": (Signals(by_words=True), 12),
    "words, 16 warps": (Signals(by_words=True), 16),
}
LAUNCHES, QUEUED_BEFORE = 30, 8


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
class Layer:
    """A layer's weights: bytes by name, vectors by name, and the mixer's states."""

    kind: int
    shape: LayerShape
    matrices: dict[str, torch.Tensor]
    vectors: dict[str, torch.Tensor]
    states: tuple[torch.Tensor, ...]  # conv_state, state; none without a mixer

    @classmethod
    def random(cls, kind: int, shape: LayerShape, generator: torch.Generator) -> "Layer":
        sizes, made = shape.sizes, {}

        def normal(*counts: int) -> torch.Tensor:
            return torch.randn(counts, generator=generator, device=generator.device)

        for name, matrix in shape.matrices.items():
            stack = (sizes.experts,) if name in ROUTED else ()
            made[name] = random_blocks(matrix.quant_type, (*stack, matrix.rows, matrix.cols), generator)
        vectors = {name: 1 + 0.1 * normal(sizes.hidden) for name in ("attn_norm", "ffn_norm")}
        if shape.part is not Part.DELTA_NET:
            return cls(kind, shape, made, vectors, ())
        vectors |= {
            "conv_taps": normal(sizes.channels, CONV_KERNEL),
            "ssm_a": -normal(sizes.value_heads).abs(),
            "ssm_dt_bias": normal(sizes.value_heads),
            "ssm_norm": 1 + 0.1 * normal(HEAD_SIZE),
        }
        states = (
            normal(1, CONV_KERNEL - 1, sizes.channels),
            0.1 * normal(1, sizes.value_heads, HEAD_SIZE, HEAD_SIZE),
        )
        return cls(kind, shape, made, vectors, states)

    def copied(self) -> "Layer":
        """The same weights with states of their own."""
        return replace(self, states=tuple(each.clone() for each in self.states))

    def arrays(self) -> LayerArrays:
        return LayerArrays(self.kind, self.matrices, self.vectors, *self.states)

    def floats(self, name: str) -> torch.Tensor:
        return self.matrices[name].view(torch.float32).view(-1, self.shape.sizes.hidden)

    def weight(self, name: str) -> QuantTensor:
        matrix = self.shape.matrices[name]
        return QuantTensor(self.matrices[name], matrix.quant_type, (matrix.rows, matrix.cols))

    def experts(self) -> ExpertMatrices:
        """As the launches of today take them."""
        tables = []
        for name in ROUTED:
            matrix, stack = self.shape.matrices[name], self.matrices[name]
            begin, size = stack.data_ptr(), matrix.rows * matrix.row_bytes
            addresses = torch.arange(self.shape.sizes.experts, device=stack.device) * size + begin
            tables.append(ExpertTable(addresses, matrix.quant_type, matrix.rows, matrix.cols))
        gate, up, down = (self.weight(name) for name in SHARED)
        return ExpertMatrices(tables[0], tables[1], tables[2], (gate, up, down))

    def rule(self) -> DeltaNetWeights:
        sizes, ids = self.shape.sizes, self.shape.key_head_ids
        names = ("conv_taps", "ssm_a", "ssm_dt_bias", "ssm_norm")
        vectors = [self.vectors[name] for name in names]
        key_heads = torch.tensor(ids, dtype=torch.int32, device=vectors[0].device)
        return DeltaNetWeights(*vectors, key_heads, sizes.key_heads, EPS)


class ByLaunches:
    """The layers by the launches of one row, with memory that all layers share."""

    def __init__(self, layers: Sequence[Layer], stream: torch.Tensor) -> None:
        self.layers = layers
        self.experts = [
            None if layer.shape.part is Part.BEFORE_ATTENTION else layer.experts() for layer in layers
        ]
        sizes, device = layers[0].shape.sizes, stream.device

        def empty(*counts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(counts, dtype=dtype, device=device)

        self.stream, self.totals = stream, [empty(1, sizes.hidden) for _ in range(3)]
        self.normed = empty(1, sizes.hidden)
        self.codes = empty_activations(1, sizes.hidden, device)
        self.ids = empty(1, sizes.chosen, dtype=torch.int32)
        self.weights, self.gate = empty(1, sizes.chosen), empty(1, 1)
        arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        self.buffers = RouterBuffers(self.ids, self.weights, self.gate, empty(1, sizes.experts), arrivals)
        self.hidden = PairRows(empty(1, sizes.chosen, sizes.ffn), empty(1, sizes.ffn))
        self.outs = PairRows(empty(1, sizes.chosen, sizes.hidden), empty(1, sizes.hidden))
        self.update, self.attended = empty(1, sizes.hidden), [empty(1, count) for count in sizes.attention]
        self.mixed_row = empty(1, sizes.attention_width)  # what attention gave, of the first layer
        if not sizes.value_heads:
            return
        rows = (sizes.channels, sizes.values, sizes.value_heads, sizes.value_heads)
        self.rules = [layer.rule() if layer.states else None for layer in layers]
        self.projected = [empty(1, count) for count in rows]
        self.mixed = empty_activations(1, sizes.values, device)
        counts = arrival_count(1, sizes.key_heads, sizes.values)
        zeros = torch.zeros(counts, dtype=torch.int32, device=device)
        self.work = DecodeWorkspace(empty(1, sizes.values), zeros)
        self.rows = Rows(*(torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)))

    def mix(self, index: int) -> None:
        """What the mixer of a layer adds to the stream, whose norm is there."""
        layer, rule = self.layers[index], self.rules[index]
        assert rule is not None
        weights = [layer.weight(name) for name in PROJECTED]
        linear_skinny_cuda(weights, self.projected, activations=self.codes, x=self.normed)
        inputs = DeltaNetInputs(*self.projected, self.rows)
        delta_net_decode_cuda(inputs, rule, *layer.states, None, self.mixed, self.work)
        linear_skinny_cuda([layer.weight(DELTA_OUT)], [self.update], activations=self.mixed)

    def end_attention(self, layer: Layer) -> None:
        """What attention adds to the stream."""
        codes = empty_activations(1, self.mixed_row.shape[1], self.mixed_row.device)
        quantize_cuda(self.mixed_row, codes)
        linear_skinny_cuda([layer.weight(ATTENTION_OUT)], [self.update], activations=codes)

    def route(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """The choice of experts by the norm of x, which what a mixer gives is added to before."""
        router, gate = layer.floats(ROUTER), layer.floats(SHARED_GATE)
        if layer.shape.part is Part.EXPERTS:
            router_gemv_cuda(self.normed, router, gate, self.buffers)
            return x
        norm = NormBefore(x, self.update, self.totals[2], layer.vectors["ffn_norm"], EPS, self.codes)
        router_gemv_cuda(self.normed, router, gate, self.buffers, norm=norm)
        return self.totals[2]

    def run(self) -> torch.Tensor:
        """The stream behind all layers; in `attended` what attention reads, if the last part ends there."""
        x = self.stream
        firsts = ["ffn_norm" if layer.shape.part is Part.EXPERTS else "attn_norm" for layer in self.layers]
        norms = [layer.vectors[name] for layer, name in zip(self.layers, firsts, strict=True)]
        rms_norm_cuda(x, norms[0], EPS, self.normed, self.codes)
        for index, (layer, experts) in enumerate(zip(self.layers, self.experts, strict=True)):
            part = layer.shape.part
            if part is Part.BEFORE_ATTENTION:
                weights = [layer.weight(name) for name in ATTENTION]
                linear_skinny_cuda(weights, self.attended, activations=self.codes, x=self.normed)
                break
            if part is Part.DELTA_NET:
                self.mix(index)
            elif part is Part.BEHIND_ATTENTION:
                self.end_attention(layer)
            x = self.route(layer, x)
            experts_gemv_cuda(
                experts, self.ids, self.hidden, self.outs, activations=self.codes, x=self.normed
            )
            routing = Routing(self.ids, self.weights, self.gate)
            outputs = ExpertOutputs(self.outs.routed, self.outs.shared, routing)
            norm = norms[min(index + 1, len(norms) - 1)]
            add_rms_norm_cuda(x, outputs, self.totals[index % 2], norm, EPS, self.normed, self.codes)
            x = self.totals[index % 2]
        return x


class ByOneLaunch:
    """The same layers by lists."""

    def __init__(self, layers: Sequence[Layer], lists: TokenLists, stream: torch.Tensor) -> None:
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

    def begin(self, mixed_row: torch.Tensor | None = None) -> None:
        """mixed_row: what attention has given, where the first part is behind it."""
        buffers, hidden = self.lists.buffers, self.stream.shape[1]
        self.memory.activations.view(torch.int32).fill_(-1)
        self.memory.activations[buffers.stream : buffers.stream + hidden] = self.stream[0]
        self.memory.counters.zero_()
        if mixed_row is not None:
            self.memory.activations[buffers.mixed : buffers.mixed + mixed_row.numel()] = mixed_row[0]

    def words(self, layer: int, place: int, count: int) -> torch.Tensor:
        """Some of a layer's activations."""
        begin = layer * self.lists.buffers.num_words + place
        return self.memory.activations[begin : begin + count]

    def queue(self, signals: Signals, stamps: torch.Tensor | None = None) -> None:
        launch_token(self.lists, replace(self.memory, stamps=stamps), self.num_layers, EPS, signals)

    def phases(self, signals: Signals) -> dict[str, dict[str, int]]:
        """Mean ns of each step over blocks and layers: until inputs are seen, loaded, and computed."""
        lists, names = self.lists, self.lists.blocks[0][0].names
        counts = (self.num_layers, lists.num_slots, lists.num_blocks, 5)
        stamps = torch.zeros(counts, dtype=torch.int32, device=self.stream.device)
        for _ in range(3):
            self.begin()
            self.queue(signals, stamps)
        self.result()
        cycles = stamps.long()
        whole = (cycles[-1, : len(names), :, 3].amax(0) - cycles[1, 0, :, 0]) & 0xFFFFFFFF
        found = {"cycles a layer": {"whole": int(whole.double().mean()) // (self.num_layers - 1)}}
        for slot, name in enumerate(names):
            begins, sees, loaded, ends, waited = cycles[1:, slot].unbind(-1)
            sees = torch.where(sees == 0, begins, sees)
            spans = {
                "sees": sees - begins,
                "loads": loaded - sees,
                "computes": ends - loaded,
                "bytes": waited,
            }
            key = name if name not in found else f"{name} {slot}"
            found[key] = {what: int((span & 0xFFFFFFFF).double().mean()) for what, span in spans.items()}
        return found

    def result(self) -> torch.Tensor:
        """The stream behind all layers. StuckError if a wait came to no end."""
        failed, number = (each & 0xFFFFFFFF for each in self.memory.report.tolist())
        self.clear_report()
        assert NOTHING_FAILED == (0, 0xFFFFFFFF)
        check_report(self.lists, failed, number)
        hidden, ends = self.stream.shape[1], self.num_layers
        if self.lists.kinds[-1].part is Part.BEFORE_ATTENTION:
            ends -= 1
        return self.words(ends, self.lists.buffers.stream, hidden).view(1, -1)


def full_size_kinds(layers: int, *, has_mixer: bool) -> tuple[list[LayerShape], list[int]]:
    """Kinds of layers of the full-size file, all with the mixer of its DeltaNet layers, and each layer's."""
    shape = FULL_SHAPE
    heads = (shape.key_heads, shape.value_heads) if has_mixer else (0, 0)
    sizes = Sizes(shape.hidden, shape.expert_ffn, shape.experts, shape.experts_per_token, *heads)
    names = (*ROUTED, *SHARED, *((*PROJECTED, DELTA_OUT) if has_mixer else ()))
    key_heads = tuple(head % shape.key_heads for head in range(sizes.value_heads))
    kinds: list[LayerShape] = []
    numbers = []
    for layer in range(layers):
        types = {name: PLAIN.type_of(name, layer, shape.layers) for name in names}
        part = Part.DELTA_NET if has_mixer else Part.EXPERTS
        kind = LayerShape.of(sizes, types, part, key_heads)
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return kinds, numbers


def between_attentions() -> list[list[LayerShape]]:
    """The parts of the full-size file's layers that are one launch each, from one attention to the next."""
    shape = FULL_SHAPE
    attention = (2 * shape.heads * shape.head_dim, *(shape.kv_heads * shape.head_dim,) * 2)
    sizes = Sizes(
        shape.hidden, shape.expert_ffn, shape.experts, shape.experts_per_token, shape.key_heads,
        shape.value_heads, attention, shape.heads * shape.head_dim,
    )  # fmt: skip
    key_heads = tuple(head % shape.key_heads for head in range(sizes.value_heads))
    names = (*ROUTED, *SHARED, *PROJECTED, DELTA_OUT, *ATTENTION, ATTENTION_OUT)
    launches: list[list[LayerShape]] = [[]]
    for layer in range(shape.layers):
        types = {name: PLAIN.type_of(name, layer, shape.layers) for name in names}
        if layer % 4 < 3:
            launches[-1].append(LayerShape.of(sizes, types, Part.DELTA_NET, key_heads))
            continue
        launches[-1].append(LayerShape.of(sizes, types, Part.BEFORE_ATTENTION))
        launches.append([LayerShape.of(sizes, types, Part.BEHIND_ATTENTION)])
    return launches


def measured_between(generator: torch.Generator, stream: torch.Tensor) -> dict[str, Any]:
    """All launches of a token but those of attention and the head, in µs; the bits of each are checked."""
    mixed = torch.randn(
        1, between_attentions()[0][0].sizes.attention_width, generator=generator, device="cuda"
    )
    launches, same = [], True
    for shapes in between_attentions():
        layers = [Layer.random(kind, shape, generator) for kind, shape in enumerate(shapes)]
        by_launches = ByLaunches([layer.copied() for layer in layers], stream)
        by_launches.mixed_row.copy_(mixed)
        want = by_launches.run()
        launch = ByOneLaunch(layers, plan(shapes, device_limits().num_processors), stream)
        launch.begin(mixed)
        launch.queue(Signals())
        same = same and torch.equal(launch.result(), want)
        launches.append(launch)

    def begin() -> None:
        for launch in launches:
            launch.begin(mixed)

    def token() -> None:
        begin()
        for launch in launches:
            launch.queue(Signals())

    us = (graph_seconds([token]) - graph_seconds([begin])) * 1e6
    return {"launches": len(launches), "us_a_token": us, "same_bits": same}


def read_bytes(layers: Sequence[Layer]) -> int:
    """Weights that a token reads, and states, which it also writes."""
    total = 0
    for layer in layers:
        for name, matrix in layer.shape.matrices.items():
            count = layer.shape.sizes.chosen if name in ROUTED else 1
            total += matrix.rows * matrix.row_bytes * count
        total += sum(2 * 4 * each.numel() for each in layer.states)
    return total


def queued_seconds(token: Callable[[], None]) -> float:
    """Median of a call, queued behind others so that the device does not wait for the host."""
    events = []
    for _ in range(QUEUED_BEFORE + LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        token()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e-3 for begin, end in events[QUEUED_BEFORE:])


def measured(layers: Sequence[Layer], kinds: Sequence[LayerShape], stream: torch.Tensor) -> dict[str, Any]:
    """Times of both ways, in µs a layer, and whether bits are the same."""
    by_launches = ByLaunches([layer.copied() for layer in layers], stream)
    want = by_launches.run().clone()
    wanted_states = [[each.clone() for each in layer.states] for layer in by_launches.layers]
    rows: dict[str, Any] = {"launches": {"us_a_layer": graph_seconds([by_launches.run]) * 1e6 / len(layers)}}
    print("launches", rows["launches"], flush=True)
    for name, (signals, warps) in VERSIONS.items():
        lists = plan(kinds, device_limits().num_processors, warps=warps)
        own = [layer.copied() for layer in layers]
        by_one = ByOneLaunch(own, lists, stream)

        def token(by_one: ByOneLaunch = by_one, signals: Signals = signals) -> None:
            by_one.begin()
            by_one.queue(signals)

        try:
            token()
            same = torch.equal(by_one.result(), want) and all(
                torch.equal(*both)
                for layer, states in zip(own, wanted_states, strict=True)
                for both in zip(layer.states, states, strict=True)
            )
            us = queued_seconds(token) * 1e6 / len(layers)
            by_one.result()
            rows[name] = {"us_a_layer": us, "same_bits": same, "phases": by_one.phases(signals)}
        except Exception as error:  # the others still run
            rows[name] = {"error": str(error)}
        shown = {key: value for key, value in rows[name].items() if key != "phases"}
        print(name, shown, flush=True)
        for phase, spans in rows[name].get("phases", {}).items():
            print("   ", phase, spans, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers)
    parser.add_argument("--experts-only", action="store_true", help="layers without a mixer")
    parser.add_argument("--between", action="store_true", help="only the launches between attentions")
    add_result_options(parser)
    options = parser.parse_args()
    calls.attach()
    machine, bandwidth = describe("cuda"), measure_bandwidth("cuda", 0)
    if options.between:
        random = torch.Generator("cuda").manual_seed(1)
        row = measured_between(random, torch.randn(1, FULL_SHAPE.hidden, generator=random, device="cuda"))
        command = "python -m bench.kernels.token_layers --between"
        write_result({"command": command, "machine": machine, **row}, options.out, options.commit)
        return int(not row["same_bits"])
    kinds, numbers = full_size_kinds(options.layers, has_mixer=not options.experts_only)
    generator = torch.Generator("cuda").manual_seed(1)
    layers = [Layer.random(number, kinds[number], generator) for number in numbers]
    stream = torch.randn(1, FULL_SHAPE.hidden, generator=generator, device="cuda")
    floor = read_bytes(layers) / bandwidth * 1e6 / len(layers)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, floor {floor:.1f} µs a layer")
    result = {
        "command": "python -m bench.kernels.token_layers",
        "machine": machine,
        "copy_bytes_s": bandwidth,
        "layers": len(layers),
        "has_mixer": not options.experts_only,
        "floor_us_a_layer": round(floor, 2),
    }
    rows = measured(layers, kinds, stream)
    write_result({**result, "rows": rows}, options.out, options.commit)
    return int(not all(row.get("same_bits", name == "launches") for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
