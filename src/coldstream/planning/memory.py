"""What a model takes of memory beside its experts, on a GPU and in RAM. Pure, over counted bytes.

`gather.py` counts a GPU's memory by a run over tensors without memory. Without the packages for that it is
estimated from the widths of activations and the length of the context. Counts are looked up in a table, and
those that are not there yet are asked for. They decide how long a step of prefill may be.

On the CPU either all experts are mapped from the file, or some are in the slots of a pool. An embedding that
is not also the head stays in the file and is not counted. Beside a GPU that lacks experts, either the whole
file is mapped and locked in RAM, or there is a pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coldstream.errors import ModelFormatError
from coldstream.experts.staging import NUM_PINNED_BUFFERS, RingShape
from coldstream.kernels.attention.workspace_sizes import PART_ROWS, most_partial_bytes
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.indexer.workspace_sizes import workspace_bytes as indexer_bytes
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache import CacheSize, kept_bytes, kv_token_bytes
from coldstream.models.cuda.capacity import (
    GRAPH_BYTES,
    HEAD_ROWS,
    RESERVE_BYTES,
    mailbox_ranks,
    ngram_bytes,
)
from coldstream.models.runner_capacity import DRAFT_VALUE_BYTES, NO_DRAFTS, DraftMemory, RunnerCapacity
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.layer_plan import least_of_layers
from coldstream.placement.plan import (
    FixedPart,
    PlacementPlan,
    PlanOptions,
    fast_ring,
    least_budget,
    least_of_experts,
    plan_placement,
)
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.unknowns import GpuShape, NotKnownError

Array = np.ndarray[Any, Any]

# Of libraries, the driver and the program, and the buffers through which weights go to the GPU at first:
# twice what they took beside an H200 (docs/notes/memory-tiers.md).
HOST_RESERVE_BYTES: Final = 640 * 2**20
_FLOAT, _ID = 4, 4
_LINES: Final = 2 * 64  # of a mailbox's words


@dataclass(frozen=True)
class RamNeeds:
    """Sizes and fixed parts of a model in RAM, with all experts mapped and with some in slots.

    fixed_in_slots: None for a dense model, whose `in_slots` is `mapped`.
    """

    mapped: ModelSizes
    fixed_mapped: FixedPart
    in_slots: ModelSizes
    fixed_in_slots: FixedPart | None

    def least_bytes(self, options: PlanOptions) -> int:
        """The smallest budget that `place` accepts."""
        if self.fixed_in_slots is None:
            return self._whole_bytes
        in_slots = least_budget(self.in_slots, self.fixed_in_slots, self._slot_options(options))
        return min(self._whole_bytes, in_slots)

    def with_prompt_cache(self, num_bytes: int) -> "RamNeeds":
        """The needs of the model beside so many bytes of kept prefixes of prompts."""
        in_slots = self.fixed_in_slots and replace(self.fixed_in_slots, prompt_cache=num_bytes)
        mapped = replace(self.fixed_mapped, prompt_cache=num_bytes)
        return replace(self, fixed_mapped=mapped, fixed_in_slots=in_slots)

    def fixed_part_for(self, placement: PlacementPlan) -> FixedPart:
        """The fixed part that `placement`, a plan of this model, must have."""
        if placement.is_all_resident or self.fixed_in_slots is None:
            return self.fixed_mapped
        return self.fixed_in_slots

    def place(self, budget_bytes: int, uses: Array | None, options: PlanOptions) -> PlacementPlan:
        """The placement in RAM, with all experts if the budget allows. Raises as `plan_placement`."""
        if self.fixed_in_slots is None or self._whole_bytes <= max(budget_bytes, self.least_bytes(options)):
            sizes, fixed = self.mapped, self.fixed_mapped
            options = replace(options, min_per_size=sizes.num_experts * sizes.num_layers, has_ring=False)
        else:
            sizes, fixed, options = self.in_slots, self.fixed_in_slots, self._slot_options(options)
        return plan_placement(sizes, fixed, budget_bytes, tier="ram", uses=uses, options=options)

    @property
    def _whole_bytes(self) -> int:
        return self.fixed_mapped.total + self.mapped.all_expert_bytes

    def _slot_options(self, options: PlanOptions) -> PlanOptions:
        """Slots for a token's experts of a layer, at least; no ring, as experts are read into their slots."""
        return replace(options, min_per_size=self.in_slots.num_experts_per_tok, has_ring=False)


