"""Which layers of a dense model a GPU holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.placement.layer_plan import least_layers_budget, plan_layers, spread_order
from coldstream.placement.plan import BudgetTooSmallError, FixedPart, PlanOptions
from coldstream.placement.sizes import ModelSizes

FIXED = FixedPart(512, "i16", 256, 1000, 200, 300)
models = st.lists(st.integers(1, 500), min_size=1, max_size=40).map(
    lambda sizes: ModelSizes("f", 1, 1, tuple(sizes), 1000, 1000, 1, 1, 1, 1, 1, is_dense=True)
)


@given(model=models, pins=st.integers(0, 3), more=st.lists(st.integers(0, 20_000), min_size=2, max_size=2))
def test_more_memory_never_holds_less_and_nothing_is_beyond_it(
    model: ModelSizes, pins: int, more: list[int]
) -> None:
    options = PlanOptions(num_pinned_layers=min(pins, model.num_layers))
    least = least_layers_budget(model, FIXED, options)
    plans = [plan_layers(model, FIXED, least + extra, options) for extra in sorted(more)]
    assert plans[0].resident_bytes <= plans[1].resident_bytes
    for plan in plans:
        assert plan.total_bytes <= plan.budget_bytes
        assert plan.pinned_layers == tuple(layer for layer, ids in enumerate(plan.resident) if ids)
        assert plan.is_all_resident == (plan.ring_bytes == 0)
        left = plan.budget_bytes - plan.total_bytes
        missing = [size for ids, size in zip(plan.resident, plan.expert_bytes, strict=True) if not ids]
        assert all(size > left for size in missing)
    for layer in (0, model.num_layers - 1, 1)[: options.num_pinned_layers]:
        assert layer in plans[0].pinned_layers


@given(model=models, pins=st.integers(0, 3))
def test_a_byte_less_than_the_least_budget_is_refused(model: ModelSizes, pins: int) -> None:
    options = PlanOptions(num_pinned_layers=min(pins, model.num_layers))
    least = least_layers_budget(model, FIXED, options)
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_layers(model, FIXED, least - 1, options)
    assert caught.value.least_bytes == least


@given(count=st.integers(1, 100))
def test_any_first_layers_of_the_order_lie_evenly(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    for taken in range(1, count + 1):
        chosen = sorted(order[:taken])
        gaps = [after - before for before, after in zip([-1, *chosen], [*chosen, count], strict=True)]
        assert max(gaps) <= 4 * count / taken + 1


def test_missing_layers_lie_between_the_others() -> None:
    model = ModelSizes("f", 1, 1, (10,) * 8, 0, 0, 1, 1, 1, 1, 1, is_dense=True)
    plan = plan_layers(model, FIXED, FIXED.total + 20 + 40)
    assert plan.pinned_layers == (0, 2, 4, 6)
    assert plan.ring_bytes == 20
