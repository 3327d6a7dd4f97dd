"""Experts of steps of many rows: the host shares layers out, and missing experts are copied into a ring.

`expert_stream.py` decides when and where they are copied; this module queues the kernels of staged groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from coldstream.experts.expert_stream import ExpertStream, StagedGroup
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.experts.cuda_layer import stacks_of
from coldstream.kernels.experts.moe import MoeKernels, Pairs
from coldstream.kernels.experts.place_group import place_group_cuda
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing


@dataclass(frozen=True)
class _LayerWork:
    """A layer's pairs, and tables int64 [experts] for the addresses of a group that has arrived."""

    pairs: Pairs
    weights: ExpertWeights
    tables: tuple[torch.Tensor, ...]


class ManyRows:
    """Steps of any number of rows. `stream` is None over a `MemoryPlan`, without a `host`."""

    def __init__(
        self, kernels: MoeKernels, tables: PartialTables, host: HostExperts | None, ring: torch.Tensor
    ) -> None:
        self._kernels, self._device, self._tables = kernels, kernels.device, tables
        self.stream = None if host is None else ExpertStream(host, ring)

    def number_layers(self) -> None:
        """Call once, after `PartialTables.number`. ValueError for experts that do not fit into the ring."""
        if self.stream is not None:
            for stacks in self._tables.layers:
                self.stream.add_layer(stacks)

    def compute(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """Computes experts in slots, then those copied over the bus, while the CPU computes the others."""
        stream, resident, layer = self.stream, None, self._tables.number_of(weights)
        if stream is not None:
            resident = stream.resident[layer]
            if resident.all():
                routed, shared = self._kernels.outputs(x, routing.ids, weights)
                return ExpertOutputs(routed, shared, routing)
            stream.ask(x.values, routing.ids)
        shared = self._kernels.shared(x, weights)
        num_experts = len(weights.gate.addresses)
        tables = tuple(self._device.empty(num_experts, dtype=torch.int64) for _ in range(MATRICES))
        pairs = self._kernels.pairs(x, routing.ids, weights)
        work = _LayerWork(pairs, weights, tables)
        if resident is None or resident.any():
            self._kernels.compute(pairs, weights, pairs.places)
        if stream is None:
            nothing = StagedGroup((0,), (0,) * MATRICES, (0,) * MATRICES)
            self._compute_groups(work, [nothing], pairs.places)
            return ExpertOutputs(pairs.routed, shared, routing)
        elsewhere = stream.share_out(layer, len(routing.ids), partial(self._compute_groups, work))
        return ExpertOutputs(pairs.routed, shared, routing, elsewhere)

    def _compute_groups(self, work: _LayerWork, groups: Sequence[StagedGroup], places: slice) -> None:
        for i, group in enumerate(groups):
            self._device.launch(self._place, group, work.tables, i == 0)
        gate, up, down = (
            replace(stack, addresses=table)
            for stack, table in zip(stacks_of(work.weights), work.tables, strict=True)
        )
        weights = replace(work.weights, gate=gate, up=up, down=down)
        self._kernels.compute(work.pairs, weights, places)

    @staticmethod
    def _place(group: StagedGroup, tables: Sequence[torch.Tensor], clears: bool) -> None:
        place_group_cuda(group.experts, group.first, group.sizes, tables, clears=clears)