def buffer_bytes(spec: ModelSpec, placement: PlacementPlan, max_cpu_rows: int) -> int:
    """Page-locked RAM of a runner on a GPU with this placement: what it allocates in `experts/host.py` and
    `experts/copies.py`, for logits and for an embedding; and rows of n-grams.
    """
    ranks, size = mailbox_ranks(spec), spec.hidden_size
    sizes = [
        placement.fixed.host_tables,
        placement.fixed.host_ngrams,
        placement.fixed.chunk_size * ranks * _ID,
        HEAD_ROWS * spec.vocab_size * _FLOAT,
    ]
    for rows in (MAX_MAILBOX_ROWS, max(1, max_cpu_rows)):
        sizes += [_LINES, rows * size * _FLOAT, rows * ranks * _ID, rows * ranks * size * _FLOAT]
    if spec.is_moe:
        sizes += [RingShape.of(placement.ring_bytes).buffer_bytes] * NUM_PINNED_BUFFERS
    return sum(sizes)


# By tokens of a prefill step: the share that its activations may take of the memory left by weights and
# caches. Each step copies its missing experts over the bus once, so short steps cost more than a few slots.
_WORKSPACE_SHARES: Final = {16384: 0.125, 8192: 0.25, 4096: 0.25, 2048: 1.0, 1024: 1.0, 512: 1.0, 256: 1.0}
CHUNK_SIZES: Final = tuple(_WORKSPACE_SHARES)
SHORT_CHUNK: Final = 2048  # shorter ones don't fill a GPU
_SHORTEST_CHUNK: Final = 512  # longer ones gain less than a fast ring does (docs/notes/streaming.md)
_NO_OPTIONS: Final = PlanOptions()
_FLOATS_BESIDE_EXPERTS: Final = 9  # activations of a token in hidden states, plus one per expert
_FLOATS_OF_A_STREAM: Final = (
    4  # plus these where there are several: before and after an update, normed, gates
)


