"""Feed-forward networks of a dense model on a GPU that does not hold all of them.

The plan says which layers lack theirs, so nothing is guessed. In each step the CPU computes some of the
missing FFNs where they are mapped. A stream of its own copies the others over the bus into a ring, each while
the layers before it are computed. Both are part of the step, and of its graph.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cuda.bindings import driver

from coldstream.errors import DeviceError
from coldstream.experts.copies import read_host
from coldstream.experts.cpu_share import layers_of_cpu
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.composed_ops import ffn_of_products
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import ALIGNMENT, DeviceArray
from coldstream.kernels.cuda.host_memory import from_host
from coldstream.kernels.cuda.runtime import allocations, streams
from coldstream.kernels.experts.cuda_layer import Stacks
from coldstream.kernels.experts.executor import ModelExecutor, ResidentExecutor
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.partition import Partition, partition_experts_cuda, sharing_of
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.experts.split import NUM_WORDS, MissTimes
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import Activation, ExpertOutputs, FfnWeights, Routing, RowsElsewhere
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.placement.run_plan import RunPlan


@dataclass(frozen=True)
class _MissingLayer:
    """An FFN on the host: its matrices, and the page-locked addresses from which they are copied."""

    stacks: Stacks
    sources: tuple[int, ...]
    activation: Activation


class LayerExecutor(ResidentExecutor):
    """A `ModelExecutor` over weights on the device, a ring of `ring_bytes`, the mapped file and the CPU.

    whole_layers: layers whose FFN is on the device. Call `number_layers` and then `connect` before the first
    step, and set `times` to the plan's. `host` is None over a `MemoryPlan`.
    """

    def __init__(
        self,
        kernels: MoeKernels,
        mailbox: Mailbox,
        host: HostExperts | None,
        whole_layers: Collection[int] = (),
        ring_bytes: int = 0,
    ) -> None:
        super().__init__(kernels)
        self._device, self._mailbox, self._host = kernels.device, mailbox, host
        memory = self._device.memory
        self._tables = PartialTables(memory, host, whole_layers)
        self._ring = memory.persistent((ring_bytes // ALIGNMENT * ALIGNMENT,), "uint8")
        self.times: MissTimes | None = None
        self._missing: list[_MissingLayer] = []
        self._numbers: dict[int, int | None] = {}  # by the identity of a layer's gate; None: on the device
        self._place_bytes = 0
        self._pinned: list[np.ndarray[Any, Any]] = []
        zeros = self._device.zeros
        self._ids = zeros((MAX_MAILBOX_ROWS, 1), "int32")
        self._weights = self._device.float_array(np.ones((MAX_MAILBOX_ROWS, 1), np.float32))
        self._cpu_ids, self._used = (zeros((MAX_MAILBOX_ROWS, 1), "int32") for _ in range(2))
        self._addresses = memory.persistent((MATRICES, 1), "int64")
        self._no_bus = zeros((NUM_WORDS,), "int32")
        self._beside: streams.Stream | None = None
        if not self._device.planning:
            self._beside = streams.Stream()
        # The running step: whether it has begun; the layers that are still to be copied; and the layers whose
        # copy was queued, each with its place and the event behind the copy.
        self._has_begun = False
        self._to_copy: deque[int] = deque()
        self._copied: deque[tuple[int, int, streams.Event | None]] = deque()

    def map_matrix(self, file: GGUFFile, info: TensorInfo) -> ExpertTable | None:
        """See `ModelExecutor`."""
        return self._tables.map_stack(file, replace(info, shape=(1, *info.shape)))

    def number_layers(self, layers: Iterable[FfnWeights]) -> None:
        """Call once after loading, with the FFNs of all layers in the model's order.

        ValueError for a ring without a place for the largest one that is missing.
        """
        for weights in layers:
            number = None
            if isinstance(weights.gate, ExpertTable):
                number = len(self._missing)
                stacks = (weights.gate, weights.up, weights.down)
                sources = tuple(stack.source for stack in stacks)
                self._missing.append(_MissingLayer(stacks, sources, weights.activation))
                if self._host is not None:
                    self._host.add_layer(stacks, weights.activation)
            self._numbers[id(weights.gate)] = number
        self._place_bytes = max((_bytes_of(layer.stacks) for layer in self._missing), default=0)
        if self._place_bytes > self._ring.numel():
            raise ValueError(f"an FFN of {self._place_bytes} bytes, a ring of {self._ring.numel()}")

    def connect(self) -> None:
        """Call once before the first step: from then on the device copies missing layers.

        Waits until the file is locked for it. Raises as `HostExperts.device_address`, and ModelChangedError.
        """
        if self._host is not None:
            self._missing = [
                replace(layer, sources=tuple(self._page_locked(self._host, stack) for stack in layer.stacks))
                for layer in self._missing
            ]

    def _page_locked(self, host: HostExperts, stack: ExpertTable) -> int:
        """The address of page-locked bytes of a matrix: the mapping, or a copy."""
        if host.device_address(stack.source, stack.matrix_bytes):
            return stack.source
        self._pinned.append(allocations.page_locked((stack.matrix_bytes,), "uint8"))
        read_host(host, stack.source, self._pinned[-1])
        address: int = self._pinned[-1].ctypes.data
        return address

    def ffn(self, x: Activations, weights: FfnWeights) -> DeviceArray | ExpertOutputs:
        """See `ModelExecutor`."""
        if id(weights.gate) not in self._numbers:  # none of the model's own layers
            return super().ffn(x, weights)
        rows = x.shape[0]
        if not self._has_begun:
            self._begin(rows)
        number = self._numbers[id(weights.gate)]
        if number is None:
            return super().ffn(x, weights)
        if self._device.planning:
            return self._planned(number, x)
        if self._copied and self._copied[0][0] == number:
            return self._from_ring(number, x)
        return self._by_cpu(number, x)

    def _planned(self, number: int, x: Activations) -> DeviceArray | ExpertOutputs:
        """Counts memory and notes kernels of both ways that a step may take."""
        self._copied.append((number, 0, None))
        out = self._from_ring(number, x)
        return self._by_cpu(number, x) if x.shape[0] <= MAX_MAILBOX_ROWS else out

    def _begin(self, rows: int) -> None:
        """Decides which layers a step of `rows` rows copies, and queues the first copies."""
        self._has_begun = True
        if self._beside is None:
            return
        assert self.times is not None, "times are set before the first step"
        of_cpu = layers_of_cpu(len(self._missing), rows, self.times)
        self._to_copy.extend(number for number in range(len(self._missing)) if number not in of_cpu)
        self._beside.wait_stream(streams.current_stream())
        for place in range(self._ring.numel() // max(1, self._place_bytes)):
            self._copy_next(self._beside, place)

    def _copy_next(self, beside: streams.Stream, place: int) -> None:
        """Queues the copy of the next layer to `place`, which is free when `beside` reaches the copy."""
        if not self._to_copy:
            return
        number = self._to_copy.popleft()
        layer = self._missing[number]
        for stack, source, target in zip(
            layer.stacks, layer.sources, self._offsets(layer.stacks, place), strict=True
        ):
            address = self._ring.data_ptr() + target
            status = from_host(address, source, stack.matrix_bytes, beside)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(f"a layer cannot be copied: {driver.cuGetErrorString(status)[1].decode()}")
        self._copied.append((number, place, _recorded(beside)))

    def _offsets(self, stacks: Stacks, place: int) -> tuple[int, ...]:
        """Where each matrix begins in the ring."""
        sizes = [_aligned(stack.matrix_bytes) for stack in stacks]
        return tuple(place * self._place_bytes + sum(sizes[:matrix]) for matrix in range(MATRICES))

    def _from_ring(self, number: int, x: Activations) -> DeviceArray:
        """Queues the products of a layer over its bytes in the ring, and behind them the next copy there."""
        _, place, arrived = self._copied.popleft()
        stacks, activation = self._missing[number].stacks, self._missing[number].activation
        gate, up, down = (
            QuantTensor.from_bytes(
                self._ring[offset : offset + stack.matrix_bytes], stack.quant_type, (stack.rows, stack.cols)
            )
            for stack, offset in zip(stacks, self._offsets(stacks, place), strict=True)
        )
        if arrived is not None:
            streams.current_stream().wait_event(arrived)
        out: DeviceArray = ffn_of_products(self._device, x, FfnWeights(gate, up, down, activation))
        if self._beside is not None and self._to_copy:
            self._beside.wait_event(_recorded(streams.current_stream()))
            self._copy_next(self._beside, place)
        return out

    def _by_cpu(self, number: int, x: Activations) -> ExpertOutputs:
        """Asks the CPU for a layer, as for the only expert of every row."""
        rows = x.shape[0]
        places = Partition(self._addresses, self._cpu_ids[:rows])
        sharing = sharing_of(
            self._missing[number].stacks, self._no_bus, self._mailbox, number, places, self._used
        )
        self._device.launch(partition_experts_cuda, self._ids[:rows], x.values, sharing)
        box = self._mailbox
        return ExpertOutputs(
            self._device.empty(rows, 1, x.shape[1]),
            None,
            Routing(self._ids[:rows], self._weights[:rows], None),
            # `_weights` is constant: the sum may read it while the next layer's launch runs.
            RowsElsewhere(self._cpu_ids[:rows], box.out[:rows], box.done, is_marked=box.is_marked),
        )

    def finish_step(self) -> None:
        """See `ModelExecutor`."""
        if self._has_begun and self._beside is not None:
            streams.current_stream().wait_stream(self._beside)
        self._has_begun = False
        self._to_copy.clear()
        self._copied.clear()


def _recorded(stream: streams.Stream) -> streams.Event:
    event = streams.Event()
    event.record(stream)
    return event


def _bytes_of(stacks: Stacks) -> int:
    """Bytes of a layer in the ring."""
    return sum(_aligned(stack.matrix_bytes) for stack in stacks)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PartialLayers:
    """The work around each step of a `LayerExecutor`. No layer moves between two steps.

    mailbox: has one rank, as a layer is the only expert of every row.
    """

    shared_rows: int = MAX_MAILBOX_ROWS  # most rows of a step in which the CPU computes layers

    def __init__(self, mailbox: Mailbox, plan: RunPlan) -> None:
        self._plan = plan
        # A prefill asks the CPU for nothing: the smallest mailbox will do for it.
        bulk = Mailbox.create(1, mailbox.x.shape[1], 1)
        self.host = HostExperts(plan.threads, mailbox, bulk, 1)
        self._executor: LayerExecutor | None = None
        self._num_running = 0

    def attach(self, executor: ModelExecutor) -> None:
        """Call once, and then `connect`, before the executor's first step."""
        assert isinstance(executor, LayerExecutor)
        executor.times = self._plan.miss_times
        self._executor = executor

    def connect(self) -> None:
        """Waits until the mapped file is locked. Raises as `LayerExecutor.connect`."""
        assert self._executor is not None, "what is connected is an executor"
        self._executor.connect()

    def must_wait(self, rows: int) -> bool:
        """Whether no step may begin before `ended` is called for another."""
        return self._num_running > 1

    def start_step(self, rows: int) -> None:
        """Call right before a step of `rows` rows is launched."""
        if rows <= MAX_MAILBOX_ROWS:
            self.host.begin_step(rows)

    def launched(self) -> None:
        """Call right after the launch."""
        self.host.step_launched()
        self._num_running += 1

    def ended(self, num_running: int = 0) -> None:
        """Call when all steps have ended but the last `num_running` that were launched.

        Raises ModelChangedError if the file could not be read, and GenerationFault.
        """
        self._num_running = min(self._num_running, num_running)
        if not self._num_running:
            self.host.server.end()
        self.host.server.check()
        self.host.mailbox.check()

    def close(self) -> None:
        """Call when the device is idle; ends threads."""
        self._executor = None
        self.host.close()
