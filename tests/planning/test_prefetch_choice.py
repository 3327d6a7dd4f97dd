"""Prefetching is decided when a model is opened, and changes no token."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from coldstream.assets import demo_model_path
from coldstream.engine import LLM, EngineConfig, SamplingParams
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.read_spec import read_spec
from coldstream.placement.cost import COPY_BYTES_PER_STEP, PREFETCHED, miss_times
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.prompt_cost import MAX_CPU_ROWS
from coldstream.placement.rates import Rates
from coldstream.placement.run_plan import RunPlan
from coldstream.planning import workers
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.machine import hardware_with

MACHINE = Hardware(
    "a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10,
    GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6),
)  # fmt: skip
PROMPT = list(range(300, 340))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@cache
def budget_for_a_part_of_the_experts(hardware: Hardware) -> int:
    """In bytes. A smaller one is also planned with a smaller workspace."""
    config = EngineConfig(str(demo_model_path()), device="cuda", vram="64G", ctx_size=256)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        while (planned := plan_model(config, Sources(file, spec, hardware))).plan.is_all_resident:
            less = planned.plan.total_bytes - planned.sizes.all_expert_bytes // 4
            config = replace(config, vram=less)
    assert planned.plan.num_resident > 0
    return planned.plan.budget_bytes


def test_auto_is_a_number_once_a_model_is_open() -> None:
    with LLM(demo_model_path(), device="cpu", ctx_size=64) as llm:
        assert llm.opened.config.prefetch == 0


@pytest.mark.parametrize("asked", ["auto", 0, 3])
def test_only_what_is_left_open_is_decided(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vram = budget_for_a_part_of_the_experts(MACHINE)
    gains = iter([1e-5, -1e-5])
    monkeypatch.setattr(workers, "prefetch_gain", lambda *of: next(gains))
    config = EngineConfig(
        str(demo_model_path()), device="cuda", vram=vram, ctx_size=256, prefetch=asked, threads=3
    )
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        unmeasured = replace(MACHINE, read_bytes_per_s=None)
        decided = [
            plan_model(config, Sources(file, spec, unmeasured, measured=lambda: MACHINE)) for _ in range(2)
        ]
    wanted = [PREFETCHED if asked == "auto" else asked] * 2
    assert [planned.config.prefetch for planned in decided] == wanted
    assert [planned.run.prefetch for planned in decided] == wanted
    starts = ["first", "later"] if asked == "auto" else ["fixed"] * 2
    assert [planned.run.ahead for planned in decided] == starts
    for planned in decided:
        assert planned.hardware == MACHINE
        assert planned.run.threads == 3
        rates = Rates.of(planned.hardware)
        times = planned.run.miss_times
        assert times is not None
        assert times == replace(miss_times(max(planned.plan.expert_bytes), rates), layer=times.layer)
        assert times.layer > 0
        assert planned.run.max_cpu_rows == min(MAX_CPU_ROWS, planned.plan.fixed.chunk_size)
        assert planned.run.copy_bytes_per_step == COPY_BYTES_PER_STEP


@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (4, 3)])
def test_one_core_is_left_to_the_gpu_where_there_are_several(num_cores: int, threads: int) -> None:
    machine = replace(MACHINE, num_physical_cores=num_cores)
    vram = budget_for_a_part_of_the_experts(machine)
    config = EngineConfig(str(demo_model_path()), device="cuda", vram=vram, ctx_size=256)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        assert plan_model(config, Sources(file, spec, machine)).run.threads == threads


def test_a_machine_is_not_measured_for_a_plan_that_does_not_need_it() -> None:
    def measured() -> Hardware:
        raise AssertionError("nothing follows from rates")

    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        for config in (
            EngineConfig(str(demo_model_path()), device="cuda", vram="64G"),
            EngineConfig(str(demo_model_path()), device="cpu", ram="30M"),
        ):
            plan_model(config, Sources(file, spec, MACHINE, measured=measured))


@pytest.mark.gpu
def test_what_was_decided_is_done_and_the_text_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where the machine's rates are kept
    budget = budget_for_a_part_of_the_experts(hardware_with(find_gpu()))
    texts = set()
    for asked in ("auto", 0, 2):
        with LLM(demo_model_path(), device="cuda", vram=budget, ctx_size=256, prefetch=asked) as llm:
            count = llm.opened.config.prefetch
            assert count <= PREFETCHED if asked == "auto" else count == asked
            (output,) = llm.generate([PROMPT], GREEDY)
            texts.add(output.token_ids)
            experts = llm.opened.runner.gpu_experts
            assert experts is not None
            assert (experts.prefetch is not None) == bool(count)
    assert len(texts) == 1


@pytest.mark.parametrize("has_room", [True, False])
def test_the_cpu_has_a_part_in_longer_steps_where_that_pays_and_ram_has_room(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vram = budget_for_a_part_of_the_experts(MACHINE)
    asked = list[int]()

    def pool_of(run: RunPlan, *_: object) -> object:
        return None if has_room or run.max_cpu_rows == 16 else "a pool"

    def rows_with_cpu(_: object, rates: Rates, resident: Any, chunk_size: int, ring_bytes: int) -> int:
        asked.append(int(resident.sum()))
        return min(64, chunk_size)

    monkeypatch.setattr(workers, "MAX_CPU_ROWS", 16)
    monkeypatch.setattr(workers, "pool_of", pool_of)
    monkeypatch.setattr(workers, "rows_with_cpu", rows_with_cpu)
    config = EngineConfig(str(demo_model_path()), device="cuda", vram=vram, ctx_size=256)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        planned = plan_model(config, Sources(file, spec, MACHINE))
    assert asked[-1] == planned.plan.num_resident
    assert planned.run.max_cpu_rows == (64 if has_room else 16)
    assert planned.run.pool is None