@dataclass(frozen=True)
class GpuMemory:
    """A model with one context on a GPU. `counts`: what has been counted so far; None: all is estimated."""

    spec: ModelSpec
    sizes: ModelSizes
    nextn_bytes: int  # weights of the block for multi-token prediction
    counts: Mapping[GpuShape, FixedPart | ModelFormatError] | None
    ctx_size: int
    kv_type: str
    num_contexts: int = 1
    draft: DraftMemory = NO_DRAFTS
    attention_window: int | None = None
    has_host_tables: bool = True  # whether the embedding may be in RAM
    options: PlanOptions = _NO_OPTIONS

    def fixed_part(self, budget: int) -> FixedPart:
        """The fixed part with the longest prefill steps of modest activations.

        The embedding, of which a token reads a row, is in RAM where the GPU would lack experts otherwise.
        Steps are shorter if all experts fit only then, but long ones only down to 2048 tokens. If there is
        room beside all experts, there are states for as many sequences as are useful in a step. Raises
        NotKnownError, and the error of a file that cannot be counted.
        """
        experts = self.sizes.all_expert_bytes
        if self.sizes.dense_bytes + experts <= budget:  # known before anything is counted
            whole = replace(self, has_host_tables=False)._chosen_part(budget)
            if whole.total + experts <= budget:
                return whole
        return self._chosen_part(budget)

    def _chosen_part(self, budget: int) -> FixedPart:
        chosen = self._part(self._chunk_size(budget))
        if chosen.total + self.sizes.all_expert_bytes > budget:
            return chosen  # not counted with more states, which take no less
        generous = self._part(chosen.chunk_size, is_scarce=False)
        return generous if generous.total + self.sizes.all_expert_bytes <= budget else chosen

    def _chunk_size(self, budget: int) -> int:
        modest = self._longest_modest(budget)
        part, left = self._part(modest), budget - self.sizes.all_expert_bytes
        if _without_workspace(part) < left < part.total:
            least = SHORT_CHUNK if modest > SHORT_CHUNK else CHUNK_SIZES[-1]
            shorter = [size for size in CHUNK_SIZES if least <= size < modest]
            return next((size for size in shorter if self._part(size).total <= left), modest)
        return modest

    def _longest_modest(self, budget: int) -> int:
        """The longest step of modest activations, or the shortest one if none is.

        A longer step takes more workspace and is granted no larger share of the rest. So all steps that are
        shorter than a modest one are modest too. Few are counted: those about the estimate.
        """
        near = [i for i, size in enumerate(CHUNK_SIZES) if self.is_modest(self._estimate(size), budget)]
        at = near[0] if near else len(CHUNK_SIZES) - 1
        while at > 0 and self.is_modest(self._part(CHUNK_SIZES[at - 1]), budget):
            at -= 1
        return next(
            (size for size in CHUNK_SIZES[at:] if self.is_modest(self._part(size), budget)), CHUNK_SIZES[-1]
        )

    def is_modest(self, part: FixedPart, budget: int) -> bool:
        """Whether the activations of a step take no more than their share of what weights and caches leave.

        They leave room for experts that have to be resident, and for a ring, for longer steps a fast one.
        """
        left = budget - _without_workspace(part)
        beside = self._beside(is_fast=part.chunk_size > _SHORTEST_CHUNK)
        return part.workspace <= min(left - beside, max(0, left) * _WORKSPACE_SHARES[part.chunk_size])

    def _beside(self, *, is_fast: bool) -> int:
        """Bytes of experts, or layers, and of the ring, that are there with the shortest and longer steps."""
        if self.sizes.is_dense:
            return sum(least_of_layers(self.sizes, self.options))
        ring, first = least_of_experts(self.sizes, self.options)
        return first + (max(ring, fast_ring(self.sizes)) if ring and is_fast else ring)

    def _part(self, chunk_size: int, *, is_scarce: bool = True) -> FixedPart:
        if self.counts is None:
            return self._estimate(chunk_size, is_scarce=is_scarce)
        shape = GpuShape(self._capacity(chunk_size, is_scarce), chunk_size, self.attention_window)
        found = self.counts.get(shape)
        if found is None:
            raise NotKnownError(shape)
        if isinstance(found, ModelFormatError):
            raise found
        return self._with_tables(replace(found, num_contexts=self.num_contexts))

    def _estimate(self, chunk_size: int, *, is_scarce: bool = True) -> FixedPart:
        capacity = self._capacity(chunk_size, is_scarce)
        part = estimated(self._windowed, self.sizes, self.nextn_bytes, capacity, chunk_size)
        return self._with_tables(replace(part, num_contexts=self.num_contexts))

    def _with_tables(self, part: FixedPart) -> FixedPart:
        """`part`, whose tables are in RAM, with them where they are to be."""
        if self.has_host_tables:
            return part
        return replace(part, weights=part.weights + part.host_tables, host_tables=0)

    @property
    def _windowed(self) -> ModelSpec:
        return self.spec.with_window(self.attention_window)

    def _capacity(self, chunk_size: int, is_scarce: bool) -> RunnerCapacity:
        cache_size = CacheSize.shared(
            self._windowed,
            self.ctx_size,
            self.kv_type,
            is_scarce=is_scarce,
            num_rows=chunk_size,
            num_tree_rows=self.draft.num_tree_rows,
            num_contexts=self.num_contexts,
        )
        return RunnerCapacity(self.ctx_size, self.kv_type, cache_size, self.draft)


