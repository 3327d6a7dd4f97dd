"""The experts in a GPU's memory: slots, the copies that fill them, and the tables that kernels find them in."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.experts.cache import Copy, ExpertCache
from coldstream.kernels.cuda.memory import ALIGNMENT
from coldstream.kernels.experts.addresses import AddressWriter
from coldstream.kernels.experts.table import ExpertTable

Array = np.ndarray[Any, Any]
MATRICES = 3  # gate, up, down


def expert_bytes(stacks: Sequence[ExpertTable]) -> int:
    """What an expert of a layer takes in a slot."""
    return sum(_aligned(_matrix_bytes(stack)) for stack in stacks)


def _matrix_bytes(stack: ExpertTable) -> int:
    return stack.rows * stack.quant_type.row_bytes(stack.cols)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Layer:
    """By matrix: addresses of the table's first entry, of the host's first expert, and offsets in a slot."""

    tables: Array
    sources: Array
    steps: Array
    sizes: Array
    offsets: Array
    slot_bytes: int

    @classmethod
    def of(cls, stacks: Sequence[ExpertTable]) -> Self:
        sizes = np.array([_matrix_bytes(stack) for stack in stacks], np.int64)
        ends = np.cumsum([_aligned(size) for size in sizes])
        return cls(
            np.array([stack.addresses.data_ptr() for stack in stacks], np.int64),
            np.array([stack.host.address for stack in stacks], np.int64),
            np.array([stack.step for stack in stacks], np.int64),
            sizes,
            np.concatenate([[0], ends[:-1]]),
            int(ends[-1]),
        )


class ExpertResidency:
    """Does what an `ExpertCache` decides, on PyTorch's current stream and a stream of its own.

    layers: the tables of each layer, gate, up and down, whose entries are 0. slots: uint8 [slots, bytes] on the
    device by the bytes of an expert. used: int32 [layers, rows, K] in the host's memory, the experts of a step
    once it has run.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[ExpertTable]],
        cache: ExpertCache,
        slots: Mapping[int, torch.Tensor],
        used: torch.Tensor,
    ) -> None:
        self.cache = cache
        self._layers = [_Layer.of(stacks) for stacks in layers]
        self._num_experts = len(layers[0][0].addresses)
        self._slots = dict(slots)
        self._used = used.numpy()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[Copy, torch.cuda.Event]] = deque()
        capacity = MATRICES * sum(len(each) for each in self._slots.values())
        self._writer = AddressWriter(max(1, 2 * capacity))
        self._running: tuple[int, int] | None = None  # the last step, and its rows if it trains

    def load(self, experts: Iterable[int]) -> None:
        """Brings experts in before the first step; done when it returns."""
        copies = self.cache.load(experts)
        for copy in copies:
            self._begin(copy)
        self._stream.synchronize()
        self._collect()

    def start_step(self, rows: int) -> None:
        """Right before a step of `rows` rows is launched, when the last one has ended.

        rows: 0 for a step that tells nothing of later ones. Raises DeviceError for a copy that failed twice.
        """
        ended = self._running
        used = None if ended is None or ended[1] == 0 else self._experts_of(ended[1])
        self._collect()
        start = self.cache.start_step()
        self._write_tables(start.arrived, start.slots, start.withdrawn)
        if start.copies:
            self._stream.wait_stream(torch.cuda.current_stream())
            for copy in start.copies:
                self._begin(copy)
        self._running = (start.step, rows)
        self._ended = None if ended is None else (ended[0], used)

    def finish_step(self) -> None:
        """Right after the launch: makes up its mind about the step before, while this one runs."""
        if self._ended is None:
            return
        step, used = self._ended
        self._ended = None
        nothing = np.empty(0, np.int64)
        self.cache.finish_step(step, nothing if used is None else used, trains=used is not None)

    def close(self) -> None:
        """Waits for copies in flight; the slots may then be given back."""
        self._stream.synchronize()
        self._in_flight.clear()

    def _experts_of(self, rows: int) -> Array:
        """The numbers of the experts that the last step used, none twice."""
        first = np.arange(len(self._layers), dtype=np.int64)[:, None, None] * self._num_experts
        seen = np.zeros(len(self._layers) * self._num_experts, bool)
        seen[(self._used[:, :rows] + first).reshape(-1)] = True
        return np.flatnonzero(seen)

    def _collect(self) -> None:
        """Tells the cache which copies are over."""
        while self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self.cache.copied(self._in_flight.popleft()[0])

    def _begin(self, copy: Copy) -> None:
        layer = self._layers[copy.expert // self._num_experts]
        expert = copy.expert % self._num_experts
        slot = self._slots[layer.slot_bytes][copy.slot].data_ptr()
        for source, target, size in zip(
            layer.sources + expert * layer.steps, slot + layer.offsets, layer.sizes, strict=True
        ):
            (status,) = driver.cuMemcpyHtoDAsync(
                int(target), int(source), int(size), self._stream.cuda_stream
            )
            if status != driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(
                    f"an expert cannot be copied: {driver.cuGetErrorString(status)[1].decode()}"
                )
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._in_flight.append((copy, event))

    def _write_tables(self, arrived: Array, slots: Array, withdrawn: Array) -> None:
        if arrived.size + withdrawn.size == 0:
            return
        where, values = [], []
        for expert in withdrawn.tolist():
            layer = self._layers[expert // self._num_experts]
            where.append(layer.tables + 8 * (expert % self._num_experts))
            values.append(np.zeros(MATRICES, np.int64))
        for expert, slot in zip(arrived.tolist(), slots.tolist(), strict=True):
            layer = self._layers[expert // self._num_experts]
            where.append(layer.tables + 8 * (expert % self._num_experts))
            values.append(self._slots[layer.slot_bytes][slot].data_ptr() + layer.offsets)
        self._writer.write(np.concatenate(where), np.concatenate(values))
