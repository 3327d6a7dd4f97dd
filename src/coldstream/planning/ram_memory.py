"""A model's RAM: on the CPU all of it, beside a GPU what the CPU's part takes. Pure, over counted bytes.

On the CPU either all experts are mapped from the file, or some are in the slots of a pool. An embedding that
is not also the head stays in the file and is not counted. Beside a GPU that lacks experts, either the whole
file is mapped and locked in RAM, or there is a pool.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coldstream.experts.staging import NUM_PINNED_BUFFERS, RingShape
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.models.cuda.capacity import HEAD_ROWS, mailbox_ranks
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions, least_budget, plan_placement
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]

# Of PyTorch, the driver and the program, and the buffers through which weights go to the GPU at first.
HOST_RESERVE_BYTES: Final = 1152 * 2**20
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
    `experts/copies.py`, and for logits.
    """
    ranks, size = mailbox_ranks(spec), spec.hidden_size
    sizes = [placement.fixed.chunk_size * ranks * _ID, HEAD_ROWS * spec.vocab_size * _FLOAT]
    for rows in (MAX_MAILBOX_ROWS, max(1, max_cpu_rows)):
        sizes += [_LINES, rows * size * _FLOAT, rows * ranks * _ID, rows * ranks * size * _FLOAT]
    if spec.is_moe:
        sizes += [RingShape.of(placement.ring_bytes).buffer_bytes] * NUM_PINNED_BUFFERS
    # PyTorch rounds page-locked memory up to powers of two.
    return sum(1 << (num_bytes - 1).bit_length() for num_bytes in sizes if num_bytes)
