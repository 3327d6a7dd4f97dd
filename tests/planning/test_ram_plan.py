"""A plan for RAM is what runs: context, slots and bytes, or the same refusal with an advice that works."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.runners import open_cpu_runner, ram_needs
from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.engine import LLM, EngineConfig, open_model
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.gguf import GGUFFile
from coldstream.kvcache.cache import kv_token_bytes
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.planning.gather import Sources, bundled_profile, plan_model
from coldstream.planning.planned import Planned
from coldstream.planning.unknowns import RamShape

# What kernels take besides weights depends on the tier, and budgets here are near what is needed.
CONFIG = EngineConfig(str(demo_model_path()), device="cpu", ram=1, threads=2, tier="generic")
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33)
MIB = 2**20
SHARE = 0.25  # of what the rest leaves, for a default context


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo model, one with experts of two sizes, and a dense one."""
    folder = tmp_path_factory.mktemp("models")
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    write_gguf(folder / "two.gguf", types=types, dims=Dims(experts=16, experts_used=3))
    write_gguf(folder / "dense.gguf", "qwen35")
    return [demo_model_path(), folder / "two.gguf", folder / "dense.gguf"]


def plan(config: EngineConfig, options: PlanOptions | None = None) -> Planned:
    with GGUFFile.open(Path(config.model)) as file:
        spec = read_spec(file.metadata, file.tensors)
        trace = bundled_profile(file, spec)
        return plan_model(config, Sources(file, spec, MACHINE, trace), options)


def taken_bytes(runner: CpuRunner) -> int:
    """Of what a plan counts: weights of every token, caches, activations, and experts in slots or mapped."""
    spec, tensors = runner.spec, runner.file.tensors
    layers = {name: int(name.split(".")[1]) for name in tensors if name.startswith("blk.")}
    trunk = [info for name, info in tensors.items() if layers.get(name, 0) < spec.num_layers]
    experts = sum(info.num_bytes for info in trunk if "_exps." in info.name)
    is_left = {"token_embd.weight"} if "output.weight" in tensors else set()
    dense = sum(info.num_bytes for info in trunk if info.name not in is_left) - experts
    fixed = dense + runner._sequences.tensors.num_bytes + runner.activation_bytes
    return fixed + (runner.disk.slot_bytes if runner.disk else experts)


def check_runs_as_planned(config: EngineConfig) -> Planned:
    planned, opened = plan(config), open_model(config)
    try:
        runner, placement = opened.runner, planned.plan
        assert isinstance(runner, CpuRunner)
        assert opened.plan == planned.run
        assert opened.config.ctx_size == runner.context_length == placement.fixed.ctx_size
        assert runner.threads == planned.run.threads
        assert runner.chunk_size == placement.fixed.chunk_size
        assert taken_bytes(runner) == placement.total_bytes <= placement.budget_bytes
        assert (runner.disk is None) == placement.is_all_resident
        if runner.disk is not None:
            assert runner.disk.num_slots == placement.num_resident
    finally:
        opened.close()
    return planned


def refusal(config: EngineConfig) -> str:
    with pytest.raises(OutOfMemoryError) as planning:
        plan(config)
    with pytest.raises(OutOfMemoryError) as opening:
        open_model(config)
    assert str(opening.value) == str(planning.value)
    return str(planning.value)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), number=st.integers(0, 2), ctx_size=st.sampled_from([None, 1, 100, 700]))
def test_a_plan_and_the_opened_model_agree_to_the_byte_and_the_slot(
    models: list[Path], data: st.DataObject, number: int, ctx_size: int | None
) -> None:
    """Or both refuse with one advice, which is then accepted."""
    config = replace(CONFIG, model=str(models[number]), ctx_size=ctx_size)
    most = plan(replace(config, ram=2**40)).plan.total_bytes
    config = replace(config, ram=data.draw(st.integers(0, most + MIB), "ram"))
    try:
        plan(config)
    except OutOfMemoryError:
        match = re.search(r"; try --ram (\d+)M", refusal(config))
        assert match
        config = replace(config, ram=int(match[1]) * MIB)
    check_runs_as_planned(config)


