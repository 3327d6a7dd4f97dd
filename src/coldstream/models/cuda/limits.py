"""What a runner on a GPU can hold, and which of its steps are captured graphs."""

from dataclasses import dataclass, replace
from typing import Self

from coldstream.errors import UnsupportedError
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS
from coldstream.kvcache.cache import CacheSize
from coldstream.models.cuda.capacity import HEAD_ROWS
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.run_plan import RunPlan

# Steps up to this size are captured: to launch them from Python takes longer than to compute them.
# Graphs exist for some sizes only. Other steps are padded to the next size with rows of no sequence.
MAX_GRAPH_ROWS = 2048
SIZES_PER_DOUBLING = 8
SMALLEST_PADDED_ROWS = 17


@dataclass(frozen=True)
class Limits:
    """Capacity of a runner: sequences, tokens of each, the type of their keys and values, and experts."""

    cache_size: CacheSize
    context_length: int
    kv_type: str
    expert_bytes: int | None = None  # device memory of slots; None: all experts are on the device
    whole_layers: frozenset[int] = frozenset()  # layers with all experts on the device, outside of slots
    ring_bytes: int = 0  # of the ring into which missing experts are copied
    prefetching: Prefetching | None = None  # of experts into the ring before their router has run
    shared_rows: int = MAX_MAILBOX_ROWS  # most rows of a step in which the device shares missing experts out
    is_served_by_card: bool = False  # whether a further card computes what such a step asks for
    is_dense: bool = False  # whether its layers have no experts, and FFNs may be missing
    has_mtp: bool = False  # whether the file's block for multi-token prediction is loaded too
    aux_layers: tuple[int, ...] = ()  # layers whose residual streams are kept for a drafter
    has_host_tables: bool = False  # whether the embedding is in page-locked RAM, where the device reads it

    def __post_init__(self) -> None:
        """UnsupportedError if there are no GPU kernels for the type of keys and values."""
        if self.kv_type not in INTEGER_CACHE_TYPES:
            raise UnsupportedError(
                f"no GPU kernels for keys and values in {self.kv_type} are supported: use "
                f"one of {', '.join(INTEGER_CACHE_TYPES)}, or --device cpu"
            )

    @classmethod
    def of(
        cls, plan: RunPlan, spec: ModelSpec, cache_size: CacheSize | None, aux_layers: tuple[int, ...] = ()
    ) -> Self:
        """Those of a plan for the model. cache_size: None for the plan's. Raises as creation."""
        placement, fixed = plan.placement, plan.placement.fixed
        cache_size = cache_size or CacheSize.planned(fixed)
        limits = cls(
            cache_size,
            fixed.ctx_size,
            fixed.kv_type,
            has_mtp=plan.spec_type == "mtp",
            aux_layers=aux_layers,
            has_host_tables=fixed.host_tables > 0,
        )
        if placement.is_all_resident:
            return limits
        pinned = placement.pinned_layers
        whole = sum(placement.model.num_experts * placement.expert_bytes[layer] for layer in pinned)
        return replace(
            limits,
            expert_bytes=placement.resident_bytes - whole,
            is_dense=not spec.is_moe,
            whole_layers=frozenset(spec.placed_layers[layer] for layer in pinned),
            ring_bytes=placement.ring_bytes,
            prefetching=Prefetching.planned(
                plan.layers_ahead, plan.prefetch, plan.prefetch_bytes, from_start=plan.ahead != "later"
            ),
            shared_rows=plan.shared_rows,
            is_served_by_card=plan.card is not None,
        )

    @property
    def has_trees(self) -> bool:
        """Whether rows of draft trees may be computed."""
        return self.cache_size.num_tree_rows > 0

    @property
    def most_chosen(self) -> int:
        """The most tokens chosen at once: one for each sequence and each row of trees."""
        return min(HEAD_ROWS, self.cache_size.num_states + self.cache_size.num_tree_rows)

    def is_captured(self, rows: int) -> bool:
        """Whether steps of `rows` rows are graphs: not if the host shares out their experts."""
        is_shared_out = self.expert_bytes is not None and not self.is_dense
        return rows <= (self.shared_rows if is_shared_out else MAX_GRAPH_ROWS)

    def is_recorded(self, rows: int) -> bool:
        """Whether steps of `rows` rows are graphs, between which the host shares out experts."""
        return not self.is_captured(rows) and rows <= MAX_GRAPH_ROWS

    def keeps_hidden(self, rows: int) -> bool:
        """Whether steps of `rows` rows leave hidden states in memory of their own, not in their workspace."""
        return self.is_captured(rows) or self.is_recorded(rows)

    def rows_of(self, count: int, most: int) -> int:
        """Rows of the step that computes `count` rows, where steps have `most`."""
        return padded_rows(count) if self.is_captured(count) else min(padded_rows(count), most)


def padded_rows(count: int) -> int:
    """Rows of the graph that computes `count` rows: `count` itself for the smallest and the largest steps."""
    if not SMALLEST_PADDED_ROWS <= count <= MAX_GRAPH_ROWS:
        return count
    step = max(1, 2 ** (count - 1).bit_length() // 2 // SIZES_PER_DOUBLING)
    rows: int = -(-count // step) * step
    return rows
