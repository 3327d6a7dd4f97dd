"""plan_pool: what a GPU does not hold goes first, the budget binds, and the same question has one answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import fixed, models, random_uses, sizes

from coldstream.placement.plan import BudgetTooSmallError, PlacementPlan, PlanOptions, plan_placement
from coldstream.placement.pool_plan import LEAST_TOKENS, HostPart, PoolPlan, plan_pool
from coldstream.placement.ranking import layers_to_pin
from coldstream.placement.sizes import ModelSizes

HOST = HostPart(buffers=20, workspace=7, reserve=5)
NO_RING = PlanOptions(has_ring=False)


def on_gpu(model: ModelSizes, budget: int, uses: np.ndarray | None = None, pinned: int = 0) -> PlacementPlan:
    options = replace(NO_RING, num_pinned_layers=pinned)
    return plan_placement(model, fixed(), budget, uses=uses, options=options)


def test_the_most_used_of_the_others_begin_in_ram() -> None:
    uses = np.array([[9.0, 8, 7, 1], [6, 5, 4, 3]])
    placement = on_gpu(sizes(10, 10), 20, uses)
    assert placement.resident == ((0, 1), ())
    plan = plan_pool(placement, (10, 10), HOST, HOST.total + 50, uses=uses)
    assert plan.loaded == ((2,), (0, 1, 2, 3))
    assert (plan.slots, plan.num_slots, plan.slot_bytes) == ({10: 5}, 5, 50)
    assert plan_pool(placement, (10, 10), HOST, HOST.total + 70, uses=uses).loaded[0] == (0, 2, 3)


def test_a_layer_that_the_gpu_holds_has_no_slots_and_weights_of_layers_count() -> None:
    model = sizes(10, 10, 10)
    placement = replace(on_gpu(model, 40, pinned=1), layer_weights=(1.0, 1.0, 9.0))
    plan = plan_pool(placement, model.expert_bytes, HOST, HOST.total + 40)
    assert plan.expert_bytes == (0, 10, 10)
    assert plan.loaded == ((), (), (0, 1, 2, 3))


@st.composite
def placements(draw: st.DrawFn) -> tuple[PlacementPlan, np.ndarray]:
    """Of a GPU that lacks an expert, and the uses that it was made with."""
    model = draw(models())
    uses = random_uses(model, draw(st.integers(0, 9)))
    pinned = layers_to_pin(model.num_layers, draw(st.integers(0, 2)))
    least = model.num_experts * sum(model.expert_bytes[layer] for layer in pinned)
    budget = draw(st.integers(least, max(least, model.all_expert_bytes - 1)))
    assume(budget < model.all_expert_bytes)
    return on_gpu(model, budget, uses, len(pinned)), uses


@given(placements(), st.integers(0, 800))
def test_trap_19_no_pool_exceeds_its_budget(given_: tuple[PlacementPlan, np.ndarray], budget: int) -> None:
    """And the minimum that an error names is accepted, and one byte less is not."""
    placement, uses = given_
    model, in_ram = placement.model, tuple(size + 3 for size in placement.expert_bytes)

    def plan(budget: int) -> PoolPlan:
        return plan_pool(placement, in_ram, HOST, budget, uses=uses)

    with pytest.raises(BudgetTooSmallError) as caught:
        plan(HOST.total)
    least = caught.value.least_bytes
    with pytest.raises(BudgetTooSmallError):
        plan(least - 1)
    assert plan(least).total_bytes == least
    found = plan(max(budget, least))
    assert found.total_bytes <= found.budget_bytes
    partial = [layer for layer in range(model.num_layers) if layer not in placement.pinned_layers]
    for size in {in_ram[layer] for layer in partial}:
        num_all = sum(in_ram[layer] == size for layer in partial) * model.num_experts
        assert found.slots[size] >= min(num_all, LEAST_TOKENS * model.num_experts_per_tok)
    assert not any(found.loaded[layer] for layer in placement.pinned_layers)
    more = plan(found.budget_bytes + 10)
    assert more.slot_bytes >= found.slot_bytes
    assert more == plan(more.budget_bytes)


@given(placements(), st.integers(0, 800))
def test_what_the_gpu_holds_comes_after_all_others_of_its_size(
    given_: tuple[PlacementPlan, np.ndarray], budget: int
) -> None:
    placement, uses = given_
    num_experts = placement.model.num_experts
    plan = plan_pool(placement, placement.expert_bytes, HOST, HOST.total + 4000 + budget, uses=uses)
    lacking: dict[int, bool] = {}  # by size: whether an expert that the GPU lacks is on the disk
    for layer, size in enumerate(placement.expert_bytes):
        there = {*placement.resident[layer], *plan.loaded[layer]}
        lacking[size] = lacking.get(size, False) or len(there) < num_experts
    for layer, size in enumerate(placement.expert_bytes):
        assert not (lacking[size] and set(plan.loaded[layer]) & set(placement.resident[layer]))


def test_an_error_names_what_the_least_is_for() -> None:
    placement = on_gpu(sizes(10, 10, num_experts_per_tok=2), 10)
    parts = "buffers 1.00, workspace 2.00, reserve 3.00, experts that must find room 0.00"
    with pytest.raises(BudgetTooSmallError, match=f"--ram: 1.00 MiB of RAM are below .* 6.00 MiB: {parts}"):
        plan_pool(placement, (10, 10), HostPart(2**20, 2 * 2**20, 3 * 2**20), 2**20)
    parts = "buffers 1.00, the prompt cache 4.00, experts that must find room 0.00"
    with pytest.raises(BudgetTooSmallError, match=f"minimum of 5.00 MiB: {parts}"):
        plan_pool(placement, (10, 10), HostPart(2**20, 0, 0, 4 * 2**20), 2**20)


def test_a_pool_that_contradicts_itself_is_refused() -> None:
    pool = PoolPlan(100, HostPart(1, 1, 1), (10, 10), ((0,), (1, 2)))
    for fields, said in (
        ({"budget_bytes": 32}, "33 bytes of a budget of 32"),
        ({"loaded": ((0,),)}, "1 layers in RAM, 2 layers"),
        ({"loaded": ((0, 0), ())}, "not rising"),
        ({"loaded": ((-1,), ())}, "not rising"),
        ({"expert_bytes": (0, 10)}, "all of which the GPU holds"),
        ({"expert_bytes": (-1, 10)}, "below 0"),
        ({"fixed": HostPart(-1, 1, 1)}, "below 0"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(pool, **fields)  # type: ignore[arg-type]
