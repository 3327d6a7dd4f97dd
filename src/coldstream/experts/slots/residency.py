"""The experts in a GPU's memory: slots, the copies into them, and the tables of addresses for kernels."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.experts.ram_pool import RamPool, Room
from coldstream.experts.slots.cache import Copy, ExpertCache, StepStart
from coldstream.experts.slots.pool_reads import PoolReads, TableChanges
from coldstream.experts.slots.segments import SlotSegments
from coldstream.kernels.cuda.host_memory import all_from_host, from_host, to_host
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.experts.addresses import AddressWriter
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable
from coldstream.placement.sizes import slot_bytes

Array = np.ndarray[Any, Any]
Part = tuple[int, int, int]  # of a copy: target, source, bytes
NOTHING = np.empty(0, np.int64)
MOST_TOGETHER = 64  # experts of one call of the driver: about as many as a long prompt's are copied at once


def expert_bytes(stacks: Sequence[ExpertTable]) -> int:
    """Bytes of a slot for an expert of the layer."""
    return sum(slot_bytes(stack.matrix_bytes) for stack in stacks)


@dataclass(frozen=True)
class _QueuedCopies:
    """Copies with one event behind all. begun: also copies of which only a part could be queued.

    back: places of experts that go back to the pool, and whether all copies to a place could be queued.
    """

    queued: tuple[Copy, ...]
    begun: tuple[Copy, ...]
    back: tuple[tuple[Room, bool], ...]
    event: streams.Event


class ExpertResidency:
    """Carries out the decisions of an `ExpertCache`, on the current stream and a copy stream.

    layers: tables of gate, up and down of each layer, all entries 0. slots: as many as the cache has. pool:
    holds the experts that can be copied, and keeps them in place meanwhile, as it does those that the device
    reads there. Experts that leave their slots go back to it, if it has room for them. None: all can be
    copied, from the mapped file.

        residency.start_step()      # the tables are those of this step; launch it
        residency.ended(ids)        # of a step before, in order
        residency.prepare()         # while a step runs: decide, begin copies, write the next step's tables
    """

    def __init__(
        self,
        layers: Sequence[Sequence[ExpertTable]],
        cache: ExpertCache,
        slots: SlotSegments,
        pool: RamPool | None = None,
    ) -> None:
        self.cache = cache
        self._pool = pool
        self.num_layers, self.num_experts = len(layers), len(layers[0][0].addresses)
        self._slots = slots
        self._addresses = _ExpertAddresses(layers, slots)
        self._is_mapped = all(stack.mapped for stacks in layers for stack in stacks)  # and locked
        self._stream = streams.Stream()
        self._in_flight: deque[_QueuedCopies] = deque()
        self._events: list[streams.Event] = []  # that have been reached, to be recorded again
        num_all = self.num_layers * self.num_experts
        self._first = np.arange(0, num_all, self.num_experts)[:, None, None]  # expert of each layer
        self._reads: PoolReads | None = None
        if pool is not None:
            self._reads = PoolReads(pool, self.num_layers, self.num_experts, MATRICES)
        # Where a step starts, a slot's expert arrives or is withdrawn. Its successor is copied later.
        self._writer = AddressWriter(MATRICES * (self.num_slots + (num_all if pool else 0)))
        self.resident = np.zeros((len(layers), len(layers[0][0].addresses)), bool)  # for the next step
        self._failure: DeviceError | None = None  # of a copy, not yet raised
        self._begin_step()
        self._running: deque[int] = deque()  # steps that have begun, for which `ended` was not called
        self._ended: deque[tuple[int, Array | None]] = deque()  # steps to finish, and what they used

    @property
    def num_slots(self) -> int:
        """Slots of all sizes."""
        return sum(self._slots.num_slots.values())

    def load(self, experts: Iterable[int]) -> None:
        """Copies experts, by ascending number, into slots, and waits for the copies.

        A pool must be empty, and is empty again. Raises DeviceError, ModelChangedError.
        """
        for portion in [list(experts)] if self._pool is None else self._pool.brought(experts):
            self._begin(self.cache.load(portion))
            self._stream.synchronize()
            self._note_copied()
        # The step that was prepared is ended unused, so that the next one has these experts in its tables.
        self._finish(self._next_step, NOTHING, trains=False)
        self._begin_step()
        self._raise_failure()

    def start_step(self) -> None:
        """Call right before a step is launched, also for one that is launched again."""
        if not self._running or self._running[-1] != self._next_step:
            self._running.append(self._next_step)

    def ended(self, ids: Array | None) -> None:
        """Call when the next step in order has ended.

        ids: int32 [layers, rows, K], the experts that it used. None if the policy does not learn from it.
        """
        self._ended.append((self._running.popleft(), ids))

    def prepare(self) -> None:
        """Call once after each launch: does what takes time while the step runs.

        Finishes steps that have ended, and prepares the next one. Its tables are written behind the running
        step. Copies into slots that the running step may read wait for its end. Raises DeviceError for a copy
        that failed twice, also one that `shrink` began. All the work is done then, and further steps may
        follow.
        """
        try:
            self._finish_ended()
        finally:  # also after an error of the policy each launch has a step of its own
            self._begin_step()
        self._raise_failure()

    def shrink(self) -> int:
        """Frees the memory of some slots, whose experts are then missing. Returns its bytes, or 0.

        The device must be idle, and `ended` called for all steps but one. That one has begun, `prepare` was
        not called after it, and it may go on or be repeated.
        """
        size = self._slots.largest
        if size is None:
            return 0
        self._stream.synchronize()
        self.cache.resize(size, self._slots.without_last(size))
        self._finish_ended()
        # The next launch, of the same step or another one, has new tables, so to the cache it is a new step.
        self._finish(self._next_step, NOTHING, trains=False)
        self._begin_step()
        if self._running:
            self._running[-1] = self._next_step
        self._stream.synchronize()  # experts of these slots may be on their way back to the pool
        assert self.cache.reclaimed(size), "slots are neither read nor written between two steps"
        return self._slots.drop_last(size)

    @property
    def missing_bytes(self) -> int:
        """Bytes that `grow` would allocate; 0 if all slots are there."""
        return self._slots.dropped_bytes

    def grow(self) -> None:
        """Allocates the slots again that `shrink` freed last; some must be missing.

        A step may be running, as the new slots are empty. Raises OutOfMemoryError with nothing changed.
        """
        size = self._slots.restore_last()
        self._addresses.find_slots(size, self._slots)
        self.cache.resize(size, self._slots.num_slots[size])

    def _finish_ended(self) -> None:
        """Has the cache finish the steps that have ended."""
        while self._ended:
            step, ids = self._ended.popleft()
            used = NOTHING if ids is None else self._experts_of(ids)
            self._finish(step, used, trains=ids is not None)

    def _finish(self, step: int, used: Array, *, trains: bool) -> None:
        if self._reads is not None:
            self._reads.finish_step(step)
        self.cache.finish_step(step, used, trains=trains)

    def _begin_step(self) -> None:
        """Starts the next step of the cache, with its copies and table entries."""
        self._note_copied()
        start = self.cache.start_step()
        self._next_step = start.step  # whatever fails behind it: the cache has started this step
        self.resident.reshape(-1)[start.withdrawn] = False
        self.resident.reshape(-1)[start.arrived] = True
        has_copies = bool(start.copies) or start.withdrawn.size > 0
        if has_copies:
            self._stream.wait_stream(streams.current_stream())
        self._write_tables(start)
        if has_copies:
            try:
                self._send_back(start)  # before other experts are copied into their slots
            except BaseException:
                for copy in start.copies:
                    self.cache.drop(copy)
                raise
            self._begin(start.copies)

    def _write_tables(self, start: StepStart) -> None:
        """Queues the entries that change for the next step, in the tables of slots and in those of a pool."""
        where, values = self._addresses.entries(start.arrived, start.slots, start.withdrawn)
        if self._pool is not None and self._reads is not None:
            self._pool.order(self.cache.scores, self.resident.reshape(-1))
            changes = self._reads.changes(self._pool.lasting)
            in_pool = self._addresses.pool_entries(changes, self._pool.device_offset)
            where, values = np.concatenate([where, in_pool[0]]), np.concatenate([values, in_pool[1]])
        if where.size:
            self._writer.write(where, values)
        if self._reads is not None:
            self._reads.written(start.step, changes)

    def _send_back(self, start: StepStart) -> None:
        """Queues copies of the experts that leave their slots to places in the pool."""
        if self._pool is None:
            return
        rooms: dict[Room, bool] = {}  # and whether all of its copies are queued
        try:
            sources = self._addresses.in_slots(start.withdrawn, start.left)
            for expert, of_expert in zip(start.withdrawn.tolist(), sources, strict=True):
                room = self._pool.room_for(*divmod(expert, self.num_experts))
                if room is not None:
                    rooms[room] = False
                    rooms[room] = self._queue_back(room, expert, of_expert)
        finally:
            if rooms:
                self._in_flight.append(_QueuedCopies((), (), tuple(rooms.items()), self._event()))

    def _queue_back(self, room: Room, expert: int, sources: Sequence[int]) -> bool:
        """Whether all copies could be queued. An expert of which some could not stays on the disk."""
        sizes = self._addresses.sizes(expert)
        return all(
            to_host(target, source, size, self._stream) == driver.CUresult.CUDA_SUCCESS
            for target, source, size in zip(room.addresses, sources, sizes, strict=True)
        )

    def _note_copied(self) -> None:
        """Takes note of copies that have ended."""
        while self._in_flight and self._in_flight[0].event.query():
            copies = self._in_flight.popleft()
            self._events.append(copies.event)
            self.cache.copied(copies.queued)
            self._release(copies)

    def _release(self, copies: _QueuedCopies) -> None:
        """Lets the pool overwrite experts that are no longer read, and use those that are there again."""
        if self._pool is not None:
            for copy in copies.begun:
                self._pool.release(*divmod(copy.expert, self.num_experts))
            for room, is_whole in copies.back:
                self._pool.take_back(room, is_whole=is_whole)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits for copies in flight, so that the slots may be freed. No step may be running."""
        self._stream.synchronize()
        while self._in_flight:
            self._release(self._in_flight.popleft())
        if self._reads is not None:
            self._reads.close()

    def _experts_of(self, ids: Array) -> Array:
        """The distinct numbers, in the cache's sense, of expert ids [layers, rows, K]."""
        seen = np.zeros(self.resident.shape, bool)
        seen.reshape(-1)[(ids + self._first).reshape(-1)] = True
        return seen.reshape(-1).nonzero()[0]

    def _begin(self, copies: tuple[Copy, ...]) -> None:
        """Queues copies with one event behind all. Keeps the error of a copy that failed twice."""
        experts = np.array([copy.expert for copy in copies], np.int64)
        slots = np.array([copy.slot for copy in copies], np.int64)
        targets = self._addresses.in_slots(experts, slots)
        begun, parts = [], []
        for copy, sources, places in zip(copies, self._sources_of(experts), targets, strict=True):
            if sources is None:
                self.cache.drop(copy)  # it has left the pool since it was used
                continue
            begun.append(copy)
            parts.append([*zip(places, sources, self._addresses.sizes(copy.expert), strict=True)])
        queued = []
        for first in range(0, len(begun), MOST_TOGETHER):
            group = slice(first, first + MOST_TOGETHER)
            if self._are_queued(parts[group]):
                queued += begun[group]
                continue
            alone = zip(begun[group], parts[group], strict=True)
            queued += [copy for copy, of_copy in alone if self._is_queued(copy, of_copy)]
        self._in_flight.append(_QueuedCopies(tuple(queued), tuple(begun), (), self._event()))

    def _event(self) -> streams.Event:
        """Behind what is queued so far; one that was made before, if there is one."""
        event = self._events.pop() if self._events else streams.Event()
        event.record(self._stream)
        return event

    def _sources_of(self, experts: Array) -> Sequence[Sequence[int] | None]:
        """Where the matrices of experts are read; None for those on the disk."""
        if self._pool is None:
            return self._addresses.mapped(experts)
        return [self._pool.hold(*divmod(expert, self.num_experts)) for expert in experts.tolist()]

    def _are_queued(self, parts: Sequence[Sequence[Part]]) -> bool:
        """Whether all copies could be queued with one call of the driver, which takes locked memory alone."""
        is_locked = self._is_mapped if self._pool is None else self._pool.is_registered
        if not is_locked:
            return False
        status = all_from_host(chain(*parts), self._stream)
        return bool(status == driver.CUresult.CUDA_SUCCESS)

    def _is_queued(self, copy: Copy, parts: Sequence[Part]) -> bool:
        """Whether one copy could be queued. The second refusal of an expert is kept as an error."""
        for part in parts:
            status = from_host(*part, self._stream)
            if status != driver.CUresult.CUDA_SUCCESS:
                if not self.cache.failed(copy):
                    words = f"an expert cannot be copied to the GPU: {_described(status)}"
                    self._failure = DeviceError(words)
                return False
        return True


