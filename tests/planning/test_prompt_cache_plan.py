"""RAM for kept prefixes is a part of the plan: what it takes, nothing else has, and advice counts it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan import PROMPT_CACHE, PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.planning import advice as advice_module
from coldstream.planning.choose import TooSmall
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.memory import HOST_RESERVE_BYTES
from coldstream.planning.planned import Planned

MIB = 2**20
GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)
ON_CPU = EngineConfig(str(demo_model_path()), device="cpu", threads=2, tier="generic")


def plan(config: EngineConfig, kept: int = 0, machine: Hardware = MACHINE, more_bytes: int = 0) -> Planned:
    with GGUFFile.open(Path(config.model)) as file:
        spec = read_spec(file.metadata, file.tensors)
        return plan_model(
            config, Sources(file, spec, machine), more_bytes=more_bytes, prompt_cache_bytes=kept
        )


def advice(config: EngineConfig, kept: int) -> tuple[int, int | None]:
    """The budget of RAM and the prompt cache that a refusal advises, in bytes."""
    with pytest.raises(OutOfMemoryError, match=r"^--ram: .* of RAM are below the minimum of ") as caught:
        plan(config, kept)
    assert PROMPT_CACHE in str(caught.value)
    found = re.search(r"; try --ram (\d+)M(?:, or --prompt-cache (\d+)M)?", str(caught.value))
    assert found, caught.value
    return int(found[1]) * MIB, int(found[2]) * MIB if found[2] else None


def least_vram(config: EngineConfig) -> int:
    """The budget of the GPU's memory that a refusal advises, in bytes."""
    with pytest.raises(OutOfMemoryError) as caught:
        plan(replace(config, vram=MIB))
    return int(re.search(r"try --vram (\d+)M", str(caught.value))[1]) * MIB  # type: ignore[index]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A GPU that holds some of the experts."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    types, dims = {"*_exps.weight": "Q4_K"}, Dims(experts=64, experts_used=3)
    config = EngineConfig(str(write_gguf(path, types=types, dims=dims)[0]), device="cuda", ctx_size=64)
    return replace(config, vram=least_vram(config) + 8 * MIB)


@settings(max_examples=15, deadline=None)
@given(
    ram=st.integers(25 * MIB, 60 * MIB),
    kept=st.integers(0, 2**34),
    ctx_size=st.sampled_from([None, 100]),
    parallel=st.sampled_from([1, "auto"]),
)
def test_a_model_in_ram_has_what_kept_prefixes_leave(
    ram: int, kept: int, ctx_size: int | None, parallel: int | str
) -> None:
    config = replace(ON_CPU, ctx_size=ctx_size, parallel=parallel)
    alone, beside = plan(replace(config, ram=ram)), plan(replace(config, ram=ram + kept), kept)
    fixed = replace(alone.plan.fixed, prompt_cache=kept)
    assert beside.plan == replace(alone.plan, budget_bytes=ram + kept, fixed=fixed)
    assert beside.plan.total_bytes == alone.plan.total_bytes + kept
    assert beside.config == replace(alone.config, ram=ram + kept)
    assert beside.run.prompt_cache_bytes == kept


@pytest.mark.sharded(of="plans")
@settings(max_examples=15, deadline=None)
@given(ram=st.integers(0, 60 * MIB), kept=st.integers(1, 90 * MIB), ctx_size=st.sampled_from([None, 700]))
def test_either_advice_about_kept_prefixes_in_ram_is_accepted(
    ram: int, kept: int, ctx_size: int | None
) -> None:
    config = replace(ON_CPU, ram=ram, ctx_size=ctx_size)
    try:
        plan(config, kept)
    except OutOfMemoryError:
        more_ram, less_kept = advice(config, kept)
        assert plan(replace(config, ram=more_ram), kept).run.prompt_cache_bytes == kept
        if ctx_size:
            with pytest.raises(OutOfMemoryError):
                plan(replace(config, ram=more_ram - MIB), kept)
        if less_kept is not None:
            assert plan(config, less_kept).run.prompt_cache_bytes == less_kept < kept
        elif ctx_size:
            with pytest.raises(OutOfMemoryError):
                plan(config, 2 * MIB)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_pool_beside_a_gpu_has_what_kept_prefixes_leave(on_gpu: EngineConfig, data: st.DataObject) -> None:
    whole = plan(replace(on_gpu, ram=2**40)).run
    kept = data.draw(st.integers(1, 2**34), "kept")
    least, _ = advice(replace(on_gpu, ram=MIB), kept)
    with pytest.raises(OutOfMemoryError):
        plan(replace(on_gpu, ram=least - MIB), kept)
    ram = data.draw(st.integers(least, least + 48 * MIB), "ram")
    alone = plan(replace(on_gpu, ram=ram - kept), more_bytes=MIB)
    beside = plan(replace(on_gpu, ram=ram), kept, more_bytes=MIB)
    assert (alone.run.pool is None) == (beside.run.pool is None)
    assert beside.run.prompt_cache_bytes == kept
    if alone.run.pool is None or beside.run.pool is None:
        assert replace(beside.run, prompt_cache_bytes=0) == alone.run == whole
        return
    assert beside.run.pool.fixed == replace(alone.run.pool.fixed, prompt_cache=kept)
    assert (beside.run.pool.loaded, beside.run.pool.budget_bytes) == (alone.run.pool.loaded, ram)
    assert beside.more_ram is not None
    assert alone.more_ram is not None
    assert beside.more_ram.pool is not None
    assert alone.more_ram.pool is not None
    assert beside.more_ram.pool.loaded == alone.more_ram.pool.loaded


