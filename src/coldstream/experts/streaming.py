"""The experts of a long prompt: through a ring in the device's memory, some computed by the CPU meanwhile.

A layer's experts go over the bus in groups. Each group is computed when it has landed; its landing is written
again when that has been read. Which tokens want which experts is known on the host as soon as the router
has run. Then the most wanted go over the bus and the least wanted to the CPU, until the two meet. While layer
l is finished and the mixer of l + 1 runs, the first groups of l + 1 are on their way already.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coldstream.experts.copies import Copies, DirectCopies, StagedCopies, Transfer
from coldstream.experts.host import HostExperts
from coldstream.experts.landing import (
    CpuShare,
    LayerShape,
    Lookahead,
    Ring,
    RingShape,
    bus_order,
    least_ring,
    likely_order,
)
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.experts.wait_answer import wait_answer_cuda
from coldstream.kernels.ops import RowsElsewhere

Array = np.ndarray[Any, Any]

FEW_ROWS = 1024


@dataclass(frozen=True)
class LandedGroup:
    """Experts in the device's memory. By matrix: the address of the first expert's and the bytes of each."""

    experts: Sequence[int]
    first: tuple[int, ...]
    sizes: tuple[int, ...]


class StreamCounters:
    """What happened to the missing experts of long prompts, by layer: int64 [layers] each.

    wanted: by any token of a step; streamed: brought over the bus; unused: of these, wanted by no token;
    on_cpu: computed by the CPU.
    """

    def __init__(self, num_layers: int) -> None:
        self.wanted = np.zeros(num_layers, np.int64)
        self.streamed = np.zeros(num_layers, np.int64)
        self.unused = np.zeros(num_layers, np.int64)
        self.on_cpu = np.zeros(num_layers, np.int64)


@dataclass(frozen=True)
class _Group:
    experts: Sequence[int]
    landing: int
    transfer: Transfer


# Queues the work of groups. All their pairs are among some of the places of the pairs grouped by expert.
Compute = Callable[[Sequence[LandedGroup], slice], None]


class ExpertStream:
    """Shares out the layers of a step; one step at a time.

    ring: uint8 [bytes] on the device. `resident`, bool [layers, experts], says which experts are in slots,
    and are not brought; who changes slots keeps it up to date.
    """

    def __init__(self, host: HostExperts, ring: torch.Tensor) -> None:
        self._host = host
        self._ring_memory = ring
        self._shape = RingShape.of(ring.numel())
        self._ring = Ring(self._shape.count)
        self._read: list[torch.cuda.Event | None] = [None] * self._shape.count
        self._copies: Copies | None = None
        self._waiting: deque[_Group] = deque()  # begun and not read, in the order of their landings
        self._moving: deque[Transfer] = deque()  # that may not have landed
        self._lookahead, self._cpu_share = Lookahead(), CpuShare()
        self._layers: list[LayerShape] = []
        self._wanted: list[Array] = []  # tokens by expert of the last step of many rows, by layer
        self.resident = np.zeros((0, 0), bool)
        self.counters = StreamCounters(0)
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ids_there, self._x_there = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        # What the CPU got last: rows of the step, experts, and how long it had worked before.
        self._asked: tuple[int, int, float] | None = None

    def add_layer(self, stacks: Sequence[ExpertTable]) -> None:
        """The experts of the next layer. ValueError if not one of them fits into a landing."""
        shape = LayerShape(
            tuple(stack.host.address for stack in stacks),
            tuple(stack.step for stack in stacks),
            tuple(stack.matrix_bytes for stack in stacks),
        )
        if shape.capacity(self._shape.landing_bytes) < 1:
            raise ValueError(
                f"a ring of {self._ring_memory.numel()} bytes is too small for experts of "
                f"{sum(shape.sizes)} bytes: at least {least_ring(sum(shape.sizes))}"
            )
        num_experts = len(stacks[0].addresses)
        self._layers.append(shape)
        self._wanted.append(np.zeros(num_experts, np.int64))
        self.resident = np.zeros((len(self._layers), num_experts), bool)
        self.counters = StreamCounters(len(self._layers))

    def start_step(self, rows: int) -> None:
        """Before a step of `rows` rows whose experts are shared out."""
        self._drop_groups()
        while not self._host.bulk_done[0]:
            time.sleep(0)  # the CPU is in the middle of a step that failed
        if rows <= self._host.max_rows:
            self._host.bulk_server.begin()

    def end_step(self) -> None:
        """The device has done everything. Raises ModelChangedError if an expert could not be read.

        And GenerationFault if the CPU did not answer in time.
        """
        self._host.bulk_server.end()
        self._host.bulk_server.check()
        self._host.bulk.check()

    def settle(self) -> None:
        """Returns when nothing writes to the ring any more, also of a step that failed; others may use it."""
        for transfer in self._moving:
            transfer.finish()

    def close(self) -> None:
        """Nothing is copied any more."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def ask(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Sends float32 rows x [T, E] and the experts int32 ids [T, K] that they want to the host."""
        tokens = len(ids)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._host.wanted_ids[:tokens].copy_(ids, non_blocking=True)
            self._ids_there.record(self._side)
            if tokens <= self._host.max_rows:
                self._host.bulk.x[:tokens].copy_(x, non_blocking=True)
            self._x_there.record(self._side)

    def share_out(self, layer: int, tokens: int, compute: Compute) -> RowsElsewhere | None:
        """Has the missing experts of a layer computed that `ask` sent; `compute` queues a landed group.

        Returns where the CPU's rows will be for what is queued next on the current stream. Raises
        ModelChangedError, DeviceError.
        """
        self._ids_there.synchronize()
        ids = self._host.wanted_ids[:tokens].numpy()
        num_experts = self.resident.shape[1]
        counts = np.bincount(ids.reshape(-1), minlength=num_experts)
        self._wanted[layer] = counts
        self._learn()
        self._lookahead.learn(len(self._moving), self._shape.count)
        missing = ~self.resident[layer]
        self.counters.wanted[layer] += np.count_nonzero(missing & (counts > 0))
        for group in self._waiting:
            missing[group.experts] = False
        with_cpu = tokens <= self._host.max_rows
        order = bus_order(counts, missing, with_cpu)
        num_on_cpu = self._num_on_cpu(layer, tokens, len(order)) if with_cpu else 0
        streamed, on_cpu = order[: len(order) - num_on_cpu], order[len(order) - num_on_cpu :]
        self.counters.on_cpu[layer] += num_on_cpu
        if on_cpu:
            self._x_there.synchronize()
            self._asked = tokens, num_on_cpu, self._host.bulk_seconds
            self._host.ask_bulk(layer, ids, on_cpu)
        self._stream(layer, streamed, counts, tokens <= FEW_ROWS, compute)
        self._begin_ahead(layer + 1, with_cpu)
        torch.cuda.current_stream().wait_event(self._x_there)
        if not on_cpu:
            return None
        box = self._host.bulk
        wait_answer_cuda(box)
        return RowsElsewhere(box.ids[:tokens], box.out[:tokens], box.done)

    def _num_on_cpu(self, layer: int, tokens: int, num_experts: int) -> int:
        moving = sum(transfer.num_bytes for transfer in self._moving)
        return self._cpu_share.split(tokens, num_experts, sum(self._layers[layer].sizes), moving)

    def _learn(self) -> None:
        """How fast the last copies and the CPU's last part were."""
        while self._moving and self._moving[0].is_over:
            landed = self._moving.popleft()
            self._cpu_share.learn_bus(landed.num_bytes, landed.seconds)
        if self._asked is not None:
            tokens, num_experts, before = self._asked
            self._asked = None
            self._cpu_share.learn_cpu(tokens, num_experts, self._host.bulk_seconds - before)

    def _stream(
        self, layer: int, experts: Sequence[int], counts: Array, few_rows: bool, compute: Compute
    ) -> None:
        """Has groups copied and computed, those first that were begun before.

        Few rows are computed sooner than launched: what has not landed when all is begun is one launch.
        """
        groups = deque(self._groups_of(layer, experts))
        ends = np.cumsum(counts)
        while groups or self._waiting:
            can_begin = groups and self._ring.num_free
            if can_begin:
                self._begin(layer, groups.popleft())
            num_landed = len(self._waiting) if few_rows and not groups else self._num_landed()
            if self._waiting and (num_landed or not can_begin):
                landed = [self._waiting.popleft() for _ in range(max(1, num_landed))]
                self._compute(layer, landed, counts, ends, compute)

    def _num_landed(self) -> int:
        """How many of the groups that wait have landed, as far as they did in their order."""
        return next(
            (i for i, group in enumerate(self._waiting) if not group.transfer.is_over), len(self._waiting)
        )

    def _begin(self, layer: int, experts: Sequence[int]) -> None:
        """Copies a group to the next landing, once that has been read."""
        if self._copies is None:
            readable = self._host.is_readable
            self._copies = DirectCopies() if readable else StagedCopies(self._host, self._shape.landing_bytes)
        landing = self._ring.take()
        copies = list(self._layers[layer].copies(experts))
        transfer = self._copies.begin(copies, self._address(landing), self._read[landing])
        self._waiting.append(_Group(experts, landing, transfer))
        self._moving.append(transfer)

    def _compute(
        self, layer: int, groups: Sequence[_Group], counts: Array, ends: Array, compute: Compute
    ) -> None:
        """Has groups read; their landings are free behind that."""
        shape = self._layers[layer]
        used = sorted(expert for group in groups for expert in group.experts if counts[expert])
        for group in groups:
            group.transfer.wait()  # the last is behind all others, but does not tell of their errors
        num_streamed = sum(len(group.experts) for group in groups)
        self.counters.streamed[layer] += num_streamed
        self.counters.unused[layer] += num_streamed - len(used)
        if used:
            places = slice(int(ends[used[0]] - counts[used[0]]), int(ends[used[-1]]))
            compute([self._landed(shape, group) for group in groups], places)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream())
        for group in groups:
            self._read[group.landing] = read
            self._ring.give_back(group.landing)

    def _landed(self, shape: LayerShape, group: _Group) -> LandedGroup:
        begin = self._address(group.landing)
        first = tuple(begin + offset for offset in shape.offsets(len(group.experts)))
        return LandedGroup(group.experts, first, shape.sizes)

    def _begin_ahead(self, layer: int, with_cpu: bool) -> None:
        """Starts the copies of a layer that nobody has asked for yet: what the last step wanted most."""
        if layer >= len(self._layers):
            return
        most = self._layers[layer].capacity(self._shape.landing_bytes)
        most *= min(self._lookahead.count, self._ring.num_free)
        experts = likely_order(self._wanted[layer], ~self.resident[layer], with_cpu)[:most]
        for group in self._groups_of(layer, experts):
            self._begin(layer, group)

    def _groups_of(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        """Experts near each other in the file together, as many as a landing holds."""
        size, ascending = self._layers[layer].capacity(self._shape.landing_bytes), sorted(experts)
        return (ascending[begin : begin + size] for begin in range(0, len(ascending), size))

    def _drop_groups(self) -> None:
        """Of a step that failed; the device has done everything else."""
        self.settle()
        self._asked = None
        self._moving.clear()
        self._waiting.clear()
        self._ring = Ring(self._shape.count)

    def _address(self, landing: int) -> int:
        return self._ring_memory.data_ptr() + landing * self._shape.landing_bytes
