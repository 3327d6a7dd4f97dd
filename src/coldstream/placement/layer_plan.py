"""plan_layers: which layers of a dense model begin in a GPU's memory with their FFN, and stay there. Pure.

Every token reads every layer, so there is nothing to guess and nothing to evict. The FFN of a layer counts as
its only expert. Layers are resident, *pinned*, or missing. Missing layers lie evenly between the others, so
that their bytes arrive while the layers before them are computed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstream.placement.plan import (
    RING_LAYERS,
    BudgetTooSmallError,
    FixedPart,
    PlacementPlan,
    PlanOptions,
    least_parts,
)
from coldstream.placement.ranking import layers_to_pin, take_fitting
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]


def plan_layers(
    model: ModelSizes, fixed: FixedPart, budget_bytes: int, options: PlanOptions | None = None
) -> PlacementPlan:
    """The placement of a dense `model` in a GPU's memory of `budget_bytes`; `fixed` has its other weights.

    The same arguments give the same plan, and a larger budget never fewer resident bytes. Raises
    BudgetTooSmallError if the budget is below `least_layers_budget`.
    """
    options = options or PlanOptions()
    left = budget_bytes - fixed.total
    if left >= model.all_expert_bytes:
        ring, taken = 0, list(range(model.num_layers))
    else:
        pinned = layers_to_pin(model.num_layers, options.num_pinned_layers)
        ring, first = least_of_layers(model, options)
        if ring + first > left:
            raise BudgetTooSmallError("vram", budget_bytes, least_parts(fixed, ring, first, "layers"))
        rest = [layer for layer in spread_order(model.num_layers) if layer not in pinned]
        sizes = np.asarray(model.expert_bytes, np.int64)
        taken = [*pinned, *take_fitting(rest, sizes, left - ring - first)]
    resident = set(taken)
    return PlacementPlan(
        model=model.routed,
        tier="vram",
        budget_bytes=budget_bytes,
        fixed=fixed,
        ring_bytes=ring,
        expert_bytes=model.expert_bytes,
        resident=tuple((0,) if layer in resident else () for layer in range(model.num_layers)),
        pinned_layers=tuple(sorted(resident)),
    )


def least_layers_budget(model: ModelSizes, fixed: FixedPart, options: PlanOptions) -> int:
    """The smallest budget in bytes that `plan_layers` accepts."""
    return fixed.total + sum(least_of_layers(model, options))


def least_of_layers(model: ModelSizes, options: PlanOptions) -> tuple[int, int]:
    """Bytes of the ring and of the layers that must be resident, or of all layers if less."""
    pinned = layers_to_pin(model.num_layers, options.num_pinned_layers)
    first = sum(model.expert_bytes[layer] for layer in pinned)
    ring = RING_LAYERS * max(model.expert_bytes)
    return (ring, first) if ring + first < model.all_expert_bytes else (0, model.all_expert_bytes)


def spread_order(count: int) -> Sequence[int]:
    """0 … count − 1 by reversed bits: the first n of them lie about evenly, for every n."""
    width = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{width}b}"[::-1], 2))
