"""What is prefetched has places within a cap in bytes, which the plan says and counts."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import Dims, write_gguf
from coldstream.engine import EngineConfig
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.experts.prefetch import LAYERS_AHEAD, MAX_PREFETCHED, Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.array import ALIGNMENT
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.kvcache.cache import CacheSize, num_blocks_of
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan_file import save_plan
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import SHARE_WITH_PLACES
from coldstream.planning import workers
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.planned import Planned

MIB = 2**20
MACHINE = Hardware(
    "a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10,
    GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6),
)  # fmt: skip
NUM_LAYERS = LAYERS_AHEAD + 1  # that have places at once


def plan_of(path: Path, **settings: Any) -> Planned:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        return plan_model(EngineConfig(str(path), device="cuda", **settings), Sources(file, spec, MACHINE))


def prefetching_of(run: RunPlan) -> Prefetching | None:
    return Prefetching.planned(run.layers_ahead, run.prefetch, run.prefetch_bytes)


def tiny(tmp_path: Path, experts_used: int) -> tuple[Path, int]:
    """A model, and the smallest budget that is advised for 64 tokens of context."""
    dims = Dims(experts_used=experts_used, expert_ffn=1024)
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=dims, types={"*_exps.weight": "Q4_K"})
    with pytest.raises(OutOfMemoryError) as caught:
        plan_of(path, ctx_size=64, vram=0)
    advice = re.search(r"try --vram (\d+)M", str(caught.value))
    assert advice, caught.value
    return path, int(advice[1]) * MIB


def test_what_is_asked_for_is_limited_to_what_has_places(tmp_path: Path) -> None:
    """In the smallest ring one of each layer."""
    path, budget = tiny(tmp_path, experts_used=2)
    counts = []
    for more in (0, 4, 11):
        planned = plan_of(path, ctx_size=64, vram=budget + more * MIB, prefetch=MAX_PREFETCHED)
        run, plan = planned.run, planned.plan
        assert plan.total_bytes <= plan.budget_bytes == budget + more * MIB
        one_each = NUM_LAYERS * max(plan.expert_bytes)
        assert run.prefetch == planned.config.prefetch == min(MAX_PREFETCHED, plan.ring_bytes // one_each)
        assert run.prefetch_bytes == run.prefetch * one_each <= plan.ring_bytes
        counts.append(run.prefetch)
    assert counts[0] == 1 < counts[1] < counts[2] < MAX_PREFETCHED
    asked = plan_of(path, ctx_size=64, vram=budget + 8 * MIB, prefetch=1).run
    assert (asked.prefetch, asked.prefetch_bytes) == (1, one_each), "no more than that takes"


@pytest.mark.parametrize("prefetch", [0, 1, MAX_PREFETCHED])
def test_trap_19_what_is_prefetched_is_within_the_budget_to_the_byte(tmp_path: Path, prefetch: int) -> None:
    """Guesses, keys and tallies lie beside the ring."""
    pytest.importorskip("cuda.bindings")
    from coldstream.models.cuda.limits import Limits
    from coldstream.models.cuda.memory_plan import count_memory

    path, budget = tiny(tmp_path, experts_used=2)
    run = plan_of(path, ctx_size=64, vram=budget + 11 * MIB, prefetch=prefetch).run
    plan, fixed = run.placement, run.placement.fixed
    limits = Limits(
        CacheSize(num_blocks_of(fixed.ctx_size), fixed.num_sequences),
        fixed.ctx_size,
        fixed.kv_type,
        expert_bytes=plan.resident_bytes,
        ring_bytes=plan.ring_bytes,
        prefetching=prefetching_of(run),
        has_host_tables=fixed.host_tables > 0,
    )
    whole_bytes = plan.ring_bytes // ALIGNMENT * ALIGNMENT
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        counted, whole, less = (
            count_memory(file, spec, replace(limits, ring_bytes=ring_bytes), fixed.chunk_size)
            for ring_bytes in (plan.ring_bytes, whole_bytes, whole_bytes - 1)
        )
    assert less.total < whole.total, "a ring is at most as long as it may be"
    assert counted.total <= plan.total_bytes <= plan.budget_bytes
    assert counted.weights + counted.caches <= fixed.weights + fixed.caches + plan.ring_bytes
    assert counted.total > plan.total_bytes - 2**13


def test_trap_16_a_ring_without_a_place_refuses_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, budget = tiny(tmp_path, experts_used=1)
    settings = {"ctx_size": 64, "vram": budget}
    with pytest.raises(ConfigError, match=r"--prefetch 2: places for an expert of each of 3 layers take \d+"):
        plan_of(path, **settings, prefetch=2)
    monkeypatch.setattr(workers, "prefetch_gain", lambda *of: 1.0)
    for prefetch in ("auto", 0):
        planned = plan_of(path, **settings, prefetch=prefetch)
        assert (planned.run.prefetch, planned.run.prefetch_bytes, planned.config.prefetch) == (0, 0, 0)
    whole = plan_of(path, ctx_size=64, prefetch=2)
    assert whole.plan.is_all_resident
    assert (whole.run.prefetch, whole.run.prefetch_bytes) == (0, 0)


@pytest.mark.sharded(of="plans")
def test_the_cap_of_a_plan_that_is_given_is_kept(tmp_path: Path) -> None:
    path, budget = tiny(tmp_path, experts_used=2)
    first = plan_of(path, ctx_size=64, vram=budget + 11 * MIB, prefetch=3).run
    one_each = first.prefetch_bytes // 3
    name = tmp_path / "my.plan"
    for cap, count in ((first.prefetch_bytes, 3), (3 * one_each - 1, 2), (one_each, 1)):
        save_plan(replace(first, prefetch_bytes=cap), name)
        given = plan_of(path, plan=str(name))
        assert (given.run.prefetch, given.config.prefetch) == (count, count)
        assert given.run.prefetch_bytes == count * one_each <= cap
    asked = plan_of(path, plan=str(name), prefetch=2).run
    assert (asked.prefetch, asked.prefetch_bytes) == (2, 2 * one_each), "the flag goes before the plan"
    save_plan(replace(first, prefetch_bytes=one_each - 1), name)
    with pytest.raises(ConfigError, match=rf"my.plan: prefetch 3: places .* the ring is {one_each - 1}: "):
        plan_of(path, plan=str(name))
    assert plan_of(path, plan=str(name), prefetch=0).run.prefetch_bytes == 0


def test_a_plan_says_how_many_layers_ahead_experts_are_guessed(tmp_path: Path) -> None:
    path, budget = tiny(tmp_path, experts_used=2)
    first = plan_of(path, ctx_size=64, vram=budget + 11 * MIB, prefetch=3).run
    assert first.layers_ahead == LAYERS_AHEAD
    one_each = max(first.placement.expert_bytes)
    name = tmp_path / "my.plan"
    save_plan(replace(first, layers_ahead=1), name)
    given = plan_of(path, plan=str(name)).run
    assert (given.layers_ahead, given.prefetch, given.prefetch_bytes) == (1, 3, 3 * 2 * one_each)
    assert prefetching_of(given) == Prefetching(1, 3, 3 * 2 * one_each)
    none = plan_of(path, plan=str(name), prefetch=0).run
    assert (none.layers_ahead, prefetching_of(none)) == (0, None)
    save_plan(replace(first, layers_ahead=10**9), name)
    with pytest.raises(ConfigError, match="for an expert of each of 1000000001 layers"):
        plan_of(path, plan=str(name))


def test_the_cap_is_in_the_file_of_a_plan(tmp_path: Path) -> None:
    path, budget = tiny(tmp_path, experts_used=2)
    run = plan_of(path, ctx_size=64, vram=budget, prefetch=1).run
    save_plan(run, tmp_path / "my.plan")
    assert json.loads((tmp_path / "my.plan").read_text())["prefetch_bytes"] == run.prefetch_bytes > 0


def test_places_that_are_expected_not_to_pay_take_no_room_from_steps_of_several_rows(tmp_path: Path) -> None:
    path, budget = tiny(tmp_path, experts_used=2)
    run = plan_of(path, ctx_size=64, vram=budget + 8 * MIB, prefetch=0).run
    placement = run.placement
    largest = max(placement.expert_bytes)
    least = math.ceil(SHARE_WITH_PLACES * placement.model.num_experts * largest)
    least = max(least, NUM_LAYERS * largest)  # so that it would have places
    for ring_bytes, has_room in ((least, False), (4 * least, True)):
        larger = replace(placement, ring_bytes=ring_bytes, budget_bytes=placement.budget_bytes + 4 * least)
        tight = replace(run, placement=larger)
        assert tight.shared_rows == MAX_SHARED_ROWS
        later = workers._with_open_places(tight, is_paying=False)
        assert later.shared_rows == MAX_SHARED_ROWS
        assert (later.ahead, later.prefetch > 0) == (("later", True) if has_room else ("fixed", False))
        assert workers._with_open_places(tight, is_paying=True).ahead == "first"
