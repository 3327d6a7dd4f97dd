"""The work around each step of a model whose GPU does not hold all experts."""

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coldstream.errors import OutOfMemoryError, UnsupportedError
from coldstream.experts.card_experts import CardExperts, CardLayer
from coldstream.experts.chosen_experts import ExpertIds
from coldstream.experts.copies_ahead import CopiesAhead
from coldstream.experts.cpu.disk_tier import DiskStatistics, Progress
from coldstream.experts.decode import DecodeExperts
from coldstream.experts.executor import PartialExecutor
from coldstream.experts.expert_map import ExpertMap
from coldstream.experts.gpu_statistics import (
    ExpertTimes,
    GpuExpertStatistics,
    LayerTotals,
    MissShareStatistics,
    StepTimes,
)
from coldstream.experts.host import HostExperts
from coldstream.experts.miss_shares import MissShares, PromptStep, StampedShares, StampsOfAStep
from coldstream.experts.prefetch import GuessCounter, PrefetchStatistics
from coldstream.experts.prefill import ExpertStream, StreamCounters
from coldstream.experts.ram_pool import RamPool
from coldstream.experts.slots.cache import ExpertCache
from coldstream.experts.slots.residency import ExpertResidency, expert_bytes
from coldstream.experts.slots.segments import SlotSegments
from coldstream.kernels.cuda.contents import clear, read
from coldstream.kernels.cuda.memory import own_bytes
from coldstream.kernels.cuda.runtime import calls
from coldstream.kernels.experts.cuda_layer import stacks_of
from coldstream.kernels.experts.executor import ModelExecutor
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS, Mailbox
from coldstream.kernels.experts.split import MissTimes
from coldstream.kernels.experts.stamps import read_stamps
from coldstream.placement.controls import Controls, Moves
from coldstream.placement.policies import DecayedFrequency, Policy
from coldstream.placement.run_file import Observed
from coldstream.placement.run_plan import RunPlan

Array = np.ndarray[Any, Any]

# Steps between two attempts to take freed memory for slots again: asking for free memory takes time.
STEPS_BEFORE_GROWTH = 256


@dataclass(frozen=True)
class SlotShares:
    """Slots, experts that are loaded first, and expected uses, of the layers that may miss an expert."""

    layer_bytes: list[int]  # bytes of an expert, by layer
    num_slots: dict[int, int]  # by bytes of an expert
    residents: list[int]  # numbers of experts, ascending
    uses: Array | None  # expected uses per step, float64 [layers, experts], if known
    weights: Array | None  # weight of a use, float64 [layers · experts]; None: 1


def slot_shares(plan: RunPlan) -> SlotShares:
    """The part of `plan`, a plan for a GPU, about layers whose experts are kept in slots.

    Experts of pinned layers are ordinary weights. The other layers are numbered from 0.
    """
    placement = plan.placement
    layers = [layer for layer in range(placement.model.num_layers) if layer not in placement.pinned_layers]
    counts: Counter[int] = Counter()
    residents = []
    for number, layer in enumerate(layers):
        counts[placement.expert_bytes[layer]] += len(plan.loaded[layer])
        residents += [number * placement.model.num_experts + expert for expert in plan.loaded[layer]]
    uses, weights = plan.expected_uses, placement.expert_weights
    if weights is not None:
        weights = weights.reshape(placement.model.num_layers, -1)[layers].reshape(-1)
    return SlotShares(
        layer_bytes=[placement.expert_bytes[layer] for layer in layers],
        num_slots=dict(counts),
        residents=residents,
        uses=None if uses is None else uses[layers],
        weights=weights,
    )


@dataclass(frozen=True)
class _StepInFlight:
    """A step that may be running.

    ids: its experts, by row; None if the policy learns nothing from them. resident: for a step that guesses,
    which experts have a slot in it.
    """

    ids: ExpertIds | None
    guesses: bool
    resident: Array | None
    stamps: StampsOfAStep | PromptStep | None


