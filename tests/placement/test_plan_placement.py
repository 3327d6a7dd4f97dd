"""plan_placement: the budget binds, the most used are resident, and the same question has one answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import fixed, models, random_uses, sizes

from coldstream.errors import OutOfMemoryError
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions, least_budget, plan_placement
from coldstream.placement.sizes import ModelSizes

NO_RING = PlanOptions(has_ring=False)
SEEDS = st.integers(0, 2**32)


@st.composite
def options(draw: st.DrawFn) -> PlanOptions:
    return PlanOptions(
        num_pinned_layers=draw(st.integers(0, 3)),
        min_per_layer=draw(st.integers(0, 3)),
        min_per_size=draw(st.integers(0, 3)),
        has_ring=draw(st.booleans()),
        layer_weights=tuple(draw(st.lists(st.tuples(st.integers(0, 4), st.floats(0.1, 10)), max_size=3))),
    )


def test_the_most_used_are_resident_after_each_layers_share() -> None:
    uses = np.array([[100, 80, 60, 40], [100, 1, 1, 1]])
    shared = PlanOptions(min_per_layer=1, has_ring=False)
    plan = plan_placement(sizes(10, 10), fixed(), 40, uses=uses, options=shared)
    assert plan.resident == ((0, 1, 2), (0,))


def test_uses_count_per_byte() -> None:
    uses = np.array([[10, 9, 0, 0], [12, 11, 0, 0]])
    plan = plan_placement(sizes(10, 20), fixed(), 40, uses=uses, options=NO_RING)
    assert plan.resident == ((0, 1), (0,))


def test_what_does_not_fit_any_more_makes_way_for_what_does() -> None:
    uses = np.array([[1, 1, 1, 1], [90, 90, 90, 90]])
    plan = plan_placement(sizes(10, 30), fixed(), 50, uses=uses, options=NO_RING)
    assert plan.resident == ((0, 1), (0,))


@given(models(), st.integers(0, 2000), SEEDS, options())
def test_trap_19_no_plan_exceeds_its_budget(
    model: ModelSizes, budget: int, seed: int, chosen: PlanOptions
) -> None:
    parts = fixed(weights=50, caches=20, workspace=10, drafter=7)
    try:
        plan = plan_placement(model, parts, budget, uses=random_uses(model, seed), options=chosen)
    except OutOfMemoryError:
        return
    held = sum(len(ids) * size for ids, size in zip(plan.resident, model.expert_bytes, strict=True))
    assert plan.fixed.total == 87
    assert 87 + plan.ring_bytes + held == plan.total_bytes <= budget
    assert sum(count * size for size, count in plan.slots.items()) == held
    assert plan.num_resident == len(plan.resident_numbers())
    assert all(len(ids) >= min(chosen.min_per_layer, model.num_experts) for ids in plan.resident)
    if not plan.is_all_resident:
        assert (plan.ring_bytes > 0) == chosen.has_ring
        # One more expert of any layer that still has some would not fit.
        free = budget - plan.total_bytes
        cold = [
            size
            for ids, size in zip(plan.resident, model.expert_bytes, strict=True)
            if len(ids) < model.num_experts
        ]
        assert free < min(cold)


@given(models(), st.integers(0, 1500), st.integers(0, 200), SEEDS, options())
def test_more_memory_never_holds_less(
    model: ModelSizes, budget: int, more: int, seed: int, chosen: PlanOptions
) -> None:
    uses = random_uses(model, seed)
    try:
        small = plan_placement(model, fixed(weights=30), budget, uses=uses, options=chosen)
    except OutOfMemoryError:
        return
    large = plan_placement(model, fixed(weights=30), budget + more, uses=uses, options=chosen)
    assert large.resident_bytes >= small.resident_bytes
    assert small == plan_placement(model, fixed(weights=30), budget, uses=uses.copy(), options=chosen)


@given(models(), SEEDS)
def test_the_reported_minimum_is_the_minimum(model: ModelSizes, seed: int) -> None:
    parts = fixed(weights=2**29, caches=2**28, ctx_size=77)
    smallest_ring = 2 * model.num_experts_per_tok * max(model.expert_bytes)
    least = parts.total + min(smallest_ring, model.all_expert_bytes)
    uses = random_uses(model, seed)
    plan_placement(model, parts, least, uses=uses)
    said = r"--vram: .* minimum of 768.00 MiB: weights .* 512.00, caches of 77 tokens 256.00, (ring|exp)"
    with pytest.raises(OutOfMemoryError, match=said):
        plan_placement(model, parts, least - 1, uses=uses)


def test_when_all_fits_there_is_no_ring() -> None:
    model = sizes(10, 30)
    plan = plan_placement(model, fixed(weights=40), 200)
    assert plan.is_all_resident
    assert (plan.ring_bytes, plan.total_bytes) == (0, 200)
    assert plan.slots == {10: 4, 30: 4}
    less = plan_placement(model, fixed(weights=40), 199)
    assert not less.is_all_resident
    assert less.ring_bytes > 0


def test_a_model_without_experts_fits_or_does_not() -> None:
    model = sizes(0, 0, num_experts=0, num_experts_per_tok=0)
    assert plan_placement(model, fixed(weights=10), 10).is_all_resident
    with pytest.raises(OutOfMemoryError, match="minimum"):
        plan_placement(model, fixed(weights=10), 9)


@given(models(), SEEDS, st.randoms())
def test_trap_21_equal_counts_are_taken_by_rank_layer_and_id(model: ModelSizes, seed: int, random) -> None:  # type: ignore[no-untyped-def]
    uses = random_uses(model, seed)
    budget = model.all_expert_bytes // 2
    plan = plan_placement(model, fixed(), budget, uses=uses, options=NO_RING)
    for layer, ids in enumerate(plan.resident):
        cold = set(range(model.num_experts)) - set(ids)
        best = sorted(range(model.num_experts), key=lambda i, layer=layer: (-uses[layer, i], i))
        assert sorted(best[: len(ids)]) == list(ids)
        assert cold == set(best[len(ids) :])
    # Which experts of a layer have which counts makes no difference to how many it gets.
    shuffled = uses.copy()
    for row in shuffled:
        random.shuffle(row)
    other = plan_placement(model, fixed(), budget, uses=shuffled, options=NO_RING)
    assert list(map(len, other.resident)) == list(map(len, plan.resident))


def test_trap_21_a_share_for_each_layer_beyond_the_budget_is_an_error() -> None:
    with pytest.raises(OutOfMemoryError, match="experts that must be resident"):
        plan_placement(sizes(2**28, 2**28), fixed(), 2**29, options=PlanOptions(min_per_layer=2))


@pytest.mark.parametrize("budget", range(60, 161, 5))
def test_trap_18_no_layer_starves_and_no_size_is_forgotten(budget: int) -> None:
    """Without a profile every layer gets its share, also those whose experts are larger."""
    plan = plan_placement(sizes(10, 10, 12, 10), fixed(), budget, options=NO_RING)
    counts = list(map(len, plan.resident))
    assert max(counts) - min(counts) <= 2
    assert min(counts) >= 1
    pinned = PlanOptions(num_pinned_layers=1, min_per_layer=1, has_ring=False)
    if budget >= 72:
        counts = list(
            map(len, plan_placement(sizes(10, 10, 12, 10), fixed(), budget, options=pinned).resident)
        )
        assert counts[0] == 4
        assert min(counts) >= 1


def test_layers_are_pinned_from_the_outside() -> None:
    model = sizes(10, 10, 10, 10, 10)
    for count, expected in enumerate([(), (0,), (0, 4), (0, 1, 4), (0, 1, 2, 4)]):
        chosen = PlanOptions(num_pinned_layers=count, has_ring=False)
        plan = plan_placement(model, fixed(), 199, options=chosen)
        assert plan.pinned_layers == expected
        assert all(plan.resident[layer] == (0, 1, 2, 3) for layer in expected)
    with pytest.raises(OutOfMemoryError):
        plan_placement(model, fixed(), 79, options=PlanOptions(num_pinned_layers=2, has_ring=False))


def test_uses_of_weighted_layers_count_for_more() -> None:
    uses = np.array([[9, 7, 5, 3], [8, 6, 4, 2]])
    for weights, resident in (
        ((), ((0, 1), (0, 1))),
        (((0, 1.0), (1, 1.0)), ((0, 1), (0, 1))),
        (((1, 2.0),), ((0,), (0, 1, 2))),
        (((1, 9.0), (1, 2.0)), ((0,), (0, 1, 2))),  # the last one is meant
        (((0, 0.5),), ((0,), (0, 1, 2))),
    ):
        chosen = replace(NO_RING, layer_weights=weights)
        plan = plan_placement(sizes(10, 10), fixed(), 40, uses=uses, options=chosen)
        assert plan.resident == resident
    assert plan.layer_weights == (0.5, 1.0)
    assert plan.expert_weights is not None
    assert plan.expert_weights.tolist() == [0.5] * 4 + [1.0] * 4


def test_weights_of_one_are_no_weights() -> None:
    chosen = replace(NO_RING, layer_weights=((0, 1.0), (1, 1.0)))
    plan = plan_placement(sizes(10, 10), fixed(), 40, options=chosen)
    assert plan == plan_placement(sizes(10, 10), fixed(), 40, options=NO_RING)
    assert plan.expert_weights is None


@pytest.mark.parametrize(
    "uses",
    [np.ones((2, 3)), np.ones((4, 2)), -np.ones((2, 4)), np.full((2, 4), np.nan), np.full((2, 4), np.inf)],
)
def test_uses_that_are_none_are_refused(uses: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uses must be"):
        plan_placement(sizes(10, 10), fixed(), 1000, uses=uses)


def test_a_plan_that_contradicts_itself_cannot_be_made() -> None:
    plan = plan_placement(sizes(10, 10), fixed(weights=5), 55, options=NO_RING)
    wrong: list[dict[str, object]] = [
        {"budget_bytes": 54},
        {"ring_bytes": 1},
        {"ring_bytes": -1},
        {"resident": ((0, 1),)},
        {"resident": ((0, 0), ())},
        {"resident": ((1, 0), ())},
        {"resident": ((4,), ())},
        {"resident": ((-1,), ())},
        {"pinned_layers": (0,)},
        {"pinned_layers": (2,)},
        {"expert_bytes": (10,)},
        {"layer_weights": (2.0,)},
        {"layer_weights": (2.0, 0.0)},
        {"layer_weights": (2.0, -1.0)},
        {"layer_weights": (2.0, np.inf)},
        {"layer_weights": (2.0, np.nan)},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=r"."):
            replace(plan, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="caches cannot be -1 bytes"):
        FixedPart(1, "f16", 1, 0, -1, 0)
    assert isinstance(plan, PlacementPlan)


@pytest.mark.parametrize("per_tok", [1, 2, 3])
def test_no_more_is_needed_than_for_all_experts_though_a_ring_would_take_more(per_tok: int) -> None:
    """A ring is for two layers' experts of a token, and a model of one layer has four experts."""
    model = sizes(10, num_experts_per_tok=per_tok)
    least = least_budget(model, fixed(weights=7), PlanOptions(min_per_layer=1))
    assert least == 7 + min(2 * per_tok * 10 + 10, 40)
    assert plan_placement(model, fixed(weights=7), least, options=PlanOptions(min_per_layer=1)).resident
    with pytest.raises(OutOfMemoryError, match="below the minimum"):
        plan_placement(model, fixed(weights=7), least - 1, options=PlanOptions(min_per_layer=1))


def test_experts_of_pinned_layers_are_none_of_those_of_a_size_that_others_need() -> None:
    model = sizes(10, 10, 10)
    chosen = PlanOptions(num_pinned_layers=1, min_per_size=3, has_ring=False)
    plan = plan_placement(model, fixed(), 70, options=chosen)
    assert plan.pinned_layers == (0,)
    assert plan.num_resident == 4 + 3
    assert least_budget(model, fixed(), chosen) == 70


def test_a_ring_takes_half_of_what_is_left_at_most_unless_it_is_slow() -> None:
    """A fast one has places for a token and for three tenths of a layer: 2 + 20 experts."""
    mib = 2**20
    model = sizes(*[4 * mib] * 8, num_experts=64)
    for left in (16, 64, 256, 400, 800, 1600):
        ring = plan_placement(model, fixed(), left * mib).ring_bytes
        assert ring == max(min(88, left) * mib, min(left * mib // 2, 256 * mib))
    assert plan_placement(sizes(*[4 * mib] * 40, num_experts=64), fixed(), 4096 * mib).ring_bytes == 512 * mib
