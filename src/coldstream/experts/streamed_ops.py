"""The operations on a GPU that has most experts of a long prompt only for a moment, in a ring.

`streaming.py` decides when and where; what is computed of a group that has landed is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from coldstream.experts.host import HostExperts
from coldstream.experts.streaming import ExpertStream, LandedGroup
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.few_shapes import FEW_TYPES
from coldstream.kernels.cuda.few_shapes import MAX_ROWS as MAX_FEW_ROWS
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.cuda_layer import Stacks, down_many, gate_up_grouped
from coldstream.kernels.experts.cuda_many import Groups, group_pairs, max_tiles
from coldstream.kernels.experts.place_group import place_group_cuda
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.linear.reference import INTEGER_TYPES, activation_scale_size
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.cuda import swiglu_cuda


@dataclass(frozen=True)
class _Grouped:
    """A layer's pairs in the order of their experts, and memory for what is computed of them by place."""

    groups: Groups
    inputs: tuple[QuantActivations, ...]  # of gate and of up
    products: tuple[torch.Tensor, ...]  # of gate and of up, float32 [T · K, F]; both in one of one type
    hidden: Activations  # [T · K, F], quantised as down reads it


@dataclass(frozen=True)
class _Pairs:
    """What the routed experts of a layer are computed from, group by group, and into what."""

    x: Activations
    ids: torch.Tensor
    weights: ExpertWeights
    tables: tuple[torch.Tensor, ...]  # int64 [experts], for the addresses of a group
    routed: torch.Tensor  # float32 [T, K, E]
    grouped: _Grouped | None  # None: of types without products of their own


class StreamedOps(CudaOps):
    """`CudaOps` with routed experts in slots, in a ring of `ring_bytes` in turn, or left to the CPU."""

    def __init__(
        self,
        memory: Memory,
        max_positions: int,
        max_rows: int,
        host: HostExperts | None,
        ring_bytes: int,
        *,
        notes_kernels: bool = False,
    ) -> None:
        super().__init__(memory, max_positions, max_rows, notes_kernels=notes_kernels)
        self.host = host
        self.ring = memory.persistent((ring_bytes,), torch.uint8)
        self.stream = None if host is None else ExpertStream(host, self.ring)

    def _streamed_experts(
        self, x: Activations, routing: Routing, weights: ExpertWeights, layer: int
    ) -> ExpertOutputs:
        """The experts of any number of rows, `weights` being in slots or on the host."""
        stream, resident = self.stream, None
        if stream is not None:
            resident = stream.resident[layer]
            if resident.all():
                return super().experts(x, routing, weights)
            stream.ask(x.values, routing.ids)
        routed = self._empty(*routing.ids.shape, x.shape[1])
        gate, up = self.linear(x, (weights.shared_gate, weights.shared_up))
        (shared,) = self.linear(self.swiglu(gate, up), (weights.shared_down,))
        del gate, up
        pairs = self._pairs_of(x, routing.ids, weights, routed)
        whole = slice(0, routing.ids.numel())
        if resident is None or resident.any():
            self._compute_pairs(pairs, weights, whole)
        if stream is None:
            self._compute_groups(pairs, [LandedGroup((0,), (0,) * MATRICES, (0,) * MATRICES)], whole)
            return ExpertOutputs(routed, shared, routing)
        elsewhere = stream.share_out(layer, len(routing.ids), partial(self._compute_groups, pairs))
        return ExpertOutputs(routed, shared, routing, elsewhere)

    def _pairs_of(
        self, x: Activations, ids: torch.Tensor, weights: ExpertWeights, routed: torch.Tensor
    ) -> _Pairs:
        """Memory for a layer, and its pairs grouped by expert."""
        stacks = (weights.gate, weights.up, weights.down)
        num_pairs, num_experts = ids.numel(), len(weights.gate.addresses)
        tables = tuple(self._empty(num_experts, dtype=torch.int64) for _ in stacks)
        if not all(stack.quant_type in INTEGER_TYPES for stack in stacks):
            return _Pairs(x, ids, weights, tables, routed, None)
        groups = Groups(
            self._empty(num_pairs, dtype=torch.int32),
            self._empty(num_pairs, dtype=torch.int32),
            self._empty(num_experts, 2, dtype=torch.int32),
            self._empty(max_tiles(num_pairs, num_experts) + 1, 4, dtype=torch.int32),
        )
        self._launch(group_pairs, ids, num_experts, groups)
        inputs = self._quantised_for(x, (weights.gate.quant_type, weights.up.quant_type))
        scale_size = activation_scale_size(weights.down.quant_type)
        hidden = self.activations(num_pairs, weights.gate.rows, scale_size=scale_size)
        products: tuple[torch.Tensor, ...] = (hidden.values,)
        if weights.gate.quant_type != weights.up.quant_type:
            products = (self._empty(*hidden.shape), self._empty(*hidden.shape))
        return _Pairs(x, ids, weights, tables, routed, _Grouped(groups, inputs, products, hidden))

    def _compute_groups(self, pairs: _Pairs, groups: Sequence[LandedGroup], places: slice) -> None:
        """Those of groups that have landed."""
        for i, group in enumerate(groups):
            self._launch(self._place, group, pairs.tables, i == 0)
        gate, up, down = (
            replace(stack, addresses=table)
            for stack, table in zip(_stacks(pairs.weights), pairs.tables, strict=True)
        )
        self._compute_pairs(pairs, replace(pairs.weights, gate=gate, up=up, down=down), places)

    @staticmethod
    def _place(group: LandedGroup, tables: Sequence[torch.Tensor], clears: bool) -> None:
        place_group_cuda(group.experts, group.first, group.sizes, tables, clears=clears)

    def _compute_pairs(self, pairs: _Pairs, weights: ExpertWeights, places: slice) -> None:
        """Those whose experts have an address in `weights`; they are among `places`."""
        if pairs.grouped is None:
            self._compute_ungrouped(pairs, weights)
            return
        stacks, groups = _stacks(weights), pairs.grouped.groups
        products, hidden = pairs.grouped.products, pairs.grouped.hidden
        self._launch(gate_up_grouped, pairs.grouped.inputs, pairs.ids, stacks, groups, products)
        # Places of other experts between them are written again when those are computed, or were as they are.
        part = hidden.rows(places.start, places.stop - places.start)
        if len(products) == 1:
            self._launch(quantize_cuda, part.values, part.quantised)
        else:
            gate, up = (product[places] for product in products)
            self._launch(swiglu_cuda, gate, up, part.values, part.quantised)
        self._launch(down_many, hidden.quantised, pairs.ids, stacks, groups, pairs.routed)

    def _compute_ungrouped(self, pairs: _Pairs, weights: ExpertWeights) -> None:
        stacks = _stacks(weights)
        if not all(stack.quant_type in FEW_TYPES for stack in stacks):
            self._experts_as_floats(pairs.x, pairs.ids, stacks, pairs.routed)
            return
        tokens = len(pairs.ids)
        for first in range(0, tokens, MAX_FEW_ROWS):
            part = slice(first, min(first + MAX_FEW_ROWS, tokens))
            rows = pairs.x.rows(first, part.stop - first)
            self._few_experts(rows, pairs.ids[part], weights, pairs.routed[part], None)


def _stacks(weights: ExpertWeights) -> Stacks:
    return weights.gate, weights.up, weights.down
