"""A model's RAM on the CPU, with all experts in RAM or some on the disk.

Either all experts are mapped from the file, or some are in the slots of a pool. Both cases are counted by
capturing a forward pass that reads no weights, so that the counts are those of the runner. An embedding that
is not also the head stays in the file and is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coldstream.experts.disk_tier import DiskTier
from coldstream.gguf.reader import GGUFFile
from coldstream.models.expert_stacks import disk_tier
from coldstream.models.footprint import file_bytes, model_sizes
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions, least_budget, plan_placement
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]
# The fixed part of the model, with its experts mapped (None) or in a tier.
CountFixed = Callable[[DiskTier | None], FixedPart]


@dataclass(frozen=True)
class RamNeeds:
    """Sizes and fixed parts of a model in RAM, with all experts mapped and with some in slots.

    fixed_in_slots: None for a dense model, whose `in_slots` is `mapped`.
    """

    mapped: ModelSizes
    fixed_mapped: FixedPart
    in_slots: ModelSizes
    fixed_in_slots: FixedPart | None

    @classmethod
    def of(cls, file: GGUFFile, spec: ModelSpec, kv_token_bytes: int, count: CountFixed) -> "RamNeeds":
        """From the model in `file`; `count` counts the fixed parts. kv_token_bytes as for `model_sizes`."""
        mapped, in_slots = sizes_in_ram(file, spec, kv_token_bytes)
        tier = disk_tier(file, spec) if spec.is_moe else None
        return cls(mapped, count(None), in_slots, count(tier) if tier else None)

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

    def parts_for(self, placement: PlacementPlan) -> tuple[ModelSizes, FixedPart]:
        """The sizes and the fixed part that `placement`, a plan of this model, must have."""
        if placement.is_all_resident or self.fixed_in_slots is None:
            return self.mapped, self.fixed_mapped
        return self.in_slots, self.fixed_in_slots

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


def sizes_in_ram(file: GGUFFile, spec: ModelSpec, kv_token_bytes: int) -> tuple[ModelSizes, ModelSizes]:
    """The model with its experts mapped, and with experts in slots of a pool; the same if it is dense."""
    mapped = model_sizes(spec, file.tensors, file.fingerprint, kv_token_bytes, file_bytes)
    if not spec.is_moe:
        return mapped, mapped
    return mapped, replace(mapped, expert_bytes=disk_tier(file, spec).expert_bytes)
