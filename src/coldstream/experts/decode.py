"""Experts of decode steps: the device shares pairs out, and the GPU and the CPU compute them together.

The router's launch, or one behind it, decides where each chosen expert is computed, for all its rows
(`kernels/experts/partition.cuh`). There are four places:

- a slot;
- the ring, into which the expert was prefetched, or is staged for several rows;
- the mapped file, which the GPU reads over the bus;
- the CPU.

The whole step can be captured in a graph.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import numpy as np

from coldstream.experts.chosen_experts import ChosenExperts
from coldstream.experts.partial_tables import PartialTables
from coldstream.experts.prefetch_ring import PrefetchRing
from coldstream.kernels.cuda.activations import Activations, as_floats
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import write
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.cuda.skinny_shapes import MAX_GEMV_ROWS
from coldstream.kernels.experts.cuda_layer import Stacks, stacks_of
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.partition import (
    ExpertPlaces,
    Hints,
    Partition,
    Staging,
    hints_of,
    sharing_of,
)
from coldstream.kernels.experts.requests import end_requests_cuda
from coldstream.kernels.experts.split import NUM_WORDS, MissTimes
from coldstream.kernels.experts.stage import stage_experts_cuda
from coldstream.kernels.experts.stamps import WORDS
from coldstream.kernels.experts.wait_answer import wait_answer_cuda
from coldstream.kernels.ops import ExpertOutputs, ExpertWeights, RouterWeights, Routing, RowsElsewhere
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.router.cuda import Ahead
from coldstream.placement.cost import GUESSED


class DecodeExperts:
    """Steps of at most `max_rows` rows, as many as the mailbox has.

    times: int32 [NUM_WORDS] on the device, see `sharing_of`. tried_times: those of the first layer. stamps:
    int64 [layers, WORDS], see `kernels/experts/stamps.py`. chosen: what a step's routers choose. ring: None
    if nothing is prefetched. staging: uint8 on the device, for the experts of a layer that are copied over
    the bus. The CPU computes experts for which it has no place. Between two steps it is free for other uses.
    ends_requests: whether the mailbox is that of a further card, and has to know when a step asks no more.
    """

    def __init__(
        self,
        kernels: MoeKernels,
        tables: PartialTables,
        mailbox: Mailbox,
        chosen: ChosenExperts,
        ring: PrefetchRing | None,
        staging: DeviceArray,
        *,
        ends_requests: bool = False,
    ) -> None:
        device = kernels.device
        self._ends_requests, self._may_ask = ends_requests, False
        self.max_rows = len(mailbox.ids)
        self._kernels, self._device, self._tables = kernels, device, tables
        self._mailbox, self.chosen, self._ring, self._staging = mailbox, chosen, ring, staging
        self.times = device.zeros((NUM_WORDS,), "int32")
        self.tried_times = device.zeros((NUM_WORDS,), "int32")
        self.stamps = device.zeros((chosen.num_layers, WORDS), "int64")
        self._beside: streams.Stream | None = None  # stream of prefetches, joined only at a step's end
        if ring is not None and not device.planning:
            self._beside = streams.Stream()
        self._has_forked = False  # whether the current step has work on `_beside`
        self._starts_ahead = ring is not None and ring.from_start
        # Whether a step of one row uses the ring. The caller changes it between two launches.
        self.is_copying = self._starts_ahead

    def connect(self) -> None:
        """Call once, after `PartialTables.connect`.

        The CPU computes all missing experts of a layer that the device cannot read over the bus. If there is
        such a layer, steps have no more rows than a mailbox takes.
        """
        if not self._tables.is_readable:
            self.max_rows = min(self.max_rows, MAX_MAILBOX_ROWS)

    def set_times(self, times: MissTimes) -> None:
        """Has all layers share out by these times. No step may be running."""
        recall = GUESSED if self.num_places else None
        words = times.words(recall, self.num_places if self._starts_ahead else 0)
        for table in (self.times, self.tried_times):
            write(table, np.array(words, np.int32))

    @property
    def num_places(self) -> int:
        """Of a layer's experts, to which they may be copied before their router has run."""
        if self._ring is None or not self._tables.reads_any or not self._tables.can_look_ahead:
            return 0
        return self._ring.num_experts

    @property
    def starts_ahead(self) -> bool:
        """Whether steps use these places from the start. Those of several rows do, or never do."""
        return self._starts_ahead

    def guesses(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows guesses at experts that are copied ahead."""
        is_copying = self.is_copying if num_rows == 1 else self._starts_ahead
        return is_copying and num_rows <= MAX_GEMV_ROWS and self.num_places > 0

    def form(self, num_rows: int) -> Hashable:
        """What the launches of a step depend on besides its shape."""
        return None if num_rows > 1 or self.is_copying == self._starts_ahead else self.is_copying

    def route(self, x: Activations, weights: RouterWeights, experts: ExpertWeights) -> Routing:
        """See `Executor`; `Routing.places` says where all experts are computed."""
        tokens, ranks = x.shape[0], weights.num_experts_per_tok
        self._may_ask = True
        is_one_launch = self._kernels.routes_at_once(tokens, weights.shared_gate)
        layer = self._tables.number_of(experts)
        stacks = self._tables.layers[layer]
        places = Partition(
            self._device.empty(len(stacks), len(stacks[0].addresses), dtype="int64"),
            self._device.empty(tokens, ranks, dtype="int32"),
            self.stamps[layer] if is_one_launch else None,
        )
        # The router of a single row shares its pairs out itself, and stages nothing.
        staging = self._staging_for(stacks, tokens * ranks) if tokens > 1 or not is_one_launch else None
        used = self.chosen.used[layer] if tokens <= MAX_MAILBOX_ROWS else None
        times = self.times if layer > 0 else self.tried_times
        shared_out = partial(sharing_of, stacks, times, self._mailbox, layer, places, used, staging=staging)
        ring = self._ring if is_one_launch and self.guesses(tokens) else None
        later = layer + (ring.distance if ring else 1)
        exists = later < len(self._tables.layers)
        is_guessing = ring is not None and exists and self._tables.reads(later)
        is_hinting = is_one_launch and exists and self._hints_at(tokens)
        hints = self._hints(later, ring if is_guessing else None) if is_hinting else None
        ahead = self._ahead(later, tokens, ranks, hints) if is_guessing or is_hinting else None
        if ring is None:
            sharing = shared_out()
        else:
            sharing = shared_out(ring.prefetched(layer, stacks), ring.notes(layer, is_guessing=is_guessing))
        routing = self._kernels.route(x, weights, sharing, ahead)
        if staging is not None and self._tables.reads(layer):
            self._device.launch(stage_experts_cuda, stacks, staging)
        if ring is not None:
            self._look_ahead(ring, layer, tokens, later if is_guessing else None)
        return replace(routing, places=places)

    def _hints_at(self, tokens: int) -> bool:
        """Whether the CPU reads ahead what a step's routers guess: that of one token."""
        looks_ahead = self._tables.is_mapped and self._tables.can_look_ahead
        return tokens == 1 and looks_ahead and not self._ends_requests

    def _hints(self, later: int, ring: PrefetchRing | None) -> Hints:
        """ring: into which missing experts of the layer are copied meanwhile."""
        num_places = ring.num_experts if ring else 0
        return hints_of(self._tables.layers[later], self.times, self._mailbox, later, num_places)

    def _staging_for(self, stacks: Stacks, num_pairs: int) -> Staging:
        """Places for the experts that `num_pairs` pairs of a layer may want."""
        most = min(num_pairs, len(stacks[0].addresses))
        chosen = self._device.empty(1 + most, dtype="int32")
        return Staging(chosen, ExpertPlaces.of(self._staging, stacks, most))

    def _ahead(self, later: int, tokens: int, ranks: int, hints: Hints | None) -> Ahead:
        router = self._tables.routers[later]
        assert isinstance(router.gate, QuantTensor)
        return Ahead(
            as_floats(router.gate),
            self.chosen.guessed[later, :tokens],
            self._device.empty(tokens, router.gate.shape[0]),
            self._device.empty(tokens, ranks),
            hints,
            router.rule,
        )

    def _look_ahead(self, ring: PrefetchRing, layer: int, tokens: int, later: int | None) -> None:
        """Queues what guesses are for behind the router of `layer`: prefetches for layer `later`, if any, and
        of several rows hints at the next layer. The layers before it run beside them and do not wait.

        Hints come a layer later than prefetches: what the CPU computes for a layer of several rows would push
        from its caches what it has read for the one after.
        """
        work: list[Callable[[], None]] = []
        following = layer + 1
        is_guessed = ring.distance <= following < len(self._tables.layers) and self._tables.reads(following)
        if tokens > 1 and is_guessed and self._tables.is_mapped:
            work.append(partial(ring.expect, *self._guess(following, tokens), self.times, self._mailbox))
        if later is not None:
            work.append(partial(ring.fetch, *self._guess(later, tokens), self.times))
        if self._beside is None:
            for launch in work:
                self._device.launch(launch)
        elif work:
            self._beside.wait_stream(streams.current_stream())
            with streams.on_stream(self._beside):
                for launch in work:
                    launch()
            self._has_forked = True

    def _guess(self, layer: int, tokens: int) -> tuple[int, DeviceArray, Stacks]:
        return layer, self.chosen.guessed[layer, :tokens], self._tables.layers[layer]

    def finish_step(self) -> None:
        """See `ModelExecutor`."""
        if self._has_forked and self._beside is not None:
            streams.current_stream().wait_stream(self._beside)
        if self._ends_requests and self._may_ask:
            self._device.launch(end_requests_cuda, self._mailbox, len(self._tables.layers))
        self._has_forked = self._may_ask = False

    def compute(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """Queues the pairs whose experts have an address. The CPU computes the others meanwhile."""
        places: Partition = routing.places
        gate, up, down = (
            replace(stack, addresses=addresses)
            for stack, addresses in zip(stacks_of(weights), places.addresses, strict=True)
        )
        routed, shared = self._kernels.outputs(x, routing.ids, replace(weights, gate=gate, up=up, down=down))
        box = self._mailbox
        if len(routing.ids) > MAX_MAILBOX_ROWS:
            self._device.launch(wait_answer_cuda, box.done)
        rows = box.out[: len(routing.ids)]
        elsewhere = RowsElsewhere(places.cpu_ids, rows, box.done, places.stamps, box.is_marked)
        return ExpertOutputs(routed, shared, routing, elsewhere, bias=weights.down_bias)
