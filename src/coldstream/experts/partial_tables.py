"""Tables of expert addresses for the layers that may have experts outside the device."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from coldstream.experts.host import HostExperts
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.contents import clear
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.experts.cuda_layer import Stacks, stacks_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertWeights, RouterWeights
from coldstream.kernels.quant_tensor import QuantTensor


class PartialTables:
    """Tables in `memory`, into which `ExpertResidency` writes the addresses of slots.

    `layers` has the tables of each layer that may miss an expert, with its router and weights beside. They
    are in the model's order without `whole_layers`, as `slot_shares` numbers them. The device reads experts
    over the bus only after `connect`; those of a pool, once `ExpertResidency` has written where they are.
    `host` is None over a `MemoryPlan`.
    """

    def __init__(self, memory: Memory, host: HostExperts | None, whole_layers: Collection[int]) -> None:
        self._memory, self._host = memory, host
        self._whole = tuple(f"blk.{layer}." for layer in whole_layers)
        self.layers: list[Stacks] = []
        self.routers: list[RouterWeights] = []
        self.experts: list[ExpertWeights] = []
        self.can_look_ahead = False  # whether a later router may read what an earlier one does
        self._numbers: dict[int, int] = {}  # by the identity of a layer's first table

    def map_stack(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """A table for a stack that stays in the mapped file; None for one of a whole layer."""
        if info.name.startswith(self._whole):
            return None
        num_experts, rows, cols = info.shape
        addresses = self._memory.persistent((num_experts,), "int64")
        if self._host is None:
            return ExpertTable(addresses, info.quant_type, rows, cols, is_partial=True)
        clear(addresses)
        weight, source = self._host.map_weight(file, info)
        return ExpertTable(
            addresses,
            info.quant_type,
            rows,
            cols,
            is_partial=True,
            host=weight,
            step=info.num_bytes // num_experts,
            source=source,
        )

    def number(self, layers: Iterable[tuple[RouterWeights, ExpertWeights]]) -> None:
        """Call once after loading, with the routers and experts of all layers in the model's order."""
        for router, weights in layers:
            if not weights.gate.is_partial:
                continue
            stacks = self._with_pool(stacks_of(weights))
            self._numbers[id(weights.gate)] = len(self.layers)
            self.layers.append(stacks)
            self.routers.append(router)
            self.experts.append(weights)
            if self._host is not None:
                self._host.add_layer(stacks, weights.activation, weights.biases)
        shapes = {each.gate.shape for each in self.routers if isinstance(each.gate, QuantTensor)}
        self.can_look_ahead = len(shapes) == 1

    def _with_pool(self, stacks: Stacks) -> Stacks:
        """The tables of a layer, with those of its experts in a pool, whose memory is taken for any host."""
        pooled = self._memory.persistent((MATRICES, len(stacks[0].addresses)), "int64")
        if self._host is None or self._host.pool is None:
            return stacks
        clear(pooled)
        gate, up, down = (replace(stack, pooled=each) for stack, each in zip(stacks, pooled, strict=True))
        return gate, up, down

    def connect(self) -> None:
        """Enters the addresses at which the device reads experts into `layers`. Waits until it can."""
        if self._host is not None:
            self.layers = [_readable(self._host, stacks) for stacks in self.layers]

    def number_of(self, weights: ExpertWeights) -> int:
        """The number of the layer with these experts. KeyError for a whole layer."""
        return self._numbers[id(weights.gate)]

    def reads(self, number: int) -> bool:
        """Whether the device can read experts of a layer over the bus: all, or those in a pool. Without a
        `host` it is assumed.
        """
        stacks = self.layers[number]
        return self._host is None or all(stack.mapped or stack.pooled is not None for stack in stacks)

    @property
    def is_readable(self) -> bool:
        """Whether the device can read all experts over the bus, wherever they are."""
        return self.is_mapped and all(map(self.reads, range(len(self.layers))))

    @property
    def is_mapped(self) -> bool:
        """Whether the CPU reads all experts where the file is mapped; assumed without a `host`."""
        return self._host is None or self._host.pool is None

    @property
    def reads_any(self) -> bool:
        """Whether there is a layer whose experts the device can read over the bus."""
        return any(map(self.reads, range(len(self.layers))))


def _readable(host: HostExperts, stacks: Stacks) -> Stacks:
    """The tables of a layer with the addresses at which the device reads its experts, if it can read all."""
    addresses = [host.device_address(stack.source, mapped_bytes(stack)) for stack in stacks]
    if not all(addresses):
        addresses = [0] * len(stacks)
    gate, up, down = (replace(stack, mapped=each) for stack, each in zip(stacks, addresses, strict=True))
    return gate, up, down


def mapped_bytes(stack: ExpertTable) -> int:
    """Bytes of a stack from `source` on to the end of its last expert."""
    return (len(stack.addresses) - 1) * stack.step + stack.matrix_bytes
