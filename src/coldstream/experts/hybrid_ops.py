"""The operations on a GPU that does not hold all experts: who computes a pair is decided on the device.

Few rows are computed by the GPU and the CPU together (`kernels/experts/partition.py`), which can be captured.
The missing experts of many rows are brought to a ring (`streamed_ops.py`), as the host decides layer by
layer.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from coldstream.experts.host import HostExperts
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.experts.prefetching import Prefetching
from coldstream.experts.streamed_ops import StreamedOps
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cuda.activations import Activations, as_floats
from coldstream.kernels.cuda.few_shapes import FEW_TYPES
from coldstream.kernels.cuda.few_shapes import MAX_ROWS as MAX_FEW_ROWS
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.cuda.memory import Memory
from coldstream.kernels.experts.cuda_layer import Stacks, is_one_launch
from coldstream.kernels.experts.mailbox import MAX_ROWS, Mailbox
from coldstream.kernels.experts.partition import MAX_RANKS, Places, sharing_of
from coldstream.kernels.experts.stamps import WORDS
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, Routing, RowsElsewhere
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.router.cuda import Ahead


class HybridOps(StreamedOps):
    """`CudaOps` whose routed experts have slots in the device's memory, or lie in the host's.

    Slots are not handed out here: `layers` has the tables of each layer, in the model's order, for somebody
    who fills slots and writes addresses; those of `whole_layers` are not among them. `number_layers` comes
    before the first step. `streamed` is int32 [MAX_RANKS + 1], see `sharing_of`; `stamps` int64 [layers,
    WORDS], see `kernels/experts/stamps.py`. Over a `MemoryPlan` there is no `host`.
    """

    def __init__(
        self,
        memory: Memory,
        max_positions: int,
        max_rows: int,
        mailbox: Mailbox,
        host: HostExperts | None,
        whole_layers: Collection[int] = (),
        ring_bytes: int = 0,
        prefetching: Prefetching | None = None,
        *,
        notes_kernels: bool = False,
    ) -> None:
        super().__init__(memory, max_positions, max_rows, host, ring_bytes, notes_kernels=notes_kernels)
        self._mailbox = mailbox
        self._whole = tuple(f"blk.{layer}." for layer in whole_layers)
        self.layers: list[Stacks] = []
        self._numbers: dict[int, int] = {}  # by the identity of a layer's first table
        self.streamed = self.zeros((MAX_RANKS + 1,), "int32")
        self.stamps = memory.persistent((len(mailbox.used), WORDS), torch.int64).zero_()
        self._pairs = self.int_vector(range(MAX_ROWS * MAX_RANKS))
        self.prefetch: PrefetchRing | None = None
        if prefetching is not None:
            num_layers, _, num_ranks = mailbox.used.shape
            # Long prompts, which need the ring, and steps of few rows take turns.
            self.prefetch = PrefetchRing(prefetching, self.ring, self.zeros, num_layers, num_ranks)
        self._routers: dict[int, QuantTensor] = {}
        self._beside: torch.cuda.Stream | None = None  # for what a step waits for only at its end
        if self.prefetch is not None and not self.planning:
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._can_prefetch = False
        self._has_forked = False  # whether the step that is being queued has something there

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> CudaWeight:
        """A stack of experts stays where it is; anything else is loaded, and so are those of whole layers."""
        if len(info.shape) != 3 or info.name.startswith(self._whole):
            return self.load_weight(file, info)
        num_experts, rows, cols = info.shape
        addresses = self.memory.persistent((num_experts,), torch.int64)
        if self.host is None:
            return ExpertTable(addresses, info.quant_type, rows, cols, is_partial=True)
        addresses.zero_()
        weight, mapped = self.host.map_weight(file, info)
        return ExpertTable(
            addresses, info.quant_type, rows, cols, True, weight, mapped, info.num_bytes // num_experts
        )

    def split_rows(self, weight: CudaWeight, sizes: Sequence[int]) -> tuple[CudaWeight, ...]:
        if isinstance(weight, ExpertTable) and weight.is_partial:
            return tuple(self._rows_of(weight, sum(sizes[:i]), size) for i, size in enumerate(sizes))
        return super().split_rows(weight, sizes)

    def _rows_of(self, table: ExpertTable, begin: int, size: int) -> ExpertTable:
        addresses = self.memory.persistent(tuple(table.addresses.shape), torch.int64)
        if self.host is None:
            return ExpertTable(addresses, table.quant_type, size, table.cols, is_partial=True)
        addresses.zero_()
        mapped = table.mapped + begin * table.quant_type.row_bytes(table.cols) if table.mapped else 0
        return ExpertTable(
            addresses, table.quant_type, size, table.cols, True, table.host.rows(begin, begin + size), mapped,
            table.step,
        )  # fmt: skip

    def number_layers(self, experts: Iterable[ExpertWeights]) -> None:
        """Once, when they are loaded: the experts of all layers, in the model's order.

        Those that may miss an expert are numbered from 0 on, as in `slot_shares`. ValueError for experts that
        do not fit into the ring.
        """
        for weights in experts:
            if not weights.gate.is_partial:
                continue
            stacks = (weights.gate, weights.up, weights.down)
            self._numbers[id(weights.gate)] = len(self.layers)
            self.layers.append(stacks)
            if self.host is not None:
                self.host.add_layer(*(stack.host for stack in stacks))
            if self.stream is not None:
                self.stream.add_layer(stacks)

    def router(
        self,
        x: Activations,
        weight: CudaWeight,
        shared_gate: CudaWeight,
        num_experts_per_tok: int,
        experts: ExpertWeights,
    ) -> Routing:
        tokens, ranks = x.shape[0], num_experts_per_tok
        if not experts.gate.is_partial or tokens > MAX_ROWS:
            return self.route(x, weight, shared_gate, ranks, None)
        stacks = (experts.gate, experts.up, experts.down)
        layer = self._numbers[id(experts.gate)]
        places = Places(
            self._empty(3, tokens, ranks, dtype=torch.int64),
            self._empty(tokens, ranks, dtype=torch.int32),
            self.stamps[layer] if self.routes_at_once(tokens, shared_gate) else None,
        )
        if self.routes_at_once(1, shared_gate):
            assert isinstance(weight, QuantTensor)
            self._routers[layer] = weight
        ring = self.prefetch if self.guesses(tokens) else None
        if ring is None:
            sharing = sharing_of(stacks, self.streamed, self._mailbox, layer, places)
            return replace(self.route(x, weight, shared_gate, ranks, sharing), places=places)
        later = layer + ring.distance
        is_guessing = later < len(self.layers)
        sharing = sharing_of(
            stacks, self.streamed, self._mailbox, layer, places, ring.prefetched(layer, stacks),
            ring.notes(layer, is_guessing=is_guessing),
        )  # fmt: skip
        ahead = self._ahead(ring, later, tokens, ranks) if is_guessing else None
        routing = self.route(x, weight, shared_gate, ranks, sharing, ahead)
        if is_guessing:
            self._fetch(ring, later, tokens)
        return replace(routing, places=places)

    def guesses(self, num_rows: int) -> bool:
        """Whether a step of so many rows that is queued now guesses at later layers' experts."""
        return self._can_prefetch and num_rows <= MAX_FEW_ROWS

    def _ahead(self, ring: PrefetchRing, later: int, tokens: int, ranks: int) -> Ahead:
        return Ahead(
            as_floats(self._routers[later]),
            ring.guesses[later, :tokens],
            self._mailbox.guessed[later, :tokens],
            self._empty(tokens, self._routers[later].shape[0]),
            self._empty(tokens, ranks),
        )

    def _fetch(self, ring: PrefetchRing, later: int, tokens: int) -> None:
        """Beside the layers between, none of which waits for it."""
        if self._beside is None:
            self._launch(ring.fetch, later, tokens, self.layers[later])
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            ring.fetch(later, tokens, self.layers[later])
        self._has_forked = True

    def finish_step(self) -> None:
        if self._has_forked and self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        self._has_forked = False
        if self.prefetch is not None and not self._can_prefetch and self._routers:
            # A layer's router is known once it has run.
            is_readable = self.host is None or all(s.mapped for stacks in self.layers for s in stacks)
            shapes = {weight.shape for weight in self._routers.values()}
            self._can_prefetch = is_readable and len(self._routers) == len(self.layers) and len(shapes) == 1

    def experts(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        if not weights.gate.is_partial:
            return super().experts(x, routing, weights)
        stacks = (weights.gate, weights.up, weights.down)
        if routing.places is None:
            return self._streamed_experts(x, routing, weights, self._numbers[id(weights.gate)])
        return self._by_gpu_and_cpu(x, routing, weights, stacks)

    def _by_gpu_and_cpu(
        self, x: Activations, routing: Routing, weights: ExpertWeights, stacks: Stacks
    ) -> ExpertOutputs:
        """At most MAX_ROWS rows, computed by the GPU and the CPU at the same time."""
        tokens, ranks = routing.ids.shape
        places: Places = routing.places
        # To the kernels every pair is an expert of its own, wherever it lies.
        addresses = [matrix.view(-1) for matrix in places.addresses]
        tables = [replace(stack, addresses=a) for stack, a in zip(stacks, addresses, strict=True)]
        pairs = self._pairs[: tokens * ranks].view(tokens, ranks)
        of_pairs = self._with_tables(weights, tables)
        routed = self._empty(tokens, ranks, x.shape[1])
        if all(stack.quant_type in FEW_TYPES for stack in stacks) and is_one_launch(weights):
            shared = self._empty(*x.shape)
            for first in range(0, tokens, MAX_FEW_ROWS):
                part = slice(first, min(first + MAX_FEW_ROWS, tokens))
                rows = x.rows(first, part.stop - first)
                self._few_experts(rows, pairs[part], of_pairs, routed[part], shared[part])
        else:
            gate, up = self.linear(x, (weights.shared_gate, weights.shared_up))
            (shared,) = self.linear(self.swiglu(gate, up), (weights.shared_down,))
            self._experts_as_floats(x, pairs, tables, routed)
        box = self._mailbox
        elsewhere = RowsElsewhere(places.cpu_ids, box.out[:tokens], box.done, places.stamps)
        return ExpertOutputs(routed, shared, routing, elsewhere)

    @staticmethod
    def _with_tables(weights: ExpertWeights, tables: Iterable[ExpertTable]) -> ExpertWeights:
        gate, up, down = tables
        return replace(weights, gate=gate, up=up, down=down)