class PartialExperts:
    """Experts in slots and in the host's memory, and what is done about them around each step.

    mailbox: for all layers of the model. pool: that of the plan, or None. A step may be launched while the
    one before runs, unless it `must_wait`.
    """

    def __init__(self, mailbox: Mailbox, plan: RunPlan, pool: RamPool | None = None) -> None:
        self._plan = plan
        ranks, hidden_size = mailbox.ids.shape[1], mailbox.x.shape[1]
        # A mailbox has at least one row. Steps that could use this one have more.
        bulk = Mailbox.create(ranks, hidden_size, max(1, plan.max_cpu_rows))
        self.host = HostExperts(
            plan.threads,
            mailbox,
            bulk,
            plan.placement.fixed.chunk_size,
            pool,
            is_served_by_card=plan.card is not None,
        )
        self._executor: PartialExecutor | None = None
        self._reserved: tuple[ExpertCache, SlotSegments] | None = None  # until they are filled
        self._residency: ExpertResidency | None = None
        self._guesses: GuessCounter | None = None
        self._controls, self._times = Controls(), plan.miss_times
        self._shares: StampedShares | None = None
        self._layer_totals, self._copied_bytes = LayerTotals(), 0
        self._rows = 0  # of the step that began last
        self._in_flight: deque[_StepInFlight] = deque()
        self._ended: list[_StepInFlight] = []  # since `_prepare`
        self._is_due = False  # `_prepare`, which comes once after each launch
        self._has_streamed = False  # whether the last step used `_stream`
        self._steps_until_growth = 0  # 0: all slots are there

    def attach(self, executor: ModelExecutor) -> None:
        """Call once, before the executor's first step.

        Until `connect` the CPU computes all missing experts, and steps have at most MAX_MAILBOX_ROWS rows.
        """
        assert isinstance(executor, PartialExecutor)
        self._executor = executor
        if executor.prefetch is not None:
            prefetch, num_layers = executor.prefetch, executor.decode.chosen.num_layers
            self._guesses = GuessCounter(num_layers, prefetch.distance, prefetch.num_experts)

    def load_card(self, progress: Progress | None = None) -> None:
        """Copies experts to the plan's further card, if there is one. Call once after `attach`.

        Raises UnsupportedError, OutOfMemoryError, DeviceError, ModelChangedError.
        """
        assert self._executor is not None, "a card serves an executor"
        if self._plan.card is not None:
            tables = self._executor.tables
            if any(each.biases is not None for each in tables.experts):
                raise UnsupportedError("experts with biases are not computed by a second card: use one card")
            layers = [CardLayer(stacks_of(each), each.activation) for each in tables.experts]
            self.host.use_card(CardExperts(self._plan.card, self.host, layers, progress))

    def connect(self) -> None:
        """Lets the device read the mapped file in later steps. Waits until it is locked.

        No step may be running, and none may have been captured. Raises as `PartialExecutor.connect`.
        """
        assert self._executor is not None, "what is connected is an executor"
        self._executor.connect()

    def reserve(self, policy: Policy | None = None) -> None:
        """Allocates the plan's slots on the device, for `fill`. Call after warm-up steps.

        policy: None for the default. Raises DeviceError, OutOfMemoryError.
        """
        executor, plan = self._executor, self._plan
        assert executor is not None, "slots are for the layers of an executor"
        layers = executor.tables.layers
        shares = slot_shares(plan)
        assert shares.layer_bytes == [expert_bytes(stacks) for stacks in layers], "a plan has their sizes"
        counts = shares.num_slots
        cache = ExpertCache(
            shares.layer_bytes,
            plan.placement.model.num_experts,
            counts,
            policy or DecayedFrequency.for_late_copies(weights=shares.weights),
            profile=shares.uses,
            max_bytes_per_step=plan.copy_bytes_per_step,
        )
        self._reserved = cache, SlotSegments(counts, own_bytes)

    @property
    def is_filled(self) -> bool:
        """Whether `fill` was called."""
        return self._residency is not None

    def fill(self, progress: Progress | None = None) -> None:
        """Fills the slots and the pool. Call once after `reserve` and `connect`, while no step runs.

        progress: see `RamPool.load`. Raises DeviceError, ModelChangedError.
        """
        executor, plan = self._executor, self._plan
        assert executor is not None, "slots are for the layers of an executor"
        assert self._reserved is not None, "slots are filled once they are reserved"
        if self._times is not None:
            executor.set_times(self._times)
        pool = self.host.pool
        if pool is not None:
            pool.empty()  # of experts that the warm-up steps used
        self._residency = ExpertResidency(executor.tables.layers, *self._reserved, pool)
        self._reserved = None
        self._residency.load(slot_shares(plan).residents)
        if pool is not None and plan.pool is not None:
            parts = zip(plan.pool.loaded, plan.pool.expert_bytes, strict=True)
            pool.load([ids for ids, size in parts if size], progress)
            pool.order(self._residency.cache.scores, self._residency.resident.reshape(-1))
        # The steps before are not counted.
        clear(executor.decode.stamps)
        if executor.prefetch is not None:
            clear(executor.prefetch.tallies)
        self._begin_shares()

    def control(self, controls: Controls) -> None:
        """From now on what `controls` says moves by what steps took. No step may be running."""
        self._controls = controls
        self._begin_shares()

    def _begin_shares(self) -> None:
        executor, times = self._executor, self._times
        is_fixed = self._controls == Controls() or self._plan.card is not None
        if is_fixed or executor is None or times is None or self._residency is None:
            self._shares = None
        elif executor.tables.is_readable:
            decode, num_layers = executor.decode, len(executor.tables.layers)
            num_ranks = self._plan.placement.model.num_experts_per_tok
            ahead = self._copies_ahead(decode)
            shares = MissShares(times, self.host.ops.threads, self._controls, ahead, num_ranks)
            server, counters = self.host.server, self._residency.cache.counters
            self._shares = StampedShares(
                decode,
                shares,
                server.work,
                server.expected,
                num_layers,
                self._guesses,
                lambda: int(counters.misses.sum()),
            )

    def _copies_ahead(self, decode: DecodeExperts) -> CopiesAhead | None:
        """How many of a token's experts are copied ahead, within what the plan leaves open."""
        most = decode.num_places
        if not most:
            return None
        first = most if decode.starts_ahead else 0
        is_open = self._plan.ahead != "fixed" and self._controls.ahead is not Moves.NEVER
        return CopiesAhead(0, most, first) if is_open else CopiesAhead(first, first, first)

    def set_times(self, times: MissTimes) -> None:
        """Has missing experts divided by these times, and no longer by the plan's or what steps took. If
        shares move, they begin there. No step may be running.
        """
        assert self._executor is not None, "times are read by an executor"
        self._times = times
        self._executor.set_times(times)
        self._begin_shares()

    @property
    def disk(self) -> DiskStatistics | None:
        """Statistics of experts read from the disk into a pool; None if there is none."""
        return None if self.host.pool is None else self.host.pool.statistics()

    @property
    def cache(self) -> ExpertCache | None:
        """None before `reserve`."""
        if self._reserved is not None:
            return self._reserved[0]
        return None if self._residency is None else self._residency.cache

    @property
    def stream_counters(self) -> StreamCounters | None:
        return None if self._stream is None else self._stream.counters

    def expert_map(self, numbers: Sequence[int]) -> ExpertMap | None:
        """Recent uses and the experts in slots, of the layers that may miss some; None before `fill`.

        numbers: the model's, of all layers with experts.
        """
        if self._residency is None:
            return None
        pinned = self._plan.placement.pinned_layers
        layers = [number for layer, number in enumerate(numbers) if layer not in pinned]
        return ExpertMap.of(layers, self._residency.cache.uses, self._residency.resident)

    def statistics(self) -> GpuExpertStatistics | None:
        """Counts and times since the model was opened. None before `fill`. Waits for a running step."""
        executor = self._executor
        if self._residency is None or self._stream is None or executor is None:
            return None
        cache, stream = self._residency.cache, self._stream.counters
        num_experts = len(cache.counters.hits) * self._residency.num_experts
        return GpuExpertStatistics.of(
            self._residency.num_slots,
            num_experts,
            cache.counters,
            self.host.server.work(),
            self.host.server.expected(),
            stream.streamed,
            stream.unused,
            stream.on_cpu,
            self._step_times(executor),
            self._prefetch_statistics(executor),
            self.shares,
        )

    def times(self) -> ExpertTimes | None:
        """Seconds since the model was opened. None before `fill`. Waits for a running step."""
        executor = self._executor
        if self._residency is None or executor is None:
            return None
        self._step_times(executor)
        copied = int(self._residency.cache.counters.copied_bytes.sum())  # less by copies that never began
        self._copied_bytes = max(self._copied_bytes, copied)
        return ExpertTimes(
            self._layer_totals.steps,
            self._layer_totals.seconds,
            sum(seconds for _, _, seconds in self.host.server.work()) + self.host.bulk_seconds,
            self.disk.wait_s if self.disk else 0.0,
            self._copied_bytes,
        )

    @property
    def observed(self) -> Observed | None:
        """What steps of one row took so far, without a look at the device; None: nothing watches them."""
        return None if self._shares is None else self._shares.observed

    @property
    def shares(self) -> MissShareStatistics | None:
        """How missing experts are divided now, without a look at the device; None if that does not move."""
        if self._shares is None:
            return None
        return self._shares.statistics(self._plan.placement.model.num_experts_per_tok)

    def _prefetch_statistics(self, executor: PartialExecutor) -> PrefetchStatistics | None:
        if executor.prefetch is None or self._guesses is None:
            return None
        # Layers that may miss an expert come first.
        layer_bytes = [expert_bytes(stacks) for stacks in executor.tables.layers]
        layer_bytes += [0] * (len(executor.prefetch.tallies) - len(layer_bytes))
        return PrefetchStatistics.of(self._guesses, read(executor.prefetch.tallies), layer_bytes)

    def _step_times(self, executor: PartialExecutor) -> StepTimes:
        """Times of decode steps. Counting starts again after a step that failed."""
        stamps = executor.decode.stamps
        times = StepTimes.of(*read_stamps(stamps[: len(executor.tables.layers)]))
        self._layer_totals.add(times)
        if times.steps == 0:
            clear(stamps)
        return times

    def must_wait(self, rows: int) -> bool:
        """Whether no step of `rows` rows may begin before `ended` was called for all others."""
        streams = self._has_streamed or rows > self.shared_rows  # through a ring that other steps use as well
        return (streams and bool(self._in_flight)) or len(self._in_flight) > 1

    @property
    def shared_rows(self) -> int:
        """Most rows of a step whose experts the device shares out. Only once an executor is attached."""
        assert self._executor is not None, "steps are those of an executor"
        return self._executor.decode.max_rows

    def start_step(self, rows: int) -> None:
        """Call right before a step of `rows` rows is launched."""
        self._rows = rows
        if self._residency is not None:
            self._residency.start_step()
        self.host.use_threads(self._shares.num_threads if self._shares and rows == 1 else None)
        if self._shares is not None and self._executor is not None:
            self._executor.decode.is_copying = self._shares.copies_ahead
        if rows <= self.shared_rows:
            if self._has_streamed and self._stream is not None:
                self._stream.settle()  # experts of a decode step are copied into the same ring
            self._has_streamed = False
            if self._shares is not None:
                self._shares.starting(rows, is_alone=not self._in_flight)
            self.host.begin_step(rows)
        elif self._stream is not None:
            self._has_streamed = True
            if self._residency is not None:
                self._stream.resident = self._residency.resident
            self._stream.start_step(rows)

    @property
    def form(self) -> Hashable:
        """What the launches of the last step depend on, besides its shape, if the host shares it out."""
        assert self._stream is not None, "a ring is there from the first long step on"
        return self._stream.form

    @property
    def decode_form(self) -> Hashable:
        """The same if the device shares it out."""
        return None if self._executor is None else self._executor.decode.form(self._rows)

    def launched(self) -> None:
        """Call right after the launch. Raises DeviceError if an expert could not be copied."""
        executor = self._executor
        assert executor is not None, "steps are those of an executor"
        self.host.step_launched()
        ids, rows = None, self._rows
        if rows <= MAX_MAILBOX_ROWS:
            of_all = executor.decode.chosen.copy()
            ids = ExpertIds(of_all.used[:, :rows], of_all.guessed[:, :rows])
        stamps = self._shares.launched(rows) if self._shares is not None else None
        guesses, residency = executor.decode.guesses(rows), self._residency
        resident = residency.resident.copy() if guesses and residency is not None else None
        self._in_flight.append(_StepInFlight(ids, guesses, resident, stamps))
        self._is_due = True
        if len(self._in_flight) == 1:
            self._prepare()
        self._learn()

    def _learn(self) -> None:
        """Moves shares by the steps that have ended."""
        if self._shares is not None:
            self._shares.learn()

    def left_out(self) -> None:
        """Notes that the last step had no row of a sequence: nothing is learnt from it."""
        if self._in_flight:
            self._in_flight[-1] = replace(self._in_flight[-1], ids=None)

    def _prepare(self) -> None:
        """Prepares the next step, while one runs and the one before has ended."""
        self._is_due = False
        for step in self._ended:
            if self._guesses is not None and step.guesses and step.ids is not None:
                self._guesses.count(step.ids.guessed, step.ids.used, step.resident)
        self._ended.clear()
        if self._residency is not None:
            self._residency.prepare()
            self._grow_in_time(self._residency)

    def shrink(self) -> int:
        """Frees the memory of some slots, when the device is idle. Returns the bytes, 0 if none are left."""
        self._steps_until_growth = STEPS_BEFORE_GROWTH
        return 0 if self._residency is None else self._residency.shrink()

    def _grow_in_time(self, residency: ExpertResidency) -> None:
        """Allocates freed slots again once twice their memory is free: other programs may need some."""
        if self._steps_until_growth == 0:
            return
        self._steps_until_growth -= 1
        if self._steps_until_growth == 0 and residency.missing_bytes:
            if calls.free_memory()[0] >= 2 * residency.missing_bytes:
                with suppress(OutOfMemoryError):
                    residency.grow()
            self._steps_until_growth = STEPS_BEFORE_GROWTH

    def ended(self, num_running: int = 0) -> None:
        """Call when all steps have ended but the last `num_running` that were launched.

        Raises ModelChangedError if one of their experts could not be read, GenerationFault, and DeviceError
        if an expert could not be copied.
        """
        while len(self._in_flight) > num_running:
            self._note(self._in_flight.popleft())
        if self._stream is not None and self._has_streamed:
            self._stream.end_step()
        if not self._in_flight:
            self._learn()
            self.host.server.end()
        try:
            self.host.server.check()
            self.host.mailbox.check()
            self.host.check_card()
        finally:
            if self._is_due and len(self._in_flight) <= 1:
                self._prepare()

    def _note(self, step: _StepInFlight) -> None:
        """Takes note that a step has ended."""
        self._ended.append(step)
        if step.stamps is not None and self._shares is not None:
            self._shares.ended(step.stamps)
        if self._residency is not None:
            num_layers = self._residency.num_layers
            self._residency.ended(None if step.ids is None else step.ids.used[:num_layers])

    @property
    def _stream(self) -> ExpertStream | None:
        return None if self._executor is None else self._executor.prefill.stream

    def close(self) -> None:
        """Call when the device is idle; frees slots and ends threads."""
        if self._residency is not None:
            self._residency.close()
        if self._stream is not None:
            self._stream.close()
        self._residency = self._reserved = self._executor = None
        self.host.close()
