"""What follows from a plan, without being part of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import fixed, sizes

from coldstream.kernels.experts.shapes import MAX_CARD_ROWS, MAX_MAILBOX_ROWS, MAX_SHARED_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.plan import PlanOptions, Tier, plan_placement
from coldstream.placement.pool_plan import HostPart, PoolPlan
from coldstream.placement.run_plan import RunPlan

TIMES = MissTimes(30, tuple(range(20, 20 + MAX_MAILBOX_ROWS)))
MODEL = sizes(10, 30, 10, num_experts=100)
PLACEMENT = replace(plan_placement(MODEL, fixed(), 3000), ring_bytes=900)


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (RunPlan(PLACEMENT, 3, miss_times=TIMES), MAX_SHARED_ROWS),
        (RunPlan(PLACEMENT, 3), MAX_MAILBOX_ROWS),
        (RunPlan(PLACEMENT, 3, miss_times=TIMES, card=1), MAX_CARD_ROWS),
        (RunPlan(replace(PLACEMENT, ring_bytes=899), 3, miss_times=TIMES), MAX_MAILBOX_ROWS),
        (
            RunPlan(PLACEMENT, 3, miss_times=TIMES, prefetch=1, prefetch_bytes=1, layers_ahead=1),
            MAX_MAILBOX_ROWS,
        ),
    ],
    ids=["", "no bus", "a second card", "small ring", "ring with guesses"],
)
def test_prompts_are_shared_out_by_the_device_where_the_bus_has_places(plan: RunPlan, rows: int) -> None:
    assert plan.shared_rows == rows


def test_a_dense_model_has_no_experts_to_share_out() -> None:
    placement = replace(plan_placement(sizes(500, 700, num_experts=1), fixed(), 3000), ring_bytes=900)
    assert RunPlan(placement, 3, miss_times=TIMES).shared_rows == MAX_MAILBOX_ROWS


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("tier", ["ram", "vram"])
@given(prompt_cache=st.integers(0, 2), in_placement=st.integers(0, 2), in_pool=st.integers(0, 2))
def test_kept_prefixes_are_counted_in_ram_and_nowhere_else(
    tier: Tier, has_pool: bool, prompt_cache: int, in_placement: int, in_pool: int
) -> None:
    if has_pool and tier == "ram":
        return
    part = replace(fixed(), prompt_cache=in_placement)
    placement = plan_placement(MODEL, part, 3000, tier=tier, options=PlanOptions(has_ring=False))
    pool = PoolPlan(9, HostPart(1, 1, 1, in_pool), MODEL.expert_bytes, ((), (), ())) if has_pool else None
    is_right = in_placement == (prompt_cache if tier == "ram" else 0)
    if is_right and (not has_pool or in_pool == prompt_cache):
        plan = RunPlan(placement, 3, pool=pool, prompt_cache_bytes=prompt_cache)
        assert plan.prompt_cache_bytes == prompt_cache
        return
    with pytest.raises(ValueError, match=r"^prompt_cache: \d bytes are counted for \d$"):
        RunPlan(placement, 3, pool=pool, prompt_cache_bytes=prompt_cache)


def test_a_gpu_that_has_all_experts_asks_no_other() -> None:
    with pytest.raises(ValueError, match=r"^card: 1, and no other GPU that lacks an expert$"):
        RunPlan(plan_placement(MODEL, fixed(), 10**6), 0, card=1)
