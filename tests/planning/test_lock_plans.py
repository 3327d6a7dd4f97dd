"""A plan follows what the machine refused to page-lock when a model was opened last."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefetch_choice import MACHINE, budget_for_a_part_of_the_experts

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig
from coldstream.errors import OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.forecast import forecast
from coldstream.placement.limits import Limits
from coldstream.placement.lock_file import LockRefusal
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.planned import Planned

pytest.importorskip("cuda.bindings")

WHEN = "2026-01-02 03:04 UTC"
LIMITS = replace(Limits.read(), wsl=None, locked_bytes=None)


def planned_after(refusal: LockRefusal | None, **settings: object) -> Planned:
    budget = budget_for_a_part_of_the_experts(MACHINE)
    config = EngineConfig(str(demo_model_path()), device="cuda", vram=budget, ctx_size=256)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = replace(config, **settings)  # type: ignore[arg-type]
        return plan_model(config, Sources(file, spec, MACHINE, refusal=refusal))


def speed(planned: Planned) -> float:
    return forecast(planned.plan, planned.known).decode


def test_where_nothing_was_locked_the_cpu_computes_and_nothing_is_fetched_ahead() -> None:
    before = planned_after(None)
    assert before.run.miss_times is not None
    planned = planned_after(LockRefusal(WHEN, before.locked_bytes, 0))
    assert (planned.run.miss_times, planned.run.prefetch, planned.run.prefetch_bytes) == (None, 0, 0)
    assert planned.plan == before.plan, "what lies where is the same"
    assert planned.run.threads == before.run.threads
    assert speed(planned) < speed(before)
    (text,) = planned.lock_warnings(LIMITS)
    assert "no expert over the bus" in text
    assert before.lock_warnings(LIMITS) == ()
    assert planned_after(LockRefusal(WHEN, 2, 0), prefetch=2).run.prefetch == 2, "that was asked for"


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 2**26), st.integers(1, 2**26))
def test_a_part_that_is_locked_is_forecast_between_all_and_nothing(one: int, other: int) -> None:
    less, more = sorted((one, other))
    whole = planned_after(None)
    none, *parts, all_of_it = (
        speed(planned_after(LockRefusal(WHEN, 2**60 - 1, locked)))
        for locked in (0, less, more, whole.locked_bytes)
    )
    assert none <= parts[0] <= parts[1] <= all_of_it == speed(whole)
    assert planned_after(LockRefusal(WHEN, 2**60 - 1, less)).run == whole.run


def test_a_pool_that_is_locked_in_part_is_read_by_the_cpu_alone() -> None:
    """Its experts move: the GPU reads all of it or nothing."""
    before = planned_after(None)
    with pytest.raises(OutOfMemoryError) as caught:
        planned_after(None, ram=2**20)
    (least,) = re.findall(r"try --ram (\d+)M", str(caught.value))
    less = (int(least) + 8) * 2**20
    pooled = planned_after(None, ram=less)
    assert pooled.run.pool is not None
    assert pooled.run.miss_times == before.run.miss_times
    for locked, reads in ((pooled.locked_bytes - 1, False), (pooled.locked_bytes, True)):
        after = planned_after(LockRefusal(WHEN, 2**60 - 1, locked), ram=less)
        assert (after.run.miss_times is not None) == reads
        assert after.plan == pooled.plan
        assert (after.lock_warnings(LIMITS) == ()) == reads
        with_pool = [forecast(each.plan, each.known, pool=each.run.pool) for each in (after, pooled)]
        assert (with_pool[0].decode < with_pool[1].decode) != reads


def test_a_model_that_finds_room_in_what_was_locked_is_planned_as_ever() -> None:
    whole = planned_after(None)
    after = planned_after(LockRefusal(WHEN, 3 * whole.locked_bytes, 2 * whole.locked_bytes))
    assert after.run == whole.run
    assert after.lock_warnings(LIMITS) == ()