@pytest.mark.parametrize("ctx_size", [None, 64])
def test_without_a_budget_a_plan_is_what_runs_too(
    models: list[Path], ctx_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hardware, "measure", lambda: MACHINE)
    for model in models:
        config = EngineConfig(str(model), device="cpu", ctx_size=ctx_size)
        assert check_runs_as_planned(config).plan.is_all_resident


def test_an_advised_size_is_the_least_for_a_context_that_was_asked_for() -> None:
    config = replace(CONFIG, ctx_size=512)
    advice = int(refusal(config).split("try --ram ")[1].split("M")[0])
    check_runs_as_planned(replace(config, ram=advice * MIB))
    assert f"try --ram {advice}M, or a smaller --ctx-size" in refusal(replace(config, ram=(advice - 1) * MIB))


def test_planned_residents_are_loaded_with_the_uses_that_the_plan_expects() -> None:
    config = replace(CONFIG, ram="26M", ctx_size=64)
    planned, opened = plan(config), open_model(config)
    runner = opened.runner
    assert isinstance(runner, CpuRunner)
    tier = runner._disk
    assert tier is not None
    assert held(runner) == set(planned.plan.resident_numbers().tolist())
    scores, uses = tier._policy.scores, planned.run.expected_uses
    assert uses is not None
    assert np.array_equal(np.argsort(scores, kind="stable"), np.argsort(uses.ravel(), kind="stable"))
    assert (runner.disk.hits, runner.disk.misses) == (0, 0)  # type: ignore[union-attr]
    opened.close()


def test_where_nothing_is_known_of_uses_slots_fill_with_what_a_prompt_needs(models: list[Path]) -> None:
    config = replace(CONFIG, model=str(models[1]), ctx_size=64)
    budget = plan(replace(config, ram=2**40)).plan.total_bytes * 9 // 10
    opened = open_model(replace(config, ram=budget))
    assert isinstance(opened.runner, CpuRunner)
    assert opened.plan.uses is None
    assert opened.runner.disk is not None
    assert held(opened.runner) == set()
    opened.close()


@pytest.mark.sharded(of="plans")
def test_pinned_layers_stay_whatever_is_used(tmp_path: Path) -> None:
    config = replace(CONFIG, ram="27M", ctx_size=256)
    planned = plan(config, PlanOptions(num_pinned_layers=2))
    assert planned.plan.pinned_layers == (0, 7)
    save_plan(planned.run, tmp_path / "my.plan")
    opened = open_model(replace(CONFIG, ram="auto", plan=str(tmp_path / "my.plan")))
    runner = opened.runner
    assert isinstance(runner, CpuRunner)
    assert opened.plan == planned.run
    num_experts = runner.spec.num_experts
    pinned = {layer * num_experts + i for layer in (0, 7) for i in range(num_experts)}
    token_ids = np.random.default_rng(0).integers(0, runner.spec.vocab_size, 100).tolist()
    expected = None
    for _ in range(2):
        sequence = runner.new_sequence()
        runner.extend(sequence, token_ids[:50])
        assert pinned <= held(runner)
        for token in token_ids[50:]:
            logits = np.array(runner.extend(sequence, (token,)))
        runner.release(sequence)
        assert pinned <= held(runner)
        assert runner.disk is not None
        assert runner.disk.num_slots > len(pinned)
        expected = logits if expected is None else expected
        assert np.array_equal(logits, expected)
    with open_mapped() as mapped:
        sequence = mapped.new_sequence()
        mapped.extend(sequence, token_ids[:50])
        for token in token_ids[50:]:
            logits = mapped.extend(sequence, (token,))
        assert np.array_equal(logits, expected)
    opened.close()


