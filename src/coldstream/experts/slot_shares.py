"""The part of a plan about layers whose experts are kept in a GPU's slots. Pure.

Experts of pinned layers are ordinary weights, outside of slots. The other layers are numbered from 0, and
their experts as in `cache.py`.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldstream.placement.run_plan import RunPlan

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SlotShares:
    """Slots, the experts that are loaded first, and the expected uses."""

    layer_bytes: list[int]  # bytes of an expert, by layer
    num_slots: dict[int, int]  # by bytes of an expert
    residents: list[int]  # numbers of experts, ascending
    uses: Array | None  # expected uses per step, float64 [layers, experts], if known
    weights: Array | None  # weight of a use, float64 [layers · experts]; None: 1


def slot_shares(plan: RunPlan) -> SlotShares:
    """From `plan`, which must be for a GPU."""
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
