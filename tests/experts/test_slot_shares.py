"""The slots of a plan on a GPU, and that the cache starts from the plan's expected uses."""

from dataclasses import replace

import numpy as np
import pytest

from coldstream.experts.slot_shares import SlotShares, slot_shares
from coldstream.experts.slots.cache import ExpertCache
from coldstream.placement.plan import FixedPart, PlacementPlan
from coldstream.placement.policies import DecayedFrequency
from coldstream.placement.routing_trace import RoutedModel
from coldstream.placement.run_plan import RunPlan

USES = ((0.5, 0.5, 0.5, 0.5), (0.9, 0.8, 0.2, 0.1), (0.1, 0.2, 0.8, 0.9))
PLACEMENT = PlacementPlan(
    model=RoutedModel("00", 3, 4, 2),
    tier="vram",
    budget_bytes=10**4,
    fixed=FixedPart(16, "f16", 8, 0, 0, 0),
    ring_bytes=0,
    expert_bytes=(256, 512, 256),
    resident=((0, 1, 2, 3), (0, 1), (1, 2, 3)),
    pinned_layers=(0,),
)


def shares(uses: tuple[tuple[float, ...], ...] | None) -> SlotShares:
    return slot_shares(RunPlan(PLACEMENT, 1, uses))


def test_pinned_layers_are_outside_of_slots() -> None:
    found = shares(USES)
    assert found.layer_bytes == [512, 256]
    assert found.num_slots == {512: 2, 256: 3}
    assert found.residents == [0, 1, 5, 6, 7]
    assert np.array_equal(found.uses, USES[1:])  # type: ignore[arg-type]
    assert shares(None).uses is None


def test_weights_are_those_of_the_layers_with_slots() -> None:
    assert shares(USES).weights is None
    found = slot_shares(RunPlan(replace(PLACEMENT, layer_weights=(5.0, 2.0, 1.0)), 1))
    assert found.weights is not None
    assert found.weights.tolist() == [2.0] * 4 + [1.0] * 4


@pytest.mark.parametrize(("uses", "stays"), [(USES, True), (None, False)])
def test_one_use_of_another_expert_pushes_no_planned_one_out(
    uses: tuple[tuple[float, ...], ...] | None, stays: bool
) -> None:
    found = shares(uses)
    policy = DecayedFrequency.for_late_copies()
    cache = ExpertCache(found.layer_bytes, 4, found.num_slots, policy, profile=found.uses)
    for copy in cache.load(found.residents):
        cache.copied(copy)
    for used in ([], [2, 4], []):  # residents of neither layer
        step = cache.start_step().step
        cache.finish_step(step, np.array(used, np.int64))
    assert (cache.counters.evictions.sum() == 0) == stays
    assert (cache.counters.copies.sum() == len(found.residents)) == stays
