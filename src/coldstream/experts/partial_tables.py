"""The experts of layers that may miss some on the device: tables of addresses, numbered by layer."""

from collections.abc import Collection, Iterable

import torch

from coldstream.experts.host import HostExperts
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.experts.cuda_layer import Stacks, stacks_of
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertWeights


class PartialTables:
    """Tables in `memory`, in which whoever fills slots writes their addresses.

    `layers` has the tables of each layer that may miss an expert and `routers` its router's weight, in the
    model's order, from 0 on as in `slot_shares`; layers in `whole_layers` are not among them. Over a
    `MemoryPlan` there is no `host`.
    """

    def __init__(self, memory: Memory, host: HostExperts | None, whole_layers: Collection[int]) -> None:
        self._memory, self._host = memory, host
        self._whole = tuple(f"blk.{layer}." for layer in whole_layers)
        self.layers: list[Stacks] = []
        self.routers: list[CudaWeight] = []
        self._numbers: dict[int, int] = {}  # by the identity of a layer's first table

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """A stack that stays where it is; None for one of a whole layer."""
        if info.name.startswith(self._whole):
            return None
        num_experts, rows, cols = info.shape
        addresses = self._memory.persistent((num_experts,), torch.int64)
        if self._host is None:
            return ExpertTable(addresses, info.quant_type, rows, cols, is_partial=True)
        addresses.zero_()
        weight, mapped = self._host.map_weight(file, info)
        step = info.num_bytes // num_experts
        return ExpertTable(addresses, info.quant_type, rows, cols, True, weight, mapped, step)

    def number(self, layers: Iterable[tuple[CudaWeight, ExpertWeights]]) -> None:
        """Once, when they are loaded: the routers and experts of all layers, in the model's order."""
        for router, weights in layers:
            if not weights.gate.is_partial:
                continue
            stacks = stacks_of(weights)
            self._numbers[id(weights.gate)] = len(self.layers)
            self.layers.append(stacks)
            self.routers.append(router)
            if self._host is not None:
                self._host.add_layer(*(stack.host for stack in stacks))

    def number_of(self, weights: ExpertWeights) -> int:
        """The layer whose experts these are. KeyError if all of them are on the device."""
        return self._numbers[id(weights.gate)]

    @property
    def is_readable(self) -> bool:
        """Whether the device reads all experts over the bus; on no host it is taken for granted."""
        return self._host is None or all(stack.mapped for stacks in self.layers for stack in stacks)
