"""The experts in a GPU's memory: slots, copies that fill them, and the tables that kernels find them in."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.experts.cache import Copy, ExpertCache
from coldstream.experts.segments import SlotSegments
from coldstream.kernels.experts.addresses import AddressWriter
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.table import ExpertTable
from coldstream.placement.sizes import slot_bytes

Array = np.ndarray[Any, Any]
NOTHING = np.empty(0, np.int64)


def expert_bytes(stacks: Sequence[ExpertTable]) -> int:
    """What an expert of a layer takes in a slot."""
    return sum(slot_bytes(stack.matrix_bytes) for stack in stacks)


class ExpertResidency:
    """Does what an `ExpertCache` decides, on PyTorch's current stream and a stream of its own.

    layers: the tables of each layer, gate, up and down, whose entries are 0. slots: as many as the cache has;
    used: int32 [layers, rows, K] in the host's memory, the experts of a step once it has run.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[ExpertTable]],
        cache: ExpertCache,
        slots: SlotSegments,
        used: torch.Tensor,
    ) -> None:
        self.cache = cache
        self._num_layers, self.num_experts = len(layers), len(layers[0][0].addresses)
        self._slots = slots
        self._addresses = _ExpertAddresses(layers, slots)
        self._used = used.numpy()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[tuple[Copy, ...], torch.cuda.Event]] = deque()
        self._writer = AddressWriter(2 * MATRICES * self.num_slots)
        self.resident = np.zeros((len(layers), len(layers[0][0].addresses)), bool)  # for the next step
        self._failure: DeviceError | None = None  # of a copy that nobody has heard of
        self._next_step = self._prepare()
        self._running: tuple[int, int] | None = None  # the step launched last, and its rows if it trains
        self._ended: tuple[int, Array | None] | None = None  # the one before, and what it used

    @property
    def num_slots(self) -> int:
        """Of all sizes."""
        return sum(self._slots.num_slots.values())

    def load(self, experts: Iterable[int]) -> None:
        """Brings experts in; done when it returns. Raises DeviceError if that fails."""
        # Slots may be memory that work of the current stream still writes for the tensor that had it before.
        self._stream.wait_stream(torch.cuda.current_stream())
        self._begin(self.cache.load(experts))
        self._stream.synchronize()
        # Nothing was launched with the tables as they are.
        self.cache.finish_step(self._next_step, NOTHING, trains=False)
        self._next_step = self._prepare()
        self._raise_failure()

    def start_step(self, rows: int) -> None:
        """Right before a step of `rows` rows is launched, when the last one has ended.

        rows: 0 for a step that tells nothing of later ones.
        """
        if self._running is not None and self._running[0] != self._next_step:
            step, rows_then = self._running
            self._ended = step, self._used[:, :rows_then].copy() if rows_then else None
        self._running = (self._next_step, rows)

    def launched(self) -> None:
        """Right after the launch: everything that takes time, while the step runs.

        Makes up its mind about the step before, and prepares the next one: its tables are written behind the
        running step, and copies into slots that this one may read wait for its end. Raises DeviceError for a
        copy that failed twice, also of one that `shrink` began, once all of that is done: steps may follow.
        """
        self._finish_ended()
        self._next_step = self._prepare()
        self._raise_failure()

    def shrink(self) -> int:
        """Gives the memory of some slots back, whose experts are missing then; the bytes, 0 if none is left.

        The device must have done everything. A step that was under way, and not `launched` yet, may be
        repeated or go on: nothing tells of what it used until it ends.
        """
        size = self._slots.largest
        if size is None:
            return 0
        self._stream.synchronize()
        self.cache.resize(size, self._slots.without_last(size))
        self._finish_ended()
        if self._running is not None and self._running[0] != self._next_step:
            step, rows = self._running
            self._running, self._ended = None, (step, self._used[:, :rows].copy() if rows else None)
            self._finish_ended()
        # Whoever comes next, a repeated step or another one, has new tables, and is a step of its own.
        self.cache.finish_step(self._next_step, NOTHING, trains=False)
        self._next_step = self._prepare()
        if self._running is not None:
            self._running = (self._next_step, self._running[1])
        torch.cuda.current_stream().synchronize()  # the tables are written
        assert self.cache.reclaimed(size), "nobody reads or writes slots between two steps"
        freed = self._slots.drop_last(size)
        torch.cuda.empty_cache()
        return freed

    @property
    def missing_bytes(self) -> int:
        """What `grow` would take; 0 if it has all slots that it began with."""
        return self._slots.dropped_bytes

    def grow(self) -> None:
        """Takes the memory of slots again that `shrink` gave back last; some must be missing.

        Raises torch.OutOfMemoryError; nothing has changed then. Slots that nobody owns disturb no step, so
        that one may run.
        """
        size = self._slots.restore_last()
        self._addresses.find_slots(size, self._slots)
        self.cache.resize(size, self._slots.num_slots[size])

    def _finish_ended(self) -> None:
        """Makes up its mind about the step before the running one."""
        if self._ended is None:
            return
        step, ids = self._ended
        self._ended = None
        used = NOTHING if ids is None else self._experts_of(ids)
        self.cache.finish_step(step, used, trains=ids is not None)

    def _prepare(self) -> int:
        """What has to be done where the next step starts; its number."""
        while self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
            for copy in self._in_flight.popleft()[0]:
                self.cache.copied(copy)
        start = self.cache.start_step()
        if start.copies:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._begin(start.copies)
        if start.arrived.size + start.withdrawn.size:
            self._writer.write(*self._addresses.entries(start.arrived, start.slots, start.withdrawn))
            self.resident.reshape(-1)[start.withdrawn] = False
            self.resident.reshape(-1)[start.arrived] = True
        return start.step

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits for copies in flight; the slots may then be given back."""
        self._stream.synchronize()
        self._in_flight.clear()

    def _experts_of(self, ids: Array) -> Array:
        """The numbers of the experts [layers, rows, K] of a step, none twice."""
        first = np.arange(self._num_layers, dtype=np.int64)[:, None, None] * self.num_experts
        seen = np.zeros(self._num_layers * self.num_experts, bool)
        seen[(ids + first).reshape(-1)] = True
        return np.flatnonzero(seen)

    def _begin(self, copies: tuple[Copy, ...]) -> None:
        """Queues copies, which are seen to be over together; keeps the error if one of them failed twice."""
        queued = []
        for copy in copies:
            try:
                self._queue(copy)
                queued.append(copy)
            except DeviceError as error:
                if not self.cache.copied(copy, ok=False):
                    self._failure = error
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._in_flight.append((tuple(queued), event))

    def _queue(self, copy: Copy) -> None:
        sources, targets, sizes = self._addresses.of_copy(copy.expert, copy.slot)
        for source, target, size in zip(sources, targets, sizes, strict=True):
            (status,) = driver.cuMemcpyHtoDAsync(target, source, size, self._stream.cuda_stream)
            if status != driver.CUresult.CUDA_SUCCESS:
                reason = driver.cuGetErrorString(status)[1].decode()
                raise DeviceError(f"an expert cannot be copied to the GPU: {reason}")


class _ExpertAddresses:
    """Addresses of everything by layer and matrix, of slots also after they were given back."""

    def __init__(self, layers: Sequence[Sequence[ExpertTable]], slots: SlotSegments) -> None:
        self._num_experts = len(layers[0][0].addresses)
        sizes = [[stack.matrix_bytes for stack in stacks] for stacks in layers]
        aligned = np.array([[slot_bytes(size) for size in of_layer] for of_layer in sizes], np.int64)
        self._sizes = sizes
        self._offsets = np.cumsum(aligned, axis=1) - aligned  # in a slot
        layer_bytes = aligned.sum(axis=1).tolist()
        counts = {size: slots.num_slots[size] for size in sorted(set(layer_bytes))}
        ends = dict(zip(counts, np.cumsum(list(counts.values())).tolist(), strict=True))
        self._slots = np.concatenate([slots.addresses(size) for size in counts])
        self._first_of_size = {size: ends[size] - counts[size] for size in counts}
        self._first_slots = np.array([self._first_of_size[size] for size in layer_bytes])
        self._tables = np.array([[s.addresses.data_ptr() for s in stacks] for stacks in layers], np.int64)
        self._sources = np.array([[s.host.address for s in stacks] for stacks in layers], np.int64)
        self._steps = np.array([[s.step for s in stacks] for stacks in layers], np.int64)

    def find_slots(self, size: int, slots: SlotSegments) -> None:
        """Some slots of a size, of no more than there were at first, may lie elsewhere now."""
        addresses, first = slots.addresses(size), self._first_of_size[size]
        self._slots[first : first + len(addresses)] = addresses

    def entries(self, arrived: Array, slots: Array, withdrawn: Array) -> tuple[Array, Array]:
        """int64 addresses of the tables' entries that change, and what to write there."""
        experts = np.concatenate([withdrawn, arrived])
        layers, ids = np.divmod(experts, self._num_experts)
        where = self._tables[layers] + 8 * ids[:, None]
        values = np.zeros_like(where)
        values[withdrawn.size :] = self._slots_at(layers[withdrawn.size :], slots)
        return where.reshape(-1), values.reshape(-1)

    def of_copy(self, expert: int, slot: int) -> tuple[list[int], list[int], list[int]]:
        """Where the matrices of an expert come from, where they go, and how long they are."""
        layer, index = divmod(expert, self._num_experts)
        sources = self._sources[layer] + index * self._steps[layer]
        return sources.tolist(), self._slots_at(layer, slot).tolist(), self._sizes[layer]

    def _slots_at(self, layers: Any, slots: Any) -> Array:
        begin = self._slots[self._first_slots[layers] + slots]
        places: Array = np.expand_dims(begin, -1) + self._offsets[layers]
        return places