def test_experts_of_weighted_layers_are_protected_and_change_no_bit(tmp_path: Path) -> None:
    """Of two models that differ in the weights alone, each holds more of the layer that it favours."""
    config = replace(CONFIG, ram="26M", ctx_size=256)
    held_of: list[list[int]] = []
    logits = []
    for layer in (2, 5):
        planned = plan(config, PlanOptions(layer_weights=((layer, 3.0),)))
        assert planned.plan.layer_weights[layer] == 3
        save_plan(planned.run, tmp_path / "my.plan")
        opened = open_model(replace(CONFIG, ram="auto", plan=str(tmp_path / "my.plan")))
        runner = opened.runner
        assert isinstance(runner, CpuRunner)
        assert opened.plan == planned.run
        token_ids = np.random.default_rng(0).integers(0, runner.spec.vocab_size, 100).tolist()
        sequence = runner.new_sequence()
        for token in token_ids:
            logits.append(np.array(runner.extend(sequence, (token,))))
        layers = np.array(sorted(held(runner))) // runner.spec.num_experts
        held_of.append(np.bincount(layers, minlength=8).tolist())
        opened.close()
    assert held_of[0][2] > 1.5 * held_of[1][2]
    assert held_of[1][5] > 1.5 * held_of[0][5]
    assert np.array_equal(logits[:100], logits[100:])


def open_mapped() -> CpuRunner:
    return open_cpu_runner(demo_model_path(), threads=2, context_length=256)


def held(runner: CpuRunner) -> set[int]:
    """Experts in slots, by number."""
    assert runner._disk is not None
    pool = runner._disk.pool
    owners = np.concatenate([pool.owners(size) for size in range(len(pool.slot_bytes))])
    return set(owners[owners >= 0].tolist())


def test_a_saved_plan_that_other_threads_do_not_fit_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, ctx_size=64, threads=1)
    most = plan(replace(config, ram=2**40)).plan.total_bytes
    save_plan(plan(replace(config, ram=most)).run, tmp_path / "my.plan")
    given = replace(CONFIG, ram="auto", plan=str(tmp_path / "my.plan"))
    open_model(replace(given, threads=1)).close()
    with pytest.raises(ConfigError, match=r"my\.plan does not fit its budget with 3 threads"):
        open_model(replace(given, threads=3))


@settings(max_examples=10, deadline=None)
@given(left=st.integers(1, 20 << 20))
def test_a_default_context_takes_a_share_of_what_the_rest_leaves(left: int) -> None:
    config = replace(CONFIG, ctx_size=1)
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        needs = ram_needs(file, spec, RamShape(2, CONFIG.tier, 1, CONFIG.cache_type_k))
    least = needs.least_bytes(PlanOptions())
    assert plan(replace(config, ram=least)).plan.num_resident == spec.num_experts_per_tok
    ctx_size = plan(replace(config, ctx_size=None, ram=least + left)).config.ctx_size
    affordable = int(left * SHARE) // kv_token_bytes(spec, CONFIG.cache_type_k)
    assert ctx_size == max(1, min(affordable, spec.context_length))


@pytest.mark.sharded
@pytest.mark.parametrize("parallel", [1, 3, "auto"])
def test_whole_contexts_are_planned_counted_and_allocated(models: list[Path], parallel: int | str) -> None:
    config = EngineConfig(str(models[0]), device="cpu", threads=1, ram="2G", ctx_size=300, parallel=parallel)
    planned = check_runs_as_planned(config)
    fixed, count = planned.run.placement.fixed, planned.config.parallel
    assert fixed.num_contexts == count
    assert isinstance(count, int)
    with LLM(models[0], device="cpu", threads=1, ctx_size=300, parallel=count) as llm:
        size = llm.opened.runner.cache_size
        assert size.num_blocks == 2 * count
        assert size.num_states >= (2 * count if count > 1 else 1)
