"""The experts of a prefill step. Missing ones are copied through a staging ring, or computed by the CPU.

A layer's missing experts go over the bus in groups, each into a buffer of the ring. A group is computed once
it has arrived. Its buffer is reused behind that.

When the router has run, the host knows how many tokens chose each expert. Experts of the most tokens go over
the bus, those of the fewest to the CPU, so that both end together. Where a step is faster without the CPU,
all go over the bus. While layer l ends and the mixer of l + 1 runs, the first groups of l + 1 are already
being copied: those that its router chooses for the input of l.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from coldstream.experts.copies import Copies, DirectCopies, FileCopies, Transfer
from coldstream.experts.cpu_share import likely_order
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.experts.staging import LayerShape, RingShape, StagingCopy, StagingRing, least_ring
from coldstream.experts.step_division import Division, StepDivision
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, unowned
from coldstream.kernels.cuda.runtime import allocations, copies, graphs, streams
from coldstream.kernels.cuda.skinny_shapes import MAX_GEMV_ROWS
from coldstream.kernels.experts.cuda_layer import stacks_of
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.place_group import place_group_cuda
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import MissTimes
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.experts.wait_answer import wait_answer_cuda
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing, RowsElsewhere

Array = np.ndarray[Any, Any]

MAX_SHORT_ROWS = 1024  # of a step whose launches cost more than what they compute


@dataclass(frozen=True)
class StagedGroup:
    """Experts in a buffer. By matrix: the address of the first expert, and the bytes of one expert."""

    experts: Sequence[int]
    first: tuple[int, ...]
    sizes: tuple[int, ...]


class StreamCounters:
    """Counts of experts without a slot in prefill steps, by layer: int64 [layers] each.

    wanted: chosen by any token of a step. streamed: copied over the bus. unused: streamed, and chosen by no
    token. on_cpu: computed by the CPU.
    """

    def __init__(self, num_layers: int) -> None:
        self.wanted = np.zeros(num_layers, np.int64)
        self.streamed = np.zeros(num_layers, np.int64)
        self.unused = np.zeros(num_layers, np.int64)
        self.on_cpu = np.zeros(num_layers, np.int64)


@dataclass(frozen=True)
class _BegunGroup:
    experts: Sequence[int]
    buffer: int
    transfer: Transfer


class _Moving:
    """A transfer that is not known to have ended, and the experts that it reads in a pool.

    behind: one that was not over when it was begun. is_alone: see `Division`.
    """

    def __init__(
        self,
        host: HostExperts,
        layer: int,
        held: Iterable[int],
        transfer: Transfer,
        behind: Transfer | None,
        *,
        is_alone: bool,
    ) -> None:
        self._host, self._layer, self._held = host, layer, tuple(held)
        self.is_alone = is_alone
        self.transfer, self._behind = transfer, behind

    @property
    def seconds(self) -> float:
        """For which it kept the bus from others; only once it is over. Where copies follow each other, pauses
        in between count: another program may have the bus then.
        """
        return self.transfer.seconds if self._behind is None else self.transfer.seconds_after(self._behind)

    def finish(self) -> None:
        """Returns when the transfer reads and writes no more, whether it failed or not."""
        self.transfer.finish()
        self._host.release(self._layer, self._held)
        self._held = ()


# Queues the work of groups. The slice is of the pairs sorted by expert, and contains all pairs of the groups.
Compute = Callable[[Sequence[StagedGroup], slice], None]


class ExpertStream:
    """Shares out the missing experts of a step between bus and CPU, layer by layer; one step at a time.

    ring: uint8 [bytes] on the device. `resident`, bool [layers, experts], says which experts are in slots and
    need no copy; the caller sets it before each step.
    """

    def __init__(self, host: HostExperts, ring: DeviceArray) -> None:
        self._host = host
        self._ring_memory = ring
        self._shape = RingShape.of(ring.numel())
        self._ring = StagingRing(self._shape.count)
        self._read: list[streams.Event | None] = [None] * self._shape.count
        self._copies: dict[bool, Copies] = {}  # by whether experts are locked where they are mapped
        self._locked: dict[int, bool] = {}  # of a step, by layer: whether it is, where it is mapped
        self._waiting: deque[_BegunGroup] = deque()  # begun and not computed, in the order of buffers
        self._moving: deque[_Moving] = deque()
        self._division = StepDivision(host.max_rows)
        self._layers: list[LayerShape] = []
        self._wanted: list[Array] = []  # by layer: tokens of the last prefill step, by expert
        self.resident = np.zeros((0, 0), bool)
        self.counters = StreamCounters(0)
        self._side = streams.Stream()
        self._ids_there, self._x_there, self._ids_back, self._guess_there = (
            streams.Event() for _ in range(4)
        )
        self._answered = allocations.page_locked((2,), "int32")  # `Mailbox.done` with an answer in time
        self._answered[0] = 1

    def add_layer(self, stacks: Sequence[ExpertTable]) -> None:
        """Adds the next layer. ValueError if one of its experts does not fit into a buffer."""
        shape = LayerShape(
            tuple(stack.source for stack in stacks),
            tuple(stack.step for stack in stacks),
            tuple(stack.matrix_bytes for stack in stacks),
        )
        if shape.capacity(self._shape.buffer_bytes) < 1:
            raise ValueError(
                f"a ring of {self._ring_memory.numel()} bytes is too small for experts of "
                f"{sum(shape.sizes)} bytes: at least {least_ring(sum(shape.sizes))}"
            )
        num_experts = len(stacks[0].addresses)
        self._layers.append(shape)
        self._wanted.append(np.zeros(num_experts, np.int64))
        self.resident = np.zeros((len(self._layers), num_experts), bool)
        self.counters = StreamCounters(len(self._layers))

    def set_times(self, times: MissTimes) -> None:
        """Begins anew with forecasts of what the CPU takes. No step may be running."""
        if self._layers:
            sizes = [sum(layer.sizes) for layer in self._layers]
            self._division.begin_with(times, sum(sizes) / len(sizes))

    def start_step(self, rows: int) -> None:
        """Call before a step of `rows` rows whose experts are shared out."""
        self._drop_groups()
        while not self._host.bulk_done[0]:
            time.sleep(0)  # the CPU still computes for a step that failed
        self._division.start(rows, time.perf_counter())
        self._locked.clear()
        if self._with_cpu:
            self._host.bulk_server.begin()

    def end_step(self) -> None:
        """Call when the device has finished the step.

        Raises ModelChangedError if an expert could not be read, GenerationFault if the CPU did not answer in
        time.
        """
        self.settle()  # experts that a pool kept in place for copies are free again
        self._division.end(time.perf_counter())
        self._host.bulk_server.end()
        self._host.bulk_server.check()
        self._host.bulk.check()

    def settle(self) -> None:
        """Waits for all copies into the ring, also of a failed step. Then the ring is free for others."""
        for moving in self._moving:
            moving.finish()
        self._side.synchronize()  # a failed step may have queued a copy of what the CPU was to compute

    def close(self) -> None:
        """Waits for all copies and ends their threads."""
        self.settle()
        for copies_of in self._copies.values():
            copies_of.close()
        self._copies.clear()

    def ask(self, x: DeviceArray, ids: DeviceArray) -> None:
        """Queues the copy of float32 rows x [T, E] and their expert ids, int32 [T, K], to the host."""
        tokens = len(ids)
        self._side.wait_stream(streams.current_stream())
        with streams.on_stream(self._side):
            copies.to_host(self._host.wanted_ids[:tokens], ids.data_ptr())
            self._ids_there.record(self._side)
            if self._with_cpu:
                copies.to_host(self._host.bulk.x[:tokens].numpy(), x.data_ptr())
            self._x_there.record(self._side)

    @property
    def form(self) -> tuple[bool, bytes]:
        """What the launches of the current step depend on, besides its shape."""
        kinds = self.resident.any(axis=1).astype(np.uint8) + self.resident.all(axis=1)
        return self._with_cpu, kinds.tobytes()

    @property
    def _with_cpu(self) -> bool:
        return self._division.with_cpu

    def guesses(self, layer: int, tokens: int) -> bool:
        """Whether a step of so many rows guesses at the experts of `layer`, to copy them ahead.

        A longer step wants all of them.
        """
        is_missing_some = layer < len(self._layers) and not self.resident[layer].all()
        return is_missing_some and tokens <= self._host.max_rows

    def share_out(
        self,
        layer: int,
        tokens: int,
        compute: Compute,
        places: DeviceArray,
        guess: DeviceArray | None,
    ) -> None:
        """Has the missing experts of a layer, for the ids given to `ask`, computed by the GPU and the CPU.

        `compute` queues the work of staged groups. places: see `answer`; it was there before `ask`. guess:
        int32 [T, K], experts that the next layer's router would choose; None: it is not known. Raises
        ModelChangedError, DeviceError.
        """
        if graphs.recording() is not None:
            self._division.note_recording()
        self._ids_there.synchronize()
        ids = self._host.wanted_ids[:tokens]
        num_experts = self.resident.shape[1]
        counts = np.bincount(ids.reshape(-1), minlength=num_experts)
        self._wanted[layer] = counts
        missing = ~self.resident[layer]
        self.counters.wanted[layer] += int(np.count_nonzero(missing & (counts > 0)))
        coming = [expert for group in self._waiting for expert in group.experts]
        expert_bytes = sum(self._layers[layer].sizes)
        bytes_coming = self._bytes_coming() if self._with_cpu else 0
        shared = self._division.divide(counts, missing, coming, expert_bytes, bytes_coming)
        on_cpu = shared.on_cpu
        self.counters.on_cpu[layer] += len(on_cpu)
        if self._with_cpu:
            self._host.choose_bulk(ids, on_cpu, num_experts)
        if on_cpu:
            worked = self._host.bulk_seconds
            self._x_there.synchronize()
            self._host.ask_bulk(layer, tokens)
            self._division.asked(counts[on_cpu], expert_bytes, worked)
        last = self._x_there
        if self._with_cpu:
            self._send_places(places, tokens)
            last = self._ids_back
        if guess is not None:
            self._bring_guess(guess)
            last = self._guess_there
        self._learn_bus()
        self._division.lookahead.learn(len(self._moving), self._shape.count)
        self._stream(layer, shared, counts, tokens <= MAX_SHORT_ROWS, compute)
        self._begin_ahead(layer + 1, None if guess is None else tokens)
        streams.current_stream().wait_event(last)

    def _bring_guess(self, guess: DeviceArray) -> None:
        """Queues the copy of a guess to the host."""
        self._side.wait_stream(streams.current_stream())
        with streams.on_stream(self._side):
            copies.to_host(self._host.guessed_ids[: len(guess)], guess.data_ptr())
            self._guess_there.record(self._side)

    def _send_places(self, places: DeviceArray, tokens: int) -> None:
        """Queues the copy of the CPU's pairs to the device, where many blocks read them.

        They would read the host's memory beside copies that take the whole bus.
        """
        with streams.on_stream(self._side):
            copies.to_device(places.data_ptr(), self._host.bulk.ids[:tokens].numpy())
            copies.to_device(places[tokens:].data_ptr(), self._answered)
            self._ids_back.record(self._side)

    def answer(self, places: DeviceArray) -> RowsElsewhere | None:
        """Where work queued next finds the CPU's rows, after a wait for them; None: it has no part.

        places: int32 [T + 2, K] on the device, for the ids of the CPU's pairs. Others are negative.
        """
        if not self._with_cpu:
            return None
        tokens = len(places) - 2
        wait_answer_cuda(self._host.bulk.done)
        return RowsElsewhere(places[:tokens], self._host.bulk.out[:tokens], places[tokens:].reshape(-1)[:2])

    def _bytes_coming(self) -> int:
        """That the bus has begun and not ended."""
        coming = 0
        for each in reversed(self._moving):  # those before one that is over are over
            if each.transfer.is_over:
                break
            coming += each.transfer.num_bytes
        return coming

    def _learn_bus(self) -> None:
        """Updates the measured rate of the bus by copies that are over."""
        while self._moving and self._moving[0].transfer.is_over:
            ended = self._moving.popleft()
            ended.finish()
            self._division.copied(ended.transfer.num_bytes, ended.seconds, is_alone=ended.is_alone)

    def _stream(self, layer: int, shared: Division, counts: Array, is_short: bool, compute: Compute) -> None:
        """Has groups copied and computed, first those that `_begin_ahead` began.

        is_short: whether the step is short. Its last groups share one launch.
        """
        groups = deque(self._groups_of(layer, shared.streamed))
        ends = np.cumsum(counts)
        while groups or self._waiting:
            can_begin = groups and self._ring.num_free
            if can_begin:
                self._begin(layer, groups.popleft(), is_alone=shared.is_alone)
            num_arrived = len(self._waiting) if is_short and not groups else self._num_arrived()
            if self._waiting and (num_arrived or not can_begin):
                arrived = [self._waiting.popleft() for _ in range(max(1, num_arrived))]
                self._compute(layer, arrived, counts, ends, compute)

    def _num_arrived(self) -> int:
        """How many groups at the front of `_waiting` have arrived."""
        return next(
            (i for i, group in enumerate(self._waiting) if not group.transfer.is_over), len(self._waiting)
        )

    def _begin(self, layer: int, experts: Sequence[int], *, is_alone: bool = False) -> None:
        """Queues the copy of a group into the next buffer, behind the last reader of that buffer."""
        buffer = self._ring.take()
        last = self._moving[-1].transfer if self._moving else None
        behind = None if last is None or last.is_over else last
        held = self._host.hold(layer, experts)
        try:
            copies = self._layers[layer].copies(experts, held)
            transfer = self._copies_for(layer, copies).begin(
                copies, self._address(buffer), self._read[buffer]
            )
        except BaseException:
            self._host.release(layer, held)
            raise
        self._waiting.append(_BegunGroup(experts, buffer, transfer))
        self._moving.append(_Moving(self._host, layer, held, transfer, behind, is_alone=is_alone))

    def _copies_for(self, layer: int, copies: Sequence[StagingCopy]) -> Copies:
        """What makes these copies of a layer's experts: the copy engine alone, if the layer is locked where
        it is mapped, or if all of them are held in a locked pool; or threads, through page-locked buffers.
        """
        if (pool := self._host.pool) is not None:
            is_locked = pool.is_registered and all(copy.is_held for copy in copies)
        else:
            is_locked = self._is_locked(layer)
        if is_locked not in self._copies:
            by_file = partial(FileCopies, self._host, self._shape.buffer_bytes)
            self._copies[is_locked] = DirectCopies() if is_locked else by_file()
        return self._copies[is_locked]

    def _is_locked(self, layer: int) -> bool:
        """Whether a layer is locked where it is mapped; asked once a step."""
        if layer not in self._locked:
            ranges = self._layers[layer].ranges(self.resident.shape[1])
            self._locked[layer] = all(self._host.is_locked_at(*each) for each in ranges)
        return self._locked[layer]

    def _compute(
        self, layer: int, groups: Sequence[_BegunGroup], counts: Array, ends: Array, compute: Compute
    ) -> None:
        """Queues the work of groups, and frees their buffers behind it."""
        shape = self._layers[layer]
        used = sorted(expert for group in groups for expert in group.experts if counts[expert])
        for group in groups:
            group.transfer.wait()  # each, not only the last: another's error would go unseen
        num_streamed = sum(len(group.experts) for group in groups)
        self.counters.streamed[layer] += num_streamed
        self.counters.unused[layer] += num_streamed - len(used)
        if used:
            places = slice(int(ends[used[0]] - counts[used[0]]), int(ends[used[-1]]))
            compute([self._staged(shape, group) for group in groups], places)
        read = streams.Event()
        read.record(streams.current_stream())
        for group in groups:
            self._read[group.buffer] = read
            self._ring.give_back(group.buffer)

    def _staged(self, shape: LayerShape, group: _BegunGroup) -> StagedGroup:
        begin = self._address(group.buffer)
        first = tuple(begin + offset for offset in shape.offsets(len(group.experts)))
        return StagedGroup(group.experts, first, shape.sizes)

    def _begin_ahead(self, layer: int, guessed: int | None) -> None:
        """Begins copies for a layer whose router has not run: the experts of most tokens in so many rows of
        the guess, or without one in the last step.
        """
        if layer >= len(self._layers):
            return
        most = self._layers[layer].capacity(self._shape.buffer_bytes)
        most *= min(self._division.lookahead.count, self._ring.num_free)
        counts = self._wanted[layer]
        if guessed is not None:
            self._guess_there.synchronize()
            ids = self._host.guessed_ids[:guessed].reshape(-1)
            counts = np.bincount(ids, minlength=len(counts))
        experts = likely_order(counts, ~self.resident[layer], self._with_cpu)[:most]
        for group in self._groups_of(layer, experts):
            self._begin(layer, group)

    def _groups_of(self, layer: int, experts: Sequence[int]) -> Iterator[list[int]]:
        """The experts in file order, in groups of as many as a buffer holds."""
        size, ascending = self._layers[layer].capacity(self._shape.buffer_bytes), sorted(experts)
        return (ascending[begin : begin + size] for begin in range(0, len(ascending), size))

    def _drop_groups(self) -> None:
        """Drops groups that a failed step left; all other work of the device has ended."""
        self.settle()
        self._moving.clear()
        self._waiting.clear()
        self._ring = StagingRing(self._shape.count)

    def _address(self, buffer: int) -> int:
        return self._ring_memory.data_ptr() + buffer * self._shape.buffer_bytes


class PrefillExperts:
    """Prefill steps, of any number of rows. `stream` is None over a `MemoryPlan`, without a `host`."""

    def __init__(
        self, kernels: MoeKernels, tables: PartialTables, host: HostExperts | None, ring: DeviceArray
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
        tokens, ranks = routing.ids.shape
        if stream is not None:
            resident = stream.resident[layer]
            if resident.all():
                routed, shared = self._kernels.outputs(x, routing.ids, weights)
                return ExpertOutputs(routed, shared, routing, bias=weights.down_bias)
        places = self._device.empty(tokens + 2, ranks, dtype="int32")
        if stream is not None:
            graphs.between(partial(stream.ask, unowned(x.values), unowned(routing.ids)))
        guess = self._guess(x, layer + 1)
        shared = self._kernels.shared(x, weights)
        num_experts = len(weights.gate.addresses)
        tables = tuple(self._device.empty(num_experts, dtype="int64") for _ in range(MATRICES))
        pairs = self._kernels.pairs(x, routing.ids, weights)
        if resident is None or resident.any():
            self._kernels.compute(pairs, weights, pairs.places)
        gate, up, down = (
            replace(stack, addresses=table) for stack, table in zip(stacks_of(weights), tables, strict=True)
        )
        products = partial(self._kernels.compute, pairs, replace(weights, gate=gate, up=up, down=down))
        if stream is None:
            nothing = StagedGroup((0,), (0,) * MATRICES, (0,) * MATRICES)
            self._compute_groups(tables, products, [nothing], pairs.places)
            return ExpertOutputs(pairs.routed, shared, routing, bias=weights.down_bias)
        known = None if guess is None else unowned(guess)  # whose memory is kept until it is copied
        share = partial(self._share_out, stream, layer, unowned(places), known, tuple(map(unowned, tables)))
        if (recording := graphs.recording()) is not None:
            # All places each time: a graph has no other ones for each group.
            again = partial(products, pairs.places)
            recording.pause_with(again, lambda graph: share(lambda _: graph.launch()))
        else:
            share(products)
        return ExpertOutputs(pairs.routed, shared, routing, stream.answer(places), bias=weights.down_bias)

    def _guess(self, x: Activations, layer: int) -> DeviceArray | None:
        """The experts that the router of `layer` chooses for an earlier layer's input, int32 [T, K]; None:
        there is nothing to copy ahead.
        """
        tokens = x.shape[0]
        exists = layer < len(self._tables.layers) and tokens > MAX_GEMV_ROWS
        if not exists or (self.stream is not None and not self.stream.guesses(layer, tokens)):
            return None
        router = replace(self._tables.routers[layer], shared_gate=None)
        ids: DeviceArray = self._kernels.route(x, router).ids
        return ids

    def _share_out(
        self,
        stream: ExpertStream,
        layer: int,
        places: DeviceArray,
        guess: DeviceArray | None,
        tables: Sequence[DeviceArray],
        products: Callable[[slice], None],
    ) -> None:
        """tables: int64 [experts], by matrix, for the addresses of staged experts. `products` multiplies by
        those that have one."""
        compute = partial(self._compute_groups, tables, products)
        stream.share_out(layer, len(places) - 2, compute, places, guess)

    def _compute_groups(
        self,
        tables: Sequence[DeviceArray],
        products: Callable[[slice], None],
        groups: Sequence[StagedGroup],
        places: slice,
    ) -> None:
        for i, group in enumerate(groups):
            self._device.launch(self._place, group, tables, i == 0)
        products(places)

    @staticmethod
    def _place(group: StagedGroup, tables: Sequence[DeviceArray], clears: bool) -> None:
        place_group_cuda(group.experts, group.first, group.sizes, tables, clears=clears)