def _without_workspace(part: FixedPart) -> int:
    return part.total - part.workspace


def least_bytes(spec: ModelSpec, sizes: ModelSizes) -> int:
    """About the smallest fixed part without caches, which a default context must leave free."""
    reserved = GRAPH_BYTES + RESERVE_BYTES
    weights = sizes.dense_bytes - sizes.table_bytes
    return weights + sizes.state_bytes + reserved + _activation_bytes(spec, CHUNK_SIZES[-1])


def estimated(
    spec: ModelSpec, sizes: ModelSizes, nextn_bytes: int, capacity: RunnerCapacity, chunk_size: int
) -> FixedPart:
    """About what `count_on_gpu` counts, with the embedding in RAM too."""
    draft, cache_size = capacity.draft, capacity.cache_size
    drafted_bytes = kv_token_bytes(spec.nextn, capacity.kv_type) if draft.has_mtp else 0
    # With several residual streams the block reads them of any row of a step.
    has_streams = draft.has_mtp and spec.hyper_connections is not None
    stream_bytes = 4 * chunk_size * spec.nextn_state_size if has_streams else 0
    return FixedPart(
        ctx_size=capacity.ctx_size,
        kv_type=capacity.kv_type,
        chunk_size=chunk_size,
        weights=sizes.dense_bytes - sizes.table_bytes + (nextn_bytes if draft.has_mtp else 0),
        caches=cache_size.kv_bytes(spec, capacity.kv_type)
        + cache_size.num_blocks * BLOCK_POSITIONS * drafted_bytes
        + cache_size.num_states * sizes.state_bytes
        + cache_size.num_tree_rows * kept_bytes(spec)
        + DRAFT_VALUE_BYTES["cuda"] * len(draft.aux_layers) * chunk_size * spec.hidden_size
        + stream_bytes,
        workspace=_workspace_bytes(spec, capacity.ctx_size, chunk_size),
        drafter=draft.drafter_bytes,
        graphs=GRAPH_BYTES,
        reserve=RESERVE_BYTES,
        num_sequences=cache_size.num_states,
        num_tree_rows=cache_size.num_tree_rows,
        num_window_blocks=cache_size.num_window_blocks,
        window_caches=cache_size.window_bytes(spec, capacity.kv_type),
        host_tables=sizes.table_bytes,
        host_ngrams=ngram_bytes(spec, chunk_size),
    )


def _workspace_bytes(spec: ModelSpec, ctx_size: int, chunk_size: int) -> int:
    """Of a prefill step or, if that takes more, of one whose attention merges chunks of positions."""
    sizes = {(each.num_heads, each.head_dim) for each in spec.attentions}
    partial_bytes = max((most_partial_bytes(*each, ctx_size) for each in sizes), default=0)
    # About three quarters of the activations are there beside these chunks; the others are experts'.
    beside = 3 * _activation_bytes(spec, min(chunk_size, PART_ROWS)) // 4
    activations = max(_activation_bytes(spec, chunk_size), partial_bytes + beside)
    if spec.indexer is None or not spec.for_context(ctx_size).is_indexed:
        return activations
    indexer = spec.indexer
    row_numbers, num_blocks = indexer.num_heads * indexer.head_dim, -(-ctx_size // indexer.block_size)
    return activations + indexer_bytes(chunk_size, row_numbers, num_blocks)


def _activation_bytes(spec: ModelSpec, chunk_size: int) -> int:
    streams = spec.hyper_connections.num_streams if spec.hyper_connections else 0
    floats = _FLOATS_BESIDE_EXPERTS + spec.num_experts_per_tok + _FLOATS_OF_A_STREAM * streams
    return 4 * chunk_size * spec.hidden_size * floats
