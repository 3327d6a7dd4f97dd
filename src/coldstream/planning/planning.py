"""From a configuration to a plan, by the sizes of the model and the budget of the machine.

Only `plan_model` chooses how a model runs; `coldstream plan` prints its choices, and opening a model carries
them out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coldstream.assets import demo_profile_path
from coldstream.errors import ConfigError, ModelFormatError, ModelNotFoundError, host_memory_errors
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.models.footprint import routed_model
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.disk_rate import measure_disk
from coldstream.placement.forecast import NEXT_BYTES
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import BudgetTooSmallError, PlacementPlan, PlanOptions
from coldstream.placement.plan_file import load_plan
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.budgets import ALL_BYTES, advised, budget_bytes, ram_bytes
from coldstream.planning.config import EngineConfig, resolve
from coldstream.planning.device_choice import OpenProgress, device_to_plan_for
from coldstream.planning.draft_file import DraftNeeds, open_draft
from coldstream.planning.machine import measured_hardware
from coldstream.planning.model_to_plan import ModelToPlan, all_sizes
from coldstream.planning.planned import Planned
from coldstream.planning.workers import MakePool, with_places, with_workers

Array = np.ndarray[Any, Any]

_AGAIN = "make another with `coldstream plan`"


def plan_model(
    config: EngineConfig,
    file: GGUFFile,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    trace: RoutingTrace | None = None,
    options: PlanOptions | None = None,
    more_bytes: int = 0,
    measured: Callable[[], Hardware] | None = None,
    draft: DraftNeeds | None = None,
    prompt_cache_bytes: int = 0,
) -> Planned:
    """Plans an open model on the device of `config`, which is cpu or cuda.

    Follows the plan that `config` names, or its budgets, or else free memory. A trace of the model gives the
    uses of experts. more_bytes: further fast memory, for `larger_plan`. measured: returns `hardware` with
    rates; called only if a choice depends on them. draft: the drafter for spec_type dflash.
    prompt_cache_bytes: of RAM, within its budget, for kept prefixes of prompts. Raises ConfigError and
    OutOfMemoryError as `resolve` and `plan_placement`, with a sufficient budget as advice; as `load_plan`;
    and ConfigError for a plan for the other device, for pinned or weighted layers that do not exist, for
    prefetched experts that were asked for and have no place, and for kept prefixes beside a plan.
    """
    options = options or PlanOptions()
    _check_layers(options, spec.num_layers)
    spec = spec.with_window(config.attention_window)
    uses, num_cores = expected_uses(trace), hardware.num_physical_cores
    model = ModelToPlan(file, spec, options, uses, num_cores, draft, prompt_cache_bytes)
    if config.plan is not None:
        return _given_plan(config, model, hardware, trace, more_bytes)
    budget = budget_bytes(config, hardware)
    asked, known_places, warnings = model.with_drafts(config, budget)
    try:
        config = model.with_context(asked, budget)
        places = known_places or model.place(config, [budget])
        if more_bytes and not places[0][0].is_all_resident:
            places = model.place(config, [budget, budget + more_bytes])
    except BudgetTooSmallError as error:
        attempt = partial(model.try_budget, asked)
        raise advised(error, asked, spec, attempt, prompt_cache_bytes) from None
    (placement, sizes), *larger = places
    planned = Planned(
        RunPlan(
            placement,
            0,
            model.uses_as_data,
            attention_window=config.attention_window,
            spec_type=config.spec_type,
            tree_budget=0 if config.tree_budget == "auto" else config.tree_budget,
            prompt_cache_bytes=prompt_cache_bytes,
        ),
        larger[0][0] if larger else None,
        sizes,
        config,
        hardware,
        trace,
    )
    make_pool = _pool_maker(model, placement, asked, ram_bytes(config, hardware))
    planned = with_workers(replace(planned, warnings=warnings), asked, measured, make_pool)
    return _with_more_ram(planned, model, more_bytes)


def _pool_maker(model: ModelToPlan, placement: PlacementPlan, asked: EngineConfig, ram: int) -> MakePool:
    """Plans the pool in `ram` bytes beside the slots of `placement`."""

    def make_pool(threads: int, max_cpu_rows: int) -> PoolPlan | None:
        def attempt(budget: int) -> PoolPlan | None:
            return model.pool(placement, budget, threads, max_cpu_rows)

        try:
            return attempt(ram)
        except BudgetTooSmallError as error:
            raise advised(error, asked, model.spec, attempt, model.prompt_cache_bytes) from None

    return make_pool


def _with_more_ram(planned: Planned, model: ModelToPlan, more_bytes: int) -> Planned:
    """Adds the plan with more RAM beside a GPU, if experts are on the disk."""
    run = planned.run
    if run.pool is None or not more_bytes:
        return planned
    larger = model.pool(run.placement, run.pool.budget_bytes + more_bytes, run.threads, run.max_cpu_rows)
    return replace(planned, more_ram=replace(run, pool=larger))


def _check_layers(options: PlanOptions, num_layers: int) -> None:
    """Raises ConfigError for layers out of range."""
    count = options.num_pinned_layers
    if count > num_layers:
        raise ConfigError(
            f"--pin-layers {count}: the model has {num_layers} layers, so it can be 0 to {num_layers}"
        )
    for layer, weight in options.layer_weights:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"--layer-weights {layer}={weight:g}: the model has {num_layers} layers, from 0 to "
                f"{num_layers - 1}"
            )


def expected_uses(trace: RoutingTrace | None) -> Array | None:
    """Uses a step of each expert, float64 [layers, experts]; None if there is no trace."""
    return trace.counts() / trace.num_steps if trace else None


def _given_plan(
    config: EngineConfig, model: ModelToPlan, hardware: Hardware, trace: RoutingTrace | None, more_bytes: int
) -> Planned:
    """The plan that `config` names. Threads and prefetching in `config` take precedence."""
    assert config.plan is not None
    name, spec = config.plan, model.spec
    if model.prompt_cache_bytes:
        raise ConfigError("prompt_cache (--prompt-cache SIZE) is part of the plan: leave it out, or --plan")
    is_asked = config.prefetch != "auto"
    run = load_plan(Path(name), all_sizes(config, model.file, spec))
    model = replace(
        model, spec=spec.with_window(run.attention_window), prompt_cache_bytes=run.prompt_cache_bytes
    )
    plan = run.placement
    _check_given(name, plan, config, spec)
    tier = plan.tier
    said: dict[str, Any] = {
        "plan": None,
        tier: plan.budget_bytes,
        "ctx_size": plan.fixed.ctx_size,
        "cache_type_k": plan.fixed.kv_type,
        "cache_type_v": plan.fixed.kv_type,
        "threads": run.threads or "auto" if config.threads == "auto" else config.threads,
        "prefetch": config.prefetch if is_asked else run.prefetch,
        **({"ram": run.pool.budget_bytes} if run.pool else {}),
        "attention_window": run.attention_window,
        "spec_type": run.spec_type,
        "tree_budget": run.tree_budget or "auto",
        "parallel": plan.fixed.num_contexts,
    }
    config = resolve(replace(config, **said), spec, hardware.num_physical_cores, ALL_BYTES)
    assert isinstance(config.threads, int)
    cap, source = (plan.ring_bytes, "--prefetch") if is_asked else (run.prefetch_bytes, f"{name}: prefetch")
    run = replace(run, threads=config.threads if run.threads else 0)
    run, config = with_places(run, config, cap, source)
    if tier == "vram":
        sizes = model.sizes(config)
    else:
        sizes, fixed = model.ram_needs(config).parts_for(plan)
        try:  # other threads or another version may need more than when the plan was made
            run = replace(run, placement=replace(plan, fixed=fixed))
        except ValueError as error:
            raise ConfigError(
                f"{name} does not fit its budget with {config.threads} threads: {error}; {_AGAIN}"
            ) from None
    if plan.expert_bytes != sizes.expert_bytes:
        raise ConfigError(f"{name} has experts of other sizes than they have on this device: {_AGAIN}")
    larger = None
    if more_bytes and not run.placement.is_all_resident:
        larger = replace(model, uses=run.expected_uses).place(config, [plan.budget_bytes + more_bytes])[0][0]
    planned = Planned(run, larger, sizes, config, hardware, trace)
    return _with_more_ram(planned, replace(model, uses=run.expected_uses), more_bytes)


def _check_given(name: str, plan: PlacementPlan, config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for a plan for another device, or for a context that the model cannot have."""
    if plan.tier != ("vram" if config.device == "cuda" else "ram"):
        raise ConfigError(
            f"{name} is a plan for {'a GPU' if plan.tier == 'vram' else 'the CPU'}, the device is "
            f"{config.device}: {_AGAIN}, or choose the other --device"
        )
    if plan.fixed.kv_type not in CACHE_LAYOUTS or not 0 < plan.fixed.ctx_size <= spec.context_length:
        raise ConfigError(
            f"{name} is for {plan.fixed.ctx_size} tokens of {plan.fixed.kv_type}, which this model "
            f"cannot have: {_AGAIN}"
        )


