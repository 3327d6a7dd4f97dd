"""Facts: what a plan follows from beside the settings, as plain data.

`gather.py` collects them from an open file, the machine and a drafter. What takes time to find out is counted
or measured once a choice asks for it, and is in the tables from then on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from coldstream.errors import ModelFormatError
from coldstream.kvcache.cache import kv_token_bytes
from coldstream.models.dflash.spec import DflashSpec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import PUBLISHED, HitCurve
from coldstream.placement.lock_file import LockRefusal
from coldstream.placement.plan import FixedPart, PlacementPlan
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.unknowns import (
    GpuShape,
    MachineRates,
    NotKnownError,
    RamParts,
    RamShape,
    WorkspaceShape,
)

Array = np.ndarray[Any, Any]


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class ModelFacts:
    """What the header of a model's file says. Sizes are without keys and values, whose type is a setting."""

    spec: ModelSpec
    on_gpu: ModelSizes  # with experts in a GPU's slots; the FFN of a dense layer counts as an expert
    mapped: ModelSizes  # with experts mapped in RAM
    in_slots: ModelSizes  # with experts in slots in RAM; for a dense model the same as `mapped`
    nextn_bytes: int  # weights of the block for multi-token prediction
    drafted_share: float | None  # of a plain token's bytes, what a token drafted by that block reads, if any
    layer_shards: tuple[frozenset[int], ...]  # parts of the file with what a GPU may lack, by layer
    shard_bytes: tuple[int, ...]

    @property
    def all_sizes(self) -> tuple[ModelSizes, ...]:
        """Those of each memory that experts may be in."""
        return self.on_gpu, self.mapped, self.in_slots

    def mapped_bytes(self, placement: PlacementPlan) -> int:
        """Bytes of the parts of the file that are locked in RAM if a GPU with this placement maps experts."""
        partial = [of for layer, of in enumerate(self.layer_shards) if layer not in placement.pinned_layers]
        return sum(self.shard_bytes[shard] for shard in frozenset().union(*partial))

    def sizes_for(self, placement: PlacementPlan) -> ModelSizes:
        """Those of experts where `placement`, a plan of this model, has them."""
        if placement.tier == "vram":
            return self.on_gpu
        return self.mapped if placement.is_all_resident else self.in_slots


def with_kv_type(sizes: ModelSizes, spec: ModelSpec, kv_type: str) -> ModelSizes:
    """`sizes` with keys and values of this type. ValueError if the model's heads do not fit it."""
    return replace(sizes, kv_token_bytes=kv_token_bytes(spec, kv_type))


@dataclass(frozen=True)
class DraftNeeds:
    """What a drafter needs of a model and of its memory."""

    spec: DflashSpec
    weight_bytes: int  # on a GPU with the workspace of its steps
    value_bytes: int  # of a key or value

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the model after which it reads the residual stream."""
        return self.spec.aux_layers

    def num_bytes(self, context_length: int, num_contexts: int) -> int:
        """Of its weights, and of its keys and values of contexts."""
        rows = num_contexts * self.spec.context_rows(context_length)
        return self.weight_bytes + self.value_bytes * 2 * rows * self.spec.kv_dim


@dataclass(frozen=True)
class Counts:
    """What has been counted so far, by what it was counted for.

    An error stands for a file that cannot be counted so: of a block for drafts, say, that is left out then.
    """

    on_gpu: Mapping[GpuShape, FixedPart | ModelFormatError] = field(default_factory=_nothing)
    in_ram: Mapping[RamShape, RamParts | ModelFormatError] = field(default_factory=_nothing)
    workspaces: Mapping[WorkspaceShape, int] = field(default_factory=_nothing)


@dataclass(frozen=True)
class Facts:
    """All that a plan follows from beside the settings."""

    model: ModelFacts
    hardware: Hardware
    has_rates: bool  # whether the rates of `hardware` are all that can be known
    is_estimated: bool  # whether packages are missing that count a GPU's memory
    trace: RoutingTrace | None = None  # of the model's routing
    drafter: DraftNeeds | None = None
    given: RunPlan | None = None  # the plan that the settings name
    counts: Counts = Counts()
    refusal: LockRefusal | None = None  # what the machine refused to page-lock last

    @property
    def uses(self) -> Array | None:
        """Uses a step of each expert, float64 [layers, experts]; None if there is no trace."""
        return None if self.trace is None else expected_uses(self.trace)

    def locked_share(self, placement: PlacementPlan, pool: PoolPlan | None) -> float:
        """Of the pool, or of the mapped file of a GPU with this placement, what the GPU may read as far as is
        known.
        """
        if self.refusal is None:
            return 1.0
        num_bytes = self.model.mapped_bytes(placement) if pool is None else pool.slot_bytes
        return self.refusal.share_of(num_bytes, in_pool=pool is not None)

    def rated_hardware(self) -> Hardware:
        """The machine with its rates. Raises NotKnownError."""
        if not self.has_rates:
            raise NotKnownError(MachineRates())
        return self.hardware

    def ram_parts(self, shape: RamShape) -> RamParts:
        """Raises NotKnownError, and the error of a file that cannot be counted."""
        found = self.counts.in_ram.get(shape)
        if found is None:
            raise NotKnownError(shape)
        if isinstance(found, ModelFormatError):
            raise found
        return found

    def workspace_bytes(self, shape: WorkspaceShape) -> int:
        """Raises NotKnownError."""
        if shape not in self.counts.workspaces:
            raise NotKnownError(shape)
        return self.counts.workspaces[shape]


def expected_uses(trace: RoutingTrace) -> Array:
    """Uses a step of each expert, float64 [layers, experts]."""
    return trace.counts() / trace.num_steps


def hit_curve(trace: RoutingTrace | None, placement: PlacementPlan) -> HitCurve:
    """The hit rate by the share of experts that fits, with the weights of layers of `placement`."""
    return HitCurve.from_trace(trace, placement.expert_weights) if trace else PUBLISHED
