"""The parts of `Ops` that a device without fused kernels composes from smaller operations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.ops import (
    BLOCK_POSITIONS,
    SWIGLU,
    Activation,
    Array,
    CommittedPath,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertOutputs,
    ExpertWeights,
    FfnWeights,
    PostNorms,
    RecurrentLayer,
    RouterWeights,
    Routing,
    Rows,
    Weight,
)


class Products(Protocol):
    """The part of `Ops` that a feed-forward network needs."""

    def linear(self, x: Array, weights: Sequence[Weight]) -> tuple[Array, ...]:
        """See `Ops`."""

    def glu(self, gate: Array, up: Array, activation: Activation = SWIGLU) -> Array:
        """See `Ops`."""


def ffn_of_products(ops: Products, x: Array, weights: FfnWeights) -> Array:
    """`Ops.ffn` of weights that `ops` multiplies with."""
    gate, up = ops.linear(x, (weights.gate, weights.up))
    return ops.linear(ops.glu(gate, up, weights.activation), (weights.down,))[0]


class ComposedOps(ABC):
    """Norms of sums, `router`, `experts` and commits over one operation at a time."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """See `Ops`."""

    @abstractmethod
    def load_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        """See `Ops`."""

    @abstractmethod
    def int_vector(self, values: Sequence[int]) -> Array:
        """See `Ops`."""

    @abstractmethod
    def gated_delta_net(
        self, inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: Array, state: Array
    ) -> Array:
        """See `Ops`."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """See `Ops`."""

    @abstractmethod
    def linear(self, x: Array, weights: Sequence[Weight]) -> tuple[Array, ...]:
        """See `Ops`."""

    @abstractmethod
    def glu(self, gate: Array, up: Array, activation: Activation = SWIGLU) -> Array:
        """See `Ops`."""

    @abstractmethod
    def add_bias(self, x: Array, bias: Array) -> Array:
        """See `Ops`."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """x + y."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """See `Ops`."""

    @abstractmethod
    def inject(
        self, streams: Array | None, update: Array, injection: Array | None, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        """`Ops.inject_norm` of a plain update."""

    @abstractmethod
    def scaled_silu(self, x: Array, divisor: int) -> Array:
        """silu(x / divisor), [T, F]."""

    def stream_gates(
        self, x: Array, low: Sequence[Weight], up: Weight, divisor: int
    ) -> tuple[Array, tuple[Array, ...]]:
        first, *others = self.linear(x, low)
        (gates,) = self.linear(self.scaled_silu(first, divisor), (up,))
        return gates, tuple(others)

    @abstractmethod
    def choose_experts(self, x: Array, weights: RouterWeights) -> tuple[Array, Array]:
        """The choice of `Ops.router`: int32 ids and weights, [T, K]."""

    @abstractmethod
    def routed_experts(self, x: Array, topk_ids: Array, weights: ExpertWeights) -> Array:
        """down_e(glu(gate_e x, up_e x)) for each chosen expert, kept apart: [T, K, E]."""

    @abstractmethod
    def combine_experts(
        self,
        routed: Array,
        topk_weights: Array,
        shared: Array | None,
        shared_gate: Array | None,
        bias: tuple[Array, Array] | None = None,
    ) -> Array:
        """Σ_k weight_k · routed_k in rank order + sigmoid(shared_gate [T, 1]) · shared: [T, E].

        The shared expert has weight 1 if the gate is None; the sum is alone if both are. bias [experts, E]
        and the ids [T, K] of the experts: it is first added to routed.
        """

    def add_norm(
        self,
        x: Array,
        update: Array | ExpertOutputs | BiasedOutput,
        weight: Array,
        eps: float,
        *,
        for_router: bool = False,
    ) -> tuple[Array, Array]:
        if isinstance(update, BiasedOutput):
            update = self.add_bias(update.values, update.bias)
        x = self.add(x, self._combined(update))
        return x, self.rms_norm(x, weight, eps)

    def add_post_norm(
        self, x: Array, update: Array | ExpertOutputs, post: PostNorms, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        if post.routed is not None:
            assert isinstance(update, ExpertOutputs), "only experts have something beside them"
            beside = self.rms_norm(update.shared, post.shared, eps)
            routed = self.rms_norm(self._combined(replace(update, shared=None)), post.routed, eps)
            update = self.add(beside, routed)
        x = self.add(x, self.rms_norm(self._combined(update), post.weight, eps))
        if post.scale is not None:
            x = self.scale(x, float(post.scale[0]))
        return x, self.rms_norm(x, weight, eps)

    def inject_norm(
        self,
        streams: Array | None,
        update: Array | ExpertOutputs,
        injection: Array | None,
        weight: Array,
        eps: float,
    ) -> tuple[Array, Array]:
        return self.inject(streams, self._combined(update), injection, weight, eps)

    def _combined(self, update: Array | ExpertOutputs) -> Array:
        """The update itself, or the sum of the experts."""
        if not isinstance(update, ExpertOutputs):
            return update
        routing = update.routing
        bias = None if update.bias is None else (update.bias, routing.ids)
        gate = routing.shared_gate
        return self.combine_experts(update.routed, routing.weights, update.shared, gate, bias)

    def load_ffn_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        return self.load_weight(file, info)

    def ffn(self, x: Array, weights: FfnWeights) -> Array:
        return ffn_of_products(self, x, weights)

    def router(
        self, x: Array, weights: RouterWeights, experts: ExpertWeights, residual: Array = None
    ) -> Routing:
        has_own = weights.input_norm is not None
        read = self.rms_norm(residual, weights.input_norm, weights.eps) if has_own else x
        ids, topk_weights = self.choose_experts(read, weights)
        shared = None if weights.shared_gate is None else self.linear(x, (weights.shared_gate,))[0]
        return Routing(ids, topk_weights, shared)

    def experts(self, x: Array, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        routed = self.routed_experts(x, routing.ids, weights)
        return ExpertOutputs(routed, self.shared_expert(x, weights), routing, bias=weights.down_bias)

    def shared_expert(self, x: Array, weights: ExpertWeights) -> Array | None:
        """Output of the shared expert before its gate: [T, E]; None if there is none."""
        if weights.shared_gate is None:
            return None
        return ffn_of_products(self, x, weights.shared)

    def commit_attention(self, caches: Sequence[tuple[Array, ...]], path: CommittedPath) -> None:
        count, first = int(path.count[0]), int(path.first[0])
        old = first + path.sources[:count]
        new = self.int_vector(range(first, first + count))
        for cache in chain.from_iterable(caches):
            blocks, positions = path.table[new // BLOCK_POSITIONS], new % BLOCK_POSITIONS
            cache[blocks, positions] = cache[path.table[old // BLOCK_POSITIONS], old % BLOCK_POSITIONS]

    def commit_delta_net(self, layers: Sequence[RecurrentLayer], path: CommittedPath) -> None:
        count, state_id = int(path.count[0]), int(path.state_id[0])
        if not count:
            return
        rows = Rows(self.int_vector(range(count)), self.int_vector([state_id] * count))
        for layer in layers:
            kept = (layer.kept.qkv, layer.kept.alpha, layer.kept.beta)
            qkv, alpha, beta = (values[path.kept[:count]] for values in kept)
            # The replay computes only states: its output, and so z, does not matter.
            z = self.zeros((count, layer.state.shape[1] * layer.state.shape[-1]), "float32")
            inputs = DeltaNetInputs(qkv, z, alpha, beta, rows)
            self.gated_delta_net(inputs, layer.weights, layer.conv_state, layer.state)
