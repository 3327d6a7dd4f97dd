"""The mixture of experts on a GPU: its router, and its experts at the addresses in tables.

`Form.of` is the only place that decides which kernels compute them.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.quantised import QuantActivations
from coldstream.kernels.composed_ops import ffn_of_products
from coldstream.kernels.cuda.activations import Activations, as_floats
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.cuda.products import CudaProducts
from coldstream.kernels.cuda.skinny_shapes import MAX_GEMV_ROWS, MAX_PAIR_ROWS, SKINNY_TYPES
from coldstream.kernels.experts.cuda import PairRows
from coldstream.kernels.experts.cuda_gemm import Groups, fit_one_block, group_pairs, max_tiles
from coldstream.kernels.experts.cuda_grouped import MAX_GROUPED_ROWS, ChosenIds
from coldstream.kernels.experts.cuda_layer import (
    Stacks,
    all_experts_gemv,
    all_experts_grouped,
    down_gemm,
    gate_up_gemm,
    is_one_launch,
    stacks_of,
)
from coldstream.kernels.experts.partition import Sharing, begin_of, partition_experts_cuda
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.linear.integer_types import INTEGER_TYPES, activation_scale_size
from coldstream.kernels.ops import SWIGLU, ExpertWeights, RouterWeights, Routing
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.router.cuda import Ahead, RouterBuffers, router_choose_cuda, router_gemv_cuda
from coldstream.kernels.swiglu.cuda import PlacedBiases, swiglu_cuda

# Up to so many tokens each pair is computed on its own, up to `MAX_GROUPED_ROWS` pairs of an expert read it
# together in the same launches, and beyond they are sorted for the tensor cores.
MAX_PAIRWISE_ROWS = 8


class Form(Enum):
    """Which kernels compute routed experts."""

    GEMV = auto()  # a few tokens in a launch, each pair on its own
    GROUPED = auto()  # the same, pairs of an expert together
    GEMM = auto()  # tensor cores, pairs of an expert together

    @classmethod
    def of(cls, tokens: int, stacks: Stacks) -> "Form":
        """The form for so many tokens."""
        types = [stack.quant_type for stack in stacks]
        if tokens <= MAX_PAIRWISE_ROWS or not INTEGER_TYPES.issuperset(types):
            return cls.GEMV
        return cls.GROUPED if tokens <= MAX_GROUPED_ROWS else cls.GEMM


@dataclass(frozen=True)
class _Grouped:
    """Pairs in the order of their experts, and memory by place in that order."""

    groups: Groups
    inputs: tuple[QuantActivations, ...]  # of gate and of up
    products: tuple[DeviceArray, ...]  # of gate and of up, float32 [T · K, F]; one if of one type
    hidden: Activations  # [T · K, F], quantised as down reads it


@dataclass(frozen=True)
class Pairs:
    """Inputs of a layer's routed experts, and memory for their outputs: `routed` float32 [T, K, E]."""

    x: Activations
    ids: DeviceArray
    routed: DeviceArray
    form: Form
    grouped: _Grouped | None  # of GEMM

    @property
    def places(self) -> slice:
        """All places in the order of experts."""
        return slice(0, self.ids.numel())


