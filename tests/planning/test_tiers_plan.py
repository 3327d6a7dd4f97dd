"""Plans for a GPU with a budget of RAM: the file mapped, or a pool and the disk, or an advice that works."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan import PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, model_facts, plan_model
from coldstream.planning.planned import Planned

MIB = 2**20
GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of two sizes, in a file of two parts."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    dims = Dims(experts=64, experts_used=3)
    return write_gguf(path, types=dict(reversed(types.items())), dims=dims, num_shards=2)[0]


def plan(
    path: Path,
    config: EngineConfig,
    machine: Hardware = MACHINE,
    options: PlanOptions | None = None,
    more_bytes: int = 0,
) -> Planned:
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        return plan_model(config, Sources(file, spec, machine), options, more_bytes=more_bytes)


@pytest.fixture(scope="module")
def config(path: Path) -> EngineConfig:
    """A GPU that holds about a quarter of the experts."""
    asked = EngineConfig("m", device="cuda", vram=MIB, ctx_size=64)
    with pytest.raises(OutOfMemoryError) as caught:
        plan(path, asked)
    least = int(re.search(r"try --vram (\d+)M", str(caught.value))[1])  # type: ignore[index]
    found = replace(asked, vram=(least + 10) * MIB)
    assert 0.1 < plan(path, found).plan.num_resident / 256 < 0.6
    return found


@pytest.fixture(scope="module")
def whole_bytes(path: Path, config: EngineConfig) -> int:
    """RAM for the mapped file and all else."""
    with pytest.raises(OutOfMemoryError) as caught:
        plan(path, replace(config, ram=MIB))
    least = int(re.search(r"try --ram (\d+)M", str(caught.value))[1])  # type: ignore[index]
    pool = plan(path, replace(config, ram=least * MIB)).run.pool
    assert pool is not None
    with GGUFFile.open(path) as file:
        return file.num_bytes + pool.fixed.total


@settings(max_examples=15, deadline=None)
@given(data=st.data(), pinned=st.integers(0, 1))
def test_a_pool_in_any_budget_or_an_advice_that_is_accepted(
    path: Path, config: EngineConfig, data: st.DataObject, pinned: int
) -> None:
    ram = data.draw(st.integers(0, 1200 * MIB), "ram")
    options = PlanOptions(num_pinned_layers=pinned)
    config = replace(config, ram=ram, vram=config.vram + pinned * 64 * MIB)  # type: ignore[operator]
    if plan(path, replace(config, ram=2**40), options=options).plan.is_all_resident:
        return
    try:
        planned = plan(path, config, options=options)
    except OutOfMemoryError as error:
        match = re.search(r"^--ram: .* of RAM are below the minimum of .*; try --ram (\d+)M$", str(error))
        assert match
        config = replace(config, ram=int(match[1]) * MIB)
        planned = plan(path, config, options=options)
        with pytest.raises(OutOfMemoryError):
            plan(path, replace(config, ram=(int(match[1]) - 1) * MIB), options=options)
    run = planned.run
    if run.pool is None:
        return
    assert run.pool.total_bytes <= run.pool.budget_bytes == config.ram
    with GGUFFile.open(path) as file:
        sizes = model_facts(file, read_spec(file.metadata, file.tensors)).in_slots.expert_bytes
    assert all(size in (0, other) for size, other in zip(run.pool.expert_bytes, sizes, strict=True))
    assert run.miss_times is not None, "the GPU reads the pool"
    assert planned.config.prefetch == run.prefetch
    assert planned.reads_disk


def test_the_file_is_mapped_where_it_finds_room_beside_all_else(
    path: Path, config: EngineConfig, whole_bytes: int
) -> None:
    mapped, pooled = (plan(path, replace(config, ram=whole_bytes - i)).run for i in (0, 1))
    assert mapped.pool is None
    assert pooled.pool is not None
    assert mapped == plan(path, config).run, "nothing else is changed by a budget that suffices"
    assert replace(pooled, pool=None) == mapped


@pytest.mark.sharded(of="plans")
def test_without_a_budget_most_of_what_is_available_is_taken(
    path: Path, config: EngineConfig, whole_bytes: int
) -> None:
    scarce = replace(MACHINE, ram_available_bytes=int(whole_bytes / 0.9) - 9)
    planned = plan(path, config, scarce)
    assert planned.run.pool is not None
    assert planned.run.pool.budget_bytes == int(0.9 * scarce.ram_available_bytes)
    assert plan(path, config, replace(scarce, ram_available_bytes=2**33)).run.pool is None
    with pytest.raises(OutOfMemoryError, match=r"Choose a larger --vram .*; more of it is free when other"):
        plan(path, config, replace(scarce, ram_available_bytes=2**20))


def test_a_gpu_that_holds_all_experts_needs_no_ram_for_them(path: Path) -> None:
    planned = plan(path, EngineConfig("m", device="cuda", ctx_size=64, ram=MIB))
    assert planned.plan.is_all_resident
    assert planned.run.pool is None


@pytest.mark.sharded(of="plans")
def test_a_plan_with_a_pool_is_given_back(
    path: Path, config: EngineConfig, whole_bytes: int, tmp_path: Path
) -> None:
    first = plan(path, replace(config, ram=whole_bytes - MIB), more_bytes=4 * MIB)
    assert first.run.pool is not None
    save_plan(first.run, tmp_path / "my.plan")
    given_ = EngineConfig("m", device="cuda", plan=str(tmp_path / "my.plan"))
    again = plan(path, given_, more_bytes=4 * MIB)
    assert (again.run, again.more_ram) == (first.run, first.more_ram)
    assert again.config == replace(first.config, threads=first.run.threads)
    assert plan(path, replace(given_, prefetch=0)).run == replace(
        first.run, prefetch=0, prefetch_bytes=0, layers_ahead=0, ahead="fixed"
    )
    with pytest.raises(ConfigError, match="is part of the plan"):
        replace(given_, ram=MIB)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_experts_are_fetched_ahead_from_a_pool_as_from_the_mapped_file(
    path: Path, config: EngineConfig, whole_bytes: int, prefetch: int
) -> None:
    asked = replace(config, prefetch=prefetch)
    pooled, mapped = (plan(path, replace(asked, ram=ram)).run for ram in (whole_bytes - MIB, 2**33))
    assert pooled.pool is not None
    assert replace(pooled, pool=None) == mapped
    assert pooled.prefetch == prefetch


def test_a_forecast_says_what_comes_from_the_disk_and_what_more_memory_buys(
    path: Path, config: EngineConfig, whole_bytes: int
) -> None:
    planned = plan(path, replace(config, ram=whole_bytes - 12 * MIB), more_bytes=12 * MIB)
    run, known = planned.run, planned.known
    assert run.pool is not None
    assert planned.more_ram is not None
    assert planned.larger_plan is not None
    now = forecast(run.placement, known, pool=run.pool)
    more_ram = forecast(run.placement, known, pool=planned.more_ram.pool)
    more_vram = forecast(planned.larger_plan, known, pool=run.pool)
    assert 0 < now.disk_rate < 1 - now.hit_rate
    assert more_ram.disk_rate < now.disk_rate
    assert (more_ram.hit_rate, more_vram.hit_rate > now.hit_rate) == (now.hit_rate, True)
    for more in (more_ram, more_vram):
        assert more.decode > now.decode
        assert all(more.prefill[length] >= now.prefill[length] for length in now.prefill)
    assert now.decode <= now.decode_ceiling
    assert all(now.prefill[length] <= now.prefill_ceiling[length] for length in now.prefill)
    assert now.decode < forecast(run.placement, known).decode, "with all experts mapped"
