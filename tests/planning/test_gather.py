"""From a configuration to a plan: budgets, defaults, and a plan that is given back."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import Dims, write_gguf
from coldstream.assets import demo_model_path, demo_profile_path
from coldstream.engine.opened_model import open_model
from coldstream.errors import ConfigError, InconsistentError, ModelNotFoundError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan import PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.planning import gather
from coldstream.planning.choose import DEFAULT_CTX_SIZE
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, bundled_profile, plan_by_name, plan_model
from coldstream.planning.planned import Planned

MIB = 2**20
GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)

Make = Callable[[EngineConfig], Planned]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    (path,) = write_gguf(tmp_path / "tiny.gguf", types={"*_exps.weight": "Q4_K"})

    def make(config: EngineConfig) -> Planned:
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            return plan_model(config, Sources(file, spec, MACHINE))

    return make


def test_without_a_budget_what_is_free_may_be_used_but_for_a_part_of_ram(make: Make) -> None:
    on_gpu = make(EngineConfig("m", device="cuda"))
    assert (on_gpu.plan.tier, on_gpu.plan.budget_bytes) == ("vram", 2**34)
    on_cpu = make(EngineConfig("m", device="cpu"))
    assert (on_cpu.plan.tier, on_cpu.plan.budget_bytes) == ("ram", int(0.9 * 2**33))
    for planned in (on_gpu, on_cpu):
        assert planned.plan.is_all_resident
        assert planned.config.ctx_size == planned.plan.fixed.ctx_size == 4096 < DEFAULT_CTX_SIZE
    assert on_gpu.known.rates.assumed == ("disk_bytes_per_s", "row_bytes_per_s", "mixers")


def test_a_default_context_leaves_room_for_experts(make: Make) -> None:
    whole = make(EngineConfig("m", device="cuda"))
    with pytest.raises(OutOfMemoryError) as caught:
        make(EngineConfig("m", device="cuda", vram=MIB))
    advice = re.search(r"try --vram (\d+)M", str(caught.value))
    assert advice
    budget = (int(advice[1]) + 1) * MIB
    small = make(EngineConfig("m", device="cuda", vram=budget))
    assert small.plan.total_bytes <= budget
    assert small.plan.fixed.ctx_size < whole.plan.fixed.ctx_size
    assert small.plan.num_resident > 0


def test_a_context_that_was_asked_for_is_not_reduced(make: Make) -> None:
    with pytest.raises(OutOfMemoryError, match="caches of 4096 tokens"):
        make(EngineConfig("m", device="cpu", ram=MIB, ctx_size=4096))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_is_given_back(make: Make, tmp_path: Path, device: str) -> None:
    budget = {"cpu": {"ram": 32 * MIB}, "cuda": {"vram": 500 * MIB}}[device]
    kv_type = {"cpu": "i4", "cuda": "i8"}[device]
    types = {"cache_type_k": kv_type, "cache_type_v": kv_type}
    first = make(EngineConfig("m", device=device, ctx_size=123, attention_window=50, **budget, **types))  # type: ignore[arg-type]
    assert first.run.attention_window == 50
    save_plan(first.run, tmp_path / "plan.json")
    again = make(EngineConfig("m", device=device, plan=str(tmp_path / "plan.json")))
    assert again.run == first.run
    assert again.known == first.known
    assert again.config == first.config


def test_a_model_is_opened_by_a_plan(tmp_path: Path) -> None:
    for arch in ("qwen35moe", "qwen35"):
        (path,) = write_gguf(tmp_path / f"{arch}.gguf", arch)
        config = EngineConfig(str(path), device="cpu", ctx_size=77, ram=256 * MIB)
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            save_plan(plan_model(config, Sources(file, spec, MACHINE)).run, tmp_path / "plan.json")
        opened = open_model(EngineConfig(str(path), device="cpu", plan=str(tmp_path / "plan.json")))
        assert (opened.config.ctx_size, opened.config.ram, opened.config.plan) == (77, 256 * MIB, None)
        opened.close()


def test_a_plan_for_something_else_is_refused(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    config = EngineConfig("m", device="cpu", plan=str(path))
    with pytest.raises(ModelNotFoundError):
        make(config)
    run = make(EngineConfig("m", device="cpu")).run
    plan = run.placement
    save_plan(run, path)
    with pytest.raises(ConfigError, match="a plan for the CPU, the device is cuda"):
        make(replace(config, device="cuda"))
    for fixed in (replace(plan.fixed, ctx_size=9999), replace(plan.fixed, kv_type="f99")):
        save_plan(replace(run, placement=replace(plan, fixed=fixed)), path)
        with pytest.raises(ConfigError, match="which this model cannot have"):
            make(config)
    other = replace(plan, model=replace(plan.model, fingerprint="00" * 16))
    save_plan(replace(run, placement=other), path)
    with pytest.raises(InconsistentError, match="another model's"):
        make(config)


def test_the_demo_model_has_a_bundled_profile_and_no_other_model_has() -> None:
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        trace = bundled_profile(file, spec)
    assert trace is not None
    assert trace.num_steps > 5000
    assert (trace.counts() > 0).all()
    assert demo_profile_path().stat().st_size < 200_000


def test_a_model_without_a_bundled_profile_has_none(tmp_path: Path) -> None:
    for arch in ("qwen35moe", "qwen35"):
        (path,) = write_gguf(tmp_path / f"{arch}.gguf", arch)
        with GGUFFile.open(path) as file:
            assert bundled_profile(file, read_spec(file.metadata, file.tensors)) is None


@pytest.mark.sharded(of="plans")
def test_the_demo_model_is_planned_by_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineConfig(str(demo_model_path()), device="cpu", ram=30 * MIB, ctx_size=1000)
    planned = plan_by_name(config)
    assert not planned.plan.is_all_resident
    assert "replay" in planned.known.curve.source
    assert planned.known.uses is not None
    resident = np.zeros(planned.known.uses.shape, bool)
    resident.ravel()[planned.plan.resident_numbers()] = True
    assert planned.known.uses[resident].min() >= planned.known.uses[~resident].max()


@pytest.mark.sharded(of="plans")
def test_a_plan_also_stands_with_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer prefill steps take more memory, and leave enough for pinned layers."""
    monkeypatch.setattr(gather, "missing_packages", lambda: ("torch",))
    dims, options = Dims(experts=64, experts_used=3, expert_ffn=1024), PlanOptions(num_pinned_layers=1)
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=dims)
    with GGUFFile.open(path) as file:
        sources = Sources(file, read_spec(file.metadata, file.tensors), MACHINE)
        found = []
        for budget in range(490 * MIB, 560 * MIB, MIB):
            config = EngineConfig("m", device="cuda", vram=budget, ctx_size=64)
            try:
                planned = plan_model(config, sources, options, more_bytes=MIB)
            except OutOfMemoryError:
                assert not found
                continue
            found.append(planned.plan.fixed.chunk_size)
            assert planned.larger_plan is None or planned.larger_plan.budget_bytes == budget + MIB
            assert planned.plan.is_all_resident or planned.larger_plan is not None
    assert 512 in found
    assert 2048 in found