@host_memory_errors()
def plan_by_name(
    config: EngineConfig,
    options: PlanOptions | None = None,
    profile: Path | None = None,
    progress: OpenProgress | None = None,
    *,
    measure: bool = False,
    prompt_cache_bytes: int = 0,
) -> Planned:
    """`plan_model` for the model that `config` names, on this machine, which is measured if needed.

    Reads only the header and small tensors of the model. With a budget of GPU memory the plan is for a GPU,
    even if there is none. profile: the path of a trace; None: the bundled one, for the demo model. measure:
    whether to measure the machine again. prompt_cache_bytes as for `plan_model`. Raises also as `open_model`
    and `RoutingTrace.load`.
    """
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        trace = bundled_profile(file, spec)
        if profile is not None:
            trace = RoutingTrace.load(profile, routed_model(file, spec))
        config, gpu, warnings = device_to_plan_for(config)
        hardware = measured_hardware(gpu, progress, again=measure)
        with open_draft(config, spec) as draft:
            planned = plan_model(
                draft.config,
                file,
                spec,
                hardware,
                trace=trace,
                options=options,
                more_bytes=NEXT_BYTES,
                draft=draft.needs,
                prompt_cache_bytes=prompt_cache_bytes,
            )
            warnings += draft.warnings + file.metadata.warnings + spec.warnings
    planned = replace(planned, warnings=warnings + planned.warnings)
    if planned.reads_disk:
        matrix_bytes = max(planned.sizes.expert_bytes) // 3
        planned = replace(planned, disk_bytes_per_s=measure_disk(path, matrix_bytes))
    return planned


def load_plan_by_name(config: EngineConfig, path: Path, progress: OpenProgress | None = None) -> RunPlan:
    """The plan in the file at `path`, of the model that `config` names. Raises as `load_plan`."""
    model = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(model) as file:
        spec = read_spec(file.metadata, file.tensors)
        return load_plan(path, all_sizes(config, file, spec))


def bundled_profile(file: GGUFFile, spec: ModelSpec) -> RoutingTrace | None:
    """The trace in the package if it is of this model, which then is the demo model."""
    if not spec.is_moe:
        return None
    try:
        return RoutingTrace.load(demo_profile_path(), routed_model(file, spec))
    except (ModelFormatError, ModelNotFoundError):
        return None