def test_a_gpu_that_holds_the_whole_model_leaves_ram_for_kept_prefixes_and_the_program(
    on_gpu: EngineConfig,
) -> None:
    config = replace(on_gpu, vram="auto", ram=64 * MIB)
    assert plan(config).plan.is_all_resident
    more_ram, less_kept = advice(config, 10 * MIB)
    assert (more_ram, less_kept) == (HOST_RESERVE_BYTES + 10 * MIB, None)
    run = plan(replace(config, ram=more_ram), 10 * MIB).run
    assert (run.prompt_cache_bytes, run.pool, run.placement.fixed.prompt_cache) == (10 * MIB, None, 0)
    assert advice(replace(config, ram=more_ram), 12 * MIB) == (more_ram + 2 * MIB, 10 * MIB)


def test_a_dense_model_beside_which_kept_prefixes_have_no_room_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "dense.gguf", "qwen35")[0]
    config = EngineConfig(str(path), device="cuda", ctx_size=64, ram="4G")
    config = replace(config, vram=least_vram(config))
    assert not plan(config).plan.is_all_resident
    more_ram, less_kept = advice(config, 2**32)
    assert plan(replace(config, ram=more_ram), 2**32).run.prompt_cache_bytes == 2**32
    assert less_kept
    assert plan(config, less_kept).run.prompt_cache_bytes == less_kept
    with pytest.raises(OutOfMemoryError):
        plan(config, less_kept + MIB)


@pytest.mark.sharded(of="plans")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_budget_of_ram_a_smaller_prompt_cache_is_advised(on_gpu: EngineConfig, device: str) -> None:
    config = on_gpu if device == "cuda" else replace(ON_CPU, ctx_size=100)
    available = int(0.9 * MACHINE.ram_available_bytes)
    with pytest.raises(OutOfMemoryError, match=r"7\.20 GiB .* the prompt cache 7\.20") as caught:
        plan(config, available)
    assert str(caught.value).endswith(
        ". Choose a smaller --prompt-cache; more of it is free when other programs end"
    )
    assert plan(config, available - 2 * HOST_RESERVE_BYTES).run.prompt_cache_bytes
    scarce = replace(MACHINE, ram_available_bytes=MIB)
    with pytest.raises(OutOfMemoryError, match=r"Choose a (smaller --ctx-size|larger --vram) or a smaller q"):
        plan(config, 1, scarce)


@pytest.mark.parametrize("device", ["cpu", "cuda", "pool"])
def test_kept_prefixes_of_a_given_plan_are_its_own(on_gpu: EngineConfig, device: str, tmp_path: Path) -> None:
    config = replace(ON_CPU, ctx_size=100, ram=40 * MIB) if device == "cpu" else on_gpu
    if device == "pool":
        config = replace(config, ram=advice(replace(on_gpu, ram=MIB), 7 * MIB)[0] + MIB)
    first = plan(config, 7 * MIB, more_bytes=MIB)
    assert (first.run.pool is not None) == (device == "pool")
    save_plan(first.run, tmp_path / "my.plan")
    given_ = EngineConfig(
        config.model, device=config.device, tier=config.tier, plan=str(tmp_path / "my.plan")
    )
    again = plan(given_, more_bytes=MIB)
    assert (again.run, again.larger_plan, again.more_ram) == (first.run, first.larger_plan, first.more_ram)
    assert again.config.ram == (config.ram if device != "cuda" else "auto")
    with pytest.raises(ConfigError, match=r"prompt_cache \(--prompt-cache SIZE\) is part of the plan: leave"):
        plan(given_, 7 * MIB)


def test_an_error_about_the_gpu_does_not_advise_a_prompt_cache(on_gpu: EngineConfig) -> None:
    for vram in (MIB, "auto"):
        machine = replace(MACHINE, gpu=replace(GPU, free_bytes=MIB))
        with pytest.raises(OutOfMemoryError) as caught:
            plan(replace(on_gpu, vram=vram), 2**40, machine)
        assert str(caught.value).startswith("--vram: ")
        assert "prompt" not in str(caught.value)


def sizes(most_mib: int, least: int = 0) -> st.SearchStrategy[int]:
    """Whole MiB and a rest: plain integers are nearly all below 1 MiB, or equal to each other."""
    remainders = st.integers(least, MIB - 1)
    return st.builds(lambda mib, rest: mib * MIB + rest, st.integers(0, most_mib), remainders)


@given(sizes(500), sizes(500, 1), sizes(500, 1), sizes(5))
def test_advice_is_in_whole_mib_and_gives_what_is_missing(
    budget: int, rest: int, kept: int, hidden: int
) -> None:
    """hidden: of the least, what only a try shows."""

    def place(
        config: EngineConfig, facts: None, options: PlanOptions, prompt_cache_bytes: int
    ) -> TooSmall | None:
        assert isinstance(config.ram, int)
        if config.ram >= rest + prompt_cache_bytes + hidden:
            return None
        return TooSmall("ram", config.ram, {"weights": rest, PROMPT_CACHE: prompt_cache_bytes})

    config, options = replace(ON_CPU, ctx_size=100, ram=budget), PlanOptions()
    small = place(config, None, options, kept)
    if small is None or small.least_bytes <= budget:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice_module, "place", place)
        message = str(advice_module.advised(small, config, None, options, kept))  # type: ignore[arg-type]
    found = re.search(r"; try --ram (\d+)M(?:, or --prompt-cache (\d+)M)?, or a smaller --ctx-size$", message)
    assert found
    assert place(replace(config, ram=int(found[1]) * MIB), None, options, kept) is None
    if found[2]:
        assert 0 < int(found[2]) * MIB < kept
        assert place(config, None, options, int(found[2]) * MIB) is None
        assert place(config, None, options, int(found[2]) * MIB + 2 * MIB) is not None
    else:
        assert place(replace(config, ram=max(0, budget - 2 * MIB)), None, options, 1) is not None