@pytest.mark.sharded
@pytest.mark.parametrize("num_experts", [4, 16, 32])
def test_the_least_memory_with_long_steps_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_experts: int
) -> None:
    """That of a search of every MiB, also where more of it has all experts, and shorter steps for them."""
    monkeypatch.setattr(gather, "missing_packages", lambda: ("torch",))
    dims = Dims(experts=num_experts, experts_used=3, expert_ffn=1024)
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=dims)
    with GGUFFile.open(path) as file:
        sources = Sources(file, read_spec(file.metadata, file.tensors), MACHINE)

        def plan(budget: int, *, more_bytes: int = 0, ctx_size: int = 4096) -> Planned:
            config = EngineConfig("m", device="cuda", vram=budget, ctx_size=ctx_size)
            return plan_model(config, sources, more_bytes=more_bytes)

        plans = {mib: plan(mib * MIB).plan for mib in range(464, 500)}
        first = next(mib for mib, each in plans.items() if each.fixed.chunk_size >= 2048)
        assert plans[first - 1].fixed.chunk_size < 2048
        for budget in (464 * MIB, 465 * MIB + 1, (first - 1) * MIB):
            is_named = not plan(budget).plan.is_all_resident
            least = first * MIB - budget
            for more_bytes in (least - 1, least, 104 * MIB):
                found = plan(budget, more_bytes=more_bytes).longer_steps
                expected = plans[first] if is_named and more_bytes >= least else None
                assert found == expected, (budget, more_bytes)
        assert plan(first * MIB, more_bytes=104 * MIB).longer_steps is None, "steps are long"
        assert plan(464 * MIB, more_bytes=2**28, ctx_size=64).longer_steps is None, "all text is short"