def _described(status: driver.CUresult) -> str:
    return str(driver.cuGetErrorString(status)[1].decode())


class _ExpertAddresses:
    """Addresses by layer and matrix: of table entries, of experts in the mapped file, and of slots."""

    def __init__(self, layers: Sequence[Sequence[ExpertTable]], slots: SlotSegments) -> None:
        self._num_experts = len(layers[0][0].addresses)
        sizes = [[stack.matrix_bytes for stack in stacks] for stacks in layers]
        aligned = np.array([[slot_bytes(size) for size in of_layer] for of_layer in sizes], np.int64)
        self._sizes = sizes
        self._offsets = np.cumsum(aligned, axis=1) - aligned  # of a matrix in its slot
        layer_bytes = aligned.sum(axis=1).tolist()
        counts = {size: slots.num_slots[size] for size in sorted(set(layer_bytes))}
        ends = dict(zip(counts, np.cumsum(list(counts.values())).tolist(), strict=True))
        self._slots = np.concatenate([slots.addresses(size) for size in counts])
        self._first_of_size = {size: ends[size] - counts[size] for size in counts}
        self._first_slots = np.array([self._first_of_size[size] for size in layer_bytes])
        self._tables = np.array([[s.addresses.data_ptr() for s in stacks] for stacks in layers], np.int64)
        pooled = [[s.pooled.data_ptr() if s.pooled is not None else 0 for s in stacks] for stacks in layers]
        self._pool_tables = np.array(pooled, np.int64)
        self._sources = np.array([[s.source for s in stacks] for stacks in layers], np.int64)
        self._steps = np.array([[s.step for s in stacks] for stacks in layers], np.int64)

    def find_slots(self, size: int, slots: SlotSegments) -> None:
        """Reads the addresses of a size's slots again, at most as many as at first."""
        addresses, first = slots.addresses(size), self._first_of_size[size]
        self._slots[first : first + len(addresses)] = addresses

    def entries(self, arrived: Array, slots: Array, withdrawn: Array) -> tuple[Array, Array]:
        """int64 addresses of the table entries that change, and the values to write there."""
        in_slots = self._slots_at(arrived // self._num_experts, slots)
        return self._changed(self._tables, withdrawn, arrived, in_slots)

    def pool_entries(self, changes: TableChanges, device_offset: int) -> tuple[Array, Array]:
        """The same in the tables of a pool. device_offset: from the host's addresses to the device's."""
        in_pool = changes.addresses + device_offset
        return self._changed(self._pool_tables, changes.removed, changes.added, in_pool)

    def _changed(self, tables: Array, removed: Array, added: Array, places: Array) -> tuple[Array, Array]:
        layers, ids = np.divmod(np.concatenate((removed, added)), self._num_experts)
        where = tables[layers] + 8 * ids[:, None]
        values = np.zeros_like(where)
        values[removed.size :] = places
        return where.reshape(-1), values.reshape(-1)

    def mapped(self, experts: Array) -> list[list[int]]:
        """Addresses of the matrices of each expert in the mapped file."""
        layers, ids = np.divmod(experts, self._num_experts)
        sources: list[list[int]] = (self._sources[layers] + ids[:, None] * self._steps[layers]).tolist()
        return sources

    def in_slots(self, experts: Array, slots: Array) -> list[list[int]]:
        """Addresses of the matrices of each expert in its slot."""
        places: list[list[int]] = self._slots_at(experts // self._num_experts, slots).tolist()
        return places

    def sizes(self, expert: int) -> list[int]:
        """Bytes of the matrices of an expert."""
        return self._sizes[expert // self._num_experts]

    def _slots_at(self, layers: Array, slots: Array) -> Array:
        begin = self._slots[self._first_slots[layers] + slots]
        places: Array = begin[:, None] + self._offsets[layers]
        return places
