"""Experts on a further card, which computes what the mailbox of the first one asks for.

Its loop of a step is a captured graph (`kernels/experts/requests.py`), which the host launches beside that
step. The card has the experts of every layer that may ask, so that the first card may evict any of its own.
Unit of work: a step of the first card.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from coldstream.errors import GenerationFault, OutOfMemoryError
from coldstream.experts.host import HostExperts
from coldstream.experts.partial_tables import mapped_bytes
from coldstream.gguf.reader import TensorInfo
from coldstream.kernels.arithmetic.quantised import QuantActivations, activations_from
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import ELEMENT_BYTES, HostArray
from coldstream.kernels.cuda.contents import CudaArray, clear, write
from coldstream.kernels.cuda.device import find_card
from coldstream.kernels.cuda.memory import own_bytes
from coldstream.kernels.cuda.runtime import allocations, calls, streams
from coldstream.kernels.cuda.runtime.graphs import Graph
from coldstream.kernels.cuda.skinny_shapes import MAX_PAIR_ROWS
from coldstream.kernels.cuda.upload import Progress, Upload, run_uploads
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, experts_gemv_cuda
from coldstream.kernels.experts.cuda_layer import Stacks
from coldstream.kernels.experts.requests import (
    RequestedRows,
    Server,
    last_request_cuda,
    next_request_cuda,
    request_of,
)
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import SWIGLU, Activation

PATIENCE_S: Final = 60.0  # with a card that computes a request
RESERVE_BYTES: Final = 256 * 2**20  # for kernels, graphs and rows


@dataclass(frozen=True)
class CardLayer:
    """The experts of a layer, as the file has them."""

    stacks: Stacks
    activation: Activation = SWIGLU

    @property
    def cols(self) -> int:
        return self.stacks[0].cols

    @property
    def ffn_size(self) -> int:
        return self.stacks[0].rows

    @property
    def num_experts(self) -> int:
        return len(self.stacks[0].addresses)

    @property
    def num_bytes(self) -> int:
        return sum(map(mapped_bytes, self.stacks))


def check_room(index: int, free_bytes: int, expert_bytes: int) -> None:
    """Raises OutOfMemoryError if a card has no room for experts of so many bytes, beside RESERVE_BYTES."""
    if expert_bytes + RESERVE_BYTES > free_bytes:
        wanted, free, kept = (size / 2**30 for size in (expert_bytes, free_bytes, RESERVE_BYTES))
        raise OutOfMemoryError(
            f"device {index}: {wanted:.2f} GiB of experts that the first GPU may lack do not fit, "
            f"{free:.2f} GiB are free, of which {kept:.2f} are kept: use one GPU"
        )


class _Rows:
    """Memory of a request, of at most so many rows; shared by all layers."""

    def __init__(self, layers: Sequence[CardLayer], rows: int, ranks: int) -> None:
        cols, widths = layers[0].cols, {layer.ffn_size for layer in layers}
        self.x = Activations(_empty((rows, cols), "float32"), activations_from(_empty, rows, cols))
        self.ids, self.state = _empty((rows, ranks), "int32"), _empty((2,), "int32")
        self.hidden = {width: _empty((rows, ranks, width), "float32") for width in widths}
        clear(self.state)


def _empty(shape: tuple[int, ...], dtype: str) -> CudaArray:
    """In a block of its own, contents undefined."""
    allocation = allocations.block(math.prod(shape) * ELEMENT_BYTES[dtype])
    return CudaArray(allocation.address, shape, dtype, allocation)


class CardExperts:
    """The experts of `layers` on card `index`, and its loops.

    layers: numbered as requests number them. Raises DeviceError for a card that cannot be used, and
    OutOfMemoryError, ModelChangedError; what was taken is freed then.
    """

    def __init__(
        self, index: int, host: HostExperts, layers: Sequence[CardLayer], progress: Progress | None = None
    ) -> None:
        check_room(index, find_card(index).free_bytes, sum(layer.num_bytes for layer in layers))
        self.index, self._box, self._layers = index, host.mailbox, layers
        assert len(self._box.ids) <= MAX_PAIR_ROWS, "one launch computes a request"
        self._graphs: dict[int, Graph] = {}  # by rows
        self._stacks: list[CudaArray] = []
        self._is_serving = False  # whether a loop may be running
        self._num_experts = layers[0].num_experts
        failure = HostArray.of(allocations.page_locked((1,), "int32"))
        with calls.on_device(index):
            self._stream = streams.Stream()
            self._rows = _Rows(layers, *self._box.ids.shape)
            self._server = Server(self._box, self._rows.state, failure)
            self._matrices = [self._load(host, layer, progress) for layer in layers]
            calls.synchronize()
        self._warm_up()

    def _load(self, host: HostExperts, layer: CardLayer, progress: Progress | None) -> ExpertMatrices:
        """Copies a layer's experts, and writes their addresses: 0 behind the last, for pairs of no expert."""
        uploads, tables = [], []
        for stack in layer.stacks:
            file, shard, offset = host.locate(stack.source)
            count, num_bytes = layer.num_experts, mapped_bytes(stack)
            there = own_bytes(num_bytes)
            shape = (count, stack.rows, stack.cols)
            info = TensorInfo("experts", shape, stack.quant_type, shard, offset, num_bytes)
            uploads.append(Upload(file, info, there))
            addresses = _empty((count + 1,), "int64")
            self._stacks.append(there)
            places = there.address + stack.step * np.arange(count + 1, dtype=np.int64)
            places[count] = 0
            write(addresses, places)
            tables.append(ExpertTable(addresses[:count], stack.quant_type, stack.rows, stack.cols))
        run_uploads(uploads, progress, self.index)
        return ExpertMatrices(tables[0], tables[1], tables[2], None, layer.activation)

    def _warm_up(self) -> None:
        """Loads the kernels by a step that asks for nothing."""
        self._end_by_host()
        self._serve(lambda: self._loop(1))
        self._wait()

    def begin_step(self, rows: int) -> None:
        """Call right before a step of so many rows is launched, which asks, and ends its requests."""
        if rows not in self._graphs:
            self._graphs[rows] = self._captured(rows)
        self._serve(self._graphs[rows].launch)

    def _captured(self, rows: int) -> Graph:
        with calls.on_device(self.index):
            graph, _ = Graph.capture(lambda: self._loop(rows))
        return graph

    def _serve(self, queue: Callable[[], None]) -> None:
        with calls.on_device(self.index), streams.on_stream(self._stream):
            queue()
        self._is_serving = True

    def _loop(self, rows: int) -> None:
        """Queues the loop of a step."""
        of_all = self._rows
        taken = RequestedRows(of_all.x.rows(0, rows), of_all.ids[:rows], self._num_experts)
        outs = PairRows(self._box.out[:rows], None)
        x: QuantActivations = taken.x.quantised
        for number, matrices in enumerate(self._matrices):
            next_request_cuda(self._server, number, taken)
            hidden = PairRows(of_all.hidden[matrices.gate.rows][:rows], None)
            experts_gemv_cuda(matrices, taken.ids, hidden, outs, activations=x, x=taken.x.values)
        last_request_cuda(self._server, len(self._layers))

    def give_up(self) -> None:
        """Ends a loop whose step was not launched as a whole. The first card must have nothing to do."""
        if self._is_serving and not self._is_idle():
            self._end_by_host()
            self._wait()

    def _end_by_host(self) -> None:
        """Asks for the end of a step, once what was asked before is answered. Raises GenerationFault."""
        done, until = self._box.done.numpy(), time.monotonic() + PATIENCE_S
        while not done[0]:
            if time.monotonic() > until:
                raise GenerationFault(f"device {self.index} does not answer: load the model again")
            time.sleep(1e-4)
        done[0] = 0
        self._box.request.numpy()[0] = request_of(len(self._layers), 1)

    def _is_idle(self) -> bool:
        with calls.on_device(self.index):
            event = streams.Event()
            event.record(self._stream)
            return event.query()

    def _wait(self) -> None:
        with calls.on_device(self.index):
            self._stream.synchronize()
        self._is_serving = False

    def check(self) -> None:
        """Raises GenerationFault if an answer was undefined."""
        self._server.check()

    def close(self) -> None:
        """Ends the loops. The first card must have nothing to do."""
        self.give_up()
        self._graphs.clear()