class MoeKernels:
    """The launches of a layer's router and experts, with workspace of `device`."""

    def __init__(self, device: CudaProducts) -> None:
        self.device = device

    @staticmethod
    def routes_at_once(num_rows: int, shared_gate: CudaWeight | None) -> bool:
        """Whether `route` is a single launch, which may also look `ahead`."""
        assert shared_gate is None or isinstance(shared_gate, QuantTensor)
        is_float = shared_gate is None or shared_gate.quant_type == QuantType.F32
        return num_rows <= MAX_GEMV_ROWS and is_float

    def route(
        self,
        x: Activations,
        weights: RouterWeights,
        sharing: Sharing | None = None,
        ahead: Ahead | None = None,
    ) -> Routing:
        """`Ops.router`; also shares out the chosen pairs if `sharing` is given.

        x has nothing to be computed `before` unless this `routes_at_once`.
        """
        gate, shared_gate, count = weights.gate, weights.shared_gate, weights.num_experts_per_tok
        assert isinstance(gate, QuantTensor)
        device, num_rows, rule = self.device, x.shape[0], weights.rule
        ids = device.empty(num_rows, count, dtype="int32")
        topk_weights = device.empty(num_rows, count)
        read = x if x.for_router is None else replace(x, values=x.for_router)
        if not self.routes_at_once(num_rows, shared_gate):
            logits, *shared = device.linear(read, (gate,) if shared_gate is None else (gate, shared_gate))
            device.launch(router_choose_cuda, logits, ids, topk_weights, device.step_positions, rule)
            if sharing is not None:
                self._share_out(ids, x, sharing)
            return Routing(ids, topk_weights, shared[0] if shared else None)
        out, shared_weight = None, None
        if shared_gate is not None:
            out, shared_weight = device.empty(num_rows, 1), as_floats(shared_gate)
        logits, arrivals = device.empty(num_rows, gate.shape[0]), device.zeroed("router", 1)
        buffers = RouterBuffers(ids, topk_weights, out, logits, arrivals)
        behind = sharing if num_rows > 1 else None  # for a launch behind the router's
        if sharing is not None and read is not x:
            sharing.x = x.values.data_ptr()
        device.launch(
            router_gemv_cuda, read.values, as_floats(gate), shared_weight, buffers,
            begin_of(behind) if behind else sharing, ahead, x.before, rule,
        )  # fmt: skip
        if behind:
            self._share_out(ids, x, behind)
        return Routing(ids, topk_weights, out)

    def _share_out(self, ids: DeviceArray, x: Activations, sharing: Sharing) -> None:
        arrivals = self.device.zeroed("asks", 1) if len(ids) > MAX_MAILBOX_ROWS else None
        self.device.launch(partition_experts_cuda, ids, x.values, sharing, arrivals)

    def outputs(
        self, x: Activations, ids: DeviceArray, weights: ExpertWeights
    ) -> tuple[DeviceArray, DeviceArray | None]:
        """Outputs of the routed experts [T, K, E], undefined where an address is 0, and of `shared`."""
        form = Form.of(len(ids), stacks_of(weights))
        types = {Form.GEMV: SKINNY_TYPES, Form.GROUPED: INTEGER_TYPES}.get(form)
        if types is not None and len(ids) <= MAX_PAIR_ROWS and is_one_launch(weights, types):
            routed, shared = self.device.empty(*ids.shape, x.shape[1]), self.device.empty(*x.shape)
            self._in_one_launch(Pairs(x, ids, routed, form, None), weights, shared)
            return routed, shared
        outputs = self.shared(x, weights)
        pairs = self.pairs(x, ids, weights)
        self.compute(pairs, weights, pairs.places)
        return pairs.routed, outputs

    def shared(self, x: Activations, weights: ExpertWeights) -> DeviceArray | None:
        """Output of the shared expert before its gate, [T, E]; None if there is none."""
        if weights.shared_gate is None:
            return None
        shared: DeviceArray = ffn_of_products(self.device, x, weights.shared)
        return shared

    def pairs(self, x: Activations, ids: DeviceArray, weights: ExpertWeights) -> Pairs:
        """Memory for the routed experts of a layer; for GEMM of more than a few, queues their grouping."""
        device, stacks = self.device, stacks_of(weights)
        routed = device.empty(*ids.shape, x.shape[1])
        form = Form.of(len(ids), stacks)
        if form is not Form.GEMM:
            return Pairs(x, ids, routed, form, None)
        gate, up, down = stacks
        num_pairs, num_experts = ids.numel(), len(gate.addresses)
        groups = Groups(
            device.empty(num_pairs, dtype="int32"),
            device.empty(num_pairs, dtype="int32"),
            device.empty(num_experts, 2, dtype="int32"),
            device.empty(max_tiles(num_pairs, num_experts) + 1, 4, dtype="int32"),
        )
        if not fit_one_block(len(ids), num_pairs, num_experts):
            device.launch(group_pairs, ids, num_experts, groups)
        inputs = device.quantised_for(x, (gate.quant_type, up.quant_type))
        hidden = device.activations(num_pairs, gate.rows, scale_size=activation_scale_size(down.quant_type))
        products: tuple[DeviceArray, ...] = (hidden.values,)
        if gate.quant_type != up.quant_type or weights.activation != SWIGLU:
            products = (device.empty(*hidden.shape), device.empty(*hidden.shape))
        return Pairs(x, ids, routed, form, _Grouped(groups, inputs, products, hidden))

    def compute(self, pairs: Pairs, weights: ExpertWeights, places: slice) -> None:
        """Computes the pairs whose experts have an address in `weights`; for GEMM, all lie in `places`."""
        if pairs.grouped is not None:
            self._gemm(pairs.grouped, pairs, weights, places)
        elif pairs.form is Form.GROUPED:
            self._in_one_launch(pairs, weights, None)
        else:
            for first in range(0, len(pairs.ids), MAX_PAIR_ROWS):
                part = slice(first, min(first + MAX_PAIR_ROWS, len(pairs.ids)))
                rows = pairs.x.rows(first, part.stop - first)
                self._in_one_launch(
                    replace(pairs, x=rows, ids=pairs.ids[part], routed=pairs.routed[part]), weights, None
                )

    def _in_one_launch(self, pairs: Pairs, weights: ExpertWeights, shared: DeviceArray | None) -> None:
        """For at most MAX_PAIR_ROWS tokens; with the shared expert if `shared` is given."""
        ids, outs = pairs.ids, PairRows(pairs.routed, shared)
        hidden = PairRows(
            self.device.empty(*ids.shape, weights.gate.rows),
            None if shared is None else self.device.empty(len(ids), weights.shared_gate.shape[0]),
        )
        if pairs.form is Form.GROUPED:
            chosen = ChosenIds(ids, len(weights.gate.addresses))
            self.device.launch(all_experts_grouped, pairs.x, chosen, weights, hidden, outs)
        else:
            self.device.launch(all_experts_gemv, pairs.x, ids, weights, hidden, outs)

    def _gemm(self, grouped: _Grouped, pairs: Pairs, weights: ExpertWeights, places: slice) -> None:
        launch, products, hidden = self.device.launch, grouped.products, grouped.hidden
        stacks = stacks_of(weights)
        launch(gate_up_gemm, grouped.inputs, pairs.ids, stacks, grouped.groups, products)
        # Other experts' places in between keep their values, or are overwritten when those are computed.
        part = hidden.rows(places.start, places.stop - places.start)
        if len(products) == 1:
            launch(quantize_cuda, part.values, part.quantised, tokens=len(pairs.ids))
        else:
            gate, up = (product[places] for product in products)
            biases = None
            if weights.biases is not None:
                biases = PlacedBiases(weights.biases, grouped.groups.pairs[places], pairs.ids)
            codes, activation, tokens = part.quantised, weights.activation, len(pairs.ids)
            launch(swiglu_cuda, gate, up, part.values, codes, activation, biases, tokens=tokens)
        launch(down_gemm, hidden.quantised, pairs.ids, stacks, grouped.groups, pairs.routed)
