"""From a configuration to a plan: sizes of the model, budget of the machine, and all that follows from both.

`plan_model` is where everything is chosen that runs from the first token on; `coldstream plan` prints what it
chooses, and opening a model obeys it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coldstream.assets import demo_profile_path
from coldstream.engine.budgets import advised, budget_bytes
from coldstream.engine.config import EngineConfig, cache_bytes_per_token, resolve
from coldstream.engine.device_choice import OpenProgress, device_to_plan_for
from coldstream.engine.machine import measured_hardware
from coldstream.engine.routing_profile import routed_model
from coldstream.errors import ConfigError, ModelFormatError, ModelNotFoundError
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.models.cpu_runner import ALL_BYTES, CpuRunner
from coldstream.models.fixed_part import fixed_parts_on_gpu, least_bytes
from coldstream.models.footprint import model_sizes
from coldstream.models.ram_budget import RamNeeds, sizes_in_ram
from coldstream.models.spec import ModelSpec
from coldstream.placement.cost import PREFETCHED, prefetch_gain, streamed_by_misses
from coldstream.placement.disk_rate import measure_disk
from coldstream.placement.forecast import NEXT_BYTES, Known, hit_rates_of
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import PUBLISHED, HitCurve
from coldstream.placement.plan import (
    BudgetTooSmallError,
    PlacementPlan,
    PlanOptions,
    Tier,
    plan_placement,
)
from coldstream.placement.plan_file import load_plan
from coldstream.placement.rates import Rates
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Planned:
    """A plan, what more memory would make of it, and everything that both follow from."""

    run: RunPlan
    larger_plan: PlacementPlan | None  # None: all is resident already, or nobody asked
    sizes: ModelSizes
    config: EngineConfig  # with a concrete device, context and prefetching
    hardware: Hardware
    trace: RoutingTrace | None
    disk_bytes_per_s: float | None = None
    warnings: tuple[str, ...] = ()  # about the device, for people

    @property
    def plan(self) -> PlacementPlan:
        """What lies where."""
        return self.run.placement

    @cached_property
    def known(self) -> Known:
        """For forecasts. With a trace it is replayed, which takes seconds for a large model."""
        weights = self.plan.expert_weights
        curve = HitCurve.from_trace(self.trace, weights) if self.trace else PUBLISHED
        return Known(
            self.sizes,
            Rates.of(self.hardware, self.disk_bytes_per_s),
            curve,
            self.run.expected_uses,
            may_prefetch=self.config.prefetch != 0,
        )


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
) -> Planned:
    """All that is chosen for an open model, on the device of `config`, which is cpu or cuda.

    By the plan that `config` names, or by its budgets; without one, by what is free. A trace of the model
    says which experts are used most. more_bytes: of fast memory, for a larger plan besides. measured: gives
    `hardware` with rates, and is called only if something follows from them. Raises ConfigError and
    OutOfMemoryError as `resolve` and `plan_placement`, with a budget that does, as `load_plan`, and
    ConfigError for a plan for the other device and for pinned or weighted layers that are not there.
    """
    options = options or PlanOptions()
    _check_layers(options, spec.num_layers)
    model = _Model(file, spec, options, expected_uses(trace), hardware.num_physical_cores)
    if config.plan is not None:
        return _given_plan(config, model, hardware, trace, more_bytes)
    asked, budget = config, budget_bytes(config, hardware)
    try:
        config = model.with_context(asked, budget)
        places = model.place(config, [budget])
        if more_bytes and not places[0][0].is_all_resident:
            places = model.place(config, [budget, budget + more_bytes])
    except BudgetTooSmallError as error:
        raise advised(error, asked, spec, lambda bytes_: model.try_budget(asked, bytes_)) from None
    (placement, sizes), *larger = places
    planned = Planned(
        RunPlan(placement, 0, model.uses_as_data),
        larger[0][0] if larger else None,
        sizes,
        config,
        hardware,
        trace,
    )
    return with_workers(planned, asked, measured)


def _check_layers(options: PlanOptions, num_layers: int) -> None:
    """Raises ConfigError for layers that a model of so many does not have."""
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


@dataclass(frozen=True)
class _Model:
    """An open model, and what of its placement does not depend on budgets."""

    file: GGUFFile
    spec: ModelSpec
    options: PlanOptions
    uses: Array | None
    num_cores: int

    @property
    def uses_as_data(self) -> tuple[tuple[float, ...], ...] | None:
        return None if self.uses is None else tuple(map(tuple, self.uses.tolist()))

    def sizes(self, config: EngineConfig) -> ModelSizes:
        """With experts as they lie in a GPU's slots."""
        return _sizes(config, self.file, self.spec)

    def ram_needs(self, config: EngineConfig) -> RamNeeds:
        """With the context and the threads of `config`."""
        assert isinstance(config.threads, int)
        assert config.ctx_size
        return CpuRunner.needs(
            self.file,
            self.spec,
            config.threads,
            config.tier,
            config.ctx_size,
            config.cache_type_k,
            cache_bytes_per_token(config, self.spec),
        )

    def with_context(self, config: EngineConfig, budget: int) -> EngineConfig:
        """`config` with threads and a context. One that was asked for is not cut: the plan says what all
        needs together.
        """
        if config.ctx_size:
            return resolve(config, self.spec, self.num_cores, ALL_BYTES)
        if config.device == "cuda":
            least = least_bytes(self.spec, self.sizes(config))
        else:
            shortest = resolve(replace(config, ctx_size=1), self.spec, self.num_cores, ALL_BYTES)
            least = self.ram_needs(shortest).least_bytes(self.options)
        return resolve(config, self.spec, self.num_cores, max(0, budget - least))

    def place(self, config: EngineConfig, budgets: Sequence[int]) -> list[tuple[PlacementPlan, ModelSizes]]:
        """For each budget what lies where, and the sizes that this follows from."""
        assert config.ctx_size
        if config.device != "cuda":
            needs = self.ram_needs(config)
            plans = [needs.place(budget, self.uses, self.options) for budget in budgets]
            return [(plan, needs.parts_for(plan)[0]) for plan in plans]
        sizes = self.sizes(config)
        memory = (config.ctx_size, config.cache_type_k)
        parts = fixed_parts_on_gpu(self.file, self.spec, sizes, *memory, budgets)
        return [
            (plan_placement(sizes, part, budget, uses=self.uses, options=self.options), sizes)
            for part, budget in zip(parts, budgets, strict=True)
        ]

    def try_budget(self, config: EngineConfig, budget: int) -> None:
        """Raises as `place` if `budget` is not enough."""
        self.place(self.with_context(config, budget), [budget])


def with_workers(planned: Planned, asked: EngineConfig, measured: Callable[[], Hardware] | None) -> Planned:
    """With threads, and on a GPU that does not hold all experts with what comes over the bus."""
    config, plan = planned.config, planned.plan
    assert isinstance(config.threads, int)
    if plan.tier == "ram":
        return replace(
            planned, run=replace(planned.run, threads=config.threads), config=with_prefetch(config, 0)
        )
    if plan.is_all_resident:
        return replace(planned, config=with_prefetch(config, 0))
    if measured is not None:
        planned = replace(planned, hardware=measured())
    # One core launches, and waits for the GPU.
    num_cores = planned.hardware.num_physical_cores
    threads = max(1, num_cores - 1) if asked.threads == "auto" else config.threads
    known = planned.known if config.prefetch == "auto" else None
    if known is not None:
        gain = prefetch_gain(known.model, known.rates, hit_rates_of(plan, known))
        config = with_prefetch(config, PREFETCHED if gain > 0 else 0)
    assert isinstance(config.prefetch, int)
    streamed = streamed_by_misses(
        plan.model.num_experts_per_tok, max(plan.expert_bytes), Rates.of(planned.hardware)
    )
    run = replace(planned.run, threads=threads, streamed=streamed, prefetch=config.prefetch)
    return replace(planned, run=run, config=config)


def with_prefetch(config: EngineConfig, count: int) -> EngineConfig:
    """`config` with so many prefetched experts in place of `auto`."""
    return replace(config, prefetch=count) if config.prefetch == "auto" else config


def expected_uses(trace: RoutingTrace | None) -> Array | None:
    """Uses a step of each expert, float64 [layers, experts]; None if there is no trace."""
    return trace.counts() / trace.num_steps if trace else None


def _given_plan(
    config: EngineConfig, model: _Model, hardware: Hardware, trace: RoutingTrace | None, more_bytes: int
) -> Planned:
    """The plan that `config` names. Threads and prefetching that `config` asks for go before the plan's."""
    assert config.plan is not None
    name, spec = config.plan, model.spec
    again = "make another with `coldstream plan`"
    run = load_plan(Path(name), _all_sizes(config, model.file, spec))
    plan = run.placement
    tier: Tier = "vram" if config.device == "cuda" else "ram"
    if plan.tier != tier:
        raise ConfigError(
            f"{name} is a plan for {'a GPU' if plan.tier == 'vram' else 'the CPU'}, the device is "
            f"{config.device}: {again}, or choose the other --device"
        )
    if plan.fixed.kv_type not in CACHE_LAYOUTS or not 0 < plan.fixed.ctx_size <= spec.context_length:
        raise ConfigError(
            f"{name} is for {plan.fixed.ctx_size} tokens of {plan.fixed.kv_type}, which this model "
            f"cannot have: {again}"
        )
    said: dict[str, Any] = {
        "plan": None,
        tier: plan.budget_bytes,
        "ctx_size": plan.fixed.ctx_size,
        "cache_type_k": plan.fixed.kv_type,
        "cache_type_v": plan.fixed.kv_type,
        "threads": run.threads or "auto" if config.threads == "auto" else config.threads,
        "prefetch": run.prefetch if config.prefetch == "auto" else config.prefetch,
    }
    config = resolve(replace(config, **said), spec, hardware.num_physical_cores, ALL_BYTES)
    assert isinstance(config.threads, int)
    assert isinstance(config.prefetch, int)
    run = replace(run, threads=config.threads if run.threads else 0, prefetch=config.prefetch)
    if tier == "vram":
        sizes = model.sizes(config)
    else:
        sizes, fixed = model.ram_needs(config).parts_for(plan)
        try:  # other threads or another version may take more than when the plan was made
            run = replace(run, placement=replace(plan, fixed=fixed))
        except ValueError as error:
            raise ConfigError(
                f"{name} does not fit its budget with {config.threads} threads: {error}; {again}"
            ) from None
    if plan.expert_bytes != sizes.expert_bytes:
        raise ConfigError(f"{name} has experts of other sizes than they have on this device: {again}")
    larger = None
    if more_bytes and not run.placement.is_all_resident:
        larger = replace(model, uses=run.expected_uses).place(config, [plan.budget_bytes + more_bytes])[0][0]
    return Planned(run, larger, sizes, config, hardware, trace)


def _sizes(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> ModelSizes:
    return model_sizes(spec, file.tensors, file.fingerprint, cache_bytes_per_token(config, spec))


def _all_sizes(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> tuple[ModelSizes, ...]:
    """As experts lie in a GPU's slots, mapped, and in slots in RAM."""
    return (_sizes(config, file, spec), *sizes_in_ram(file, spec, cache_bytes_per_token(config, spec)))


def plan_by_name(
    config: EngineConfig,
    options: PlanOptions | None = None,
    profile: Path | None = None,
    progress: OpenProgress | None = None,
    *,
    measure: bool = False,
) -> Planned:
    """`plan_model` of the model that `config` names, on this machine, which is measured if it never was.

    Of the model only the header and small tensors are read. With a budget of GPU memory the plan is for a
    GPU, even if there is none. profile: the path of a trace; None: the bundled one, for the demo model.
    measure: whether the machine is measured again. Raises as `open_model` and `RoutingTrace.load` besides.
    """
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors).with_window(config.attention_window)
        trace = bundled_profile(file, spec)
        if profile is not None:
            trace = RoutingTrace.load(profile, routed_model(file, spec))
        config, gpu, warnings = device_to_plan_for(config)
        hardware = measured_hardware(gpu, progress, again=measure)
        planned = plan_model(
            config, file, spec, hardware, trace=trace, options=options, more_bytes=NEXT_BYTES
        )
    planned = replace(planned, warnings=warnings)
    if planned.plan.tier == "ram" and not planned.plan.is_all_resident:
        matrix_bytes = max(planned.sizes.expert_bytes) // 3
        planned = replace(planned, disk_bytes_per_s=measure_disk(path, matrix_bytes))
    return planned


def load_plan_by_name(config: EngineConfig, path: Path, progress: OpenProgress | None = None) -> RunPlan:
    """The plan in the file at `path`, of the model that `config` names. Raises as `load_plan`."""
    model = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(model) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        return load_plan(path, _all_sizes(config, file, spec))


def bundled_profile(file: GGUFFile, spec: ModelSpec) -> RoutingTrace | None:
    """The trace that comes with the package if it is of this model: of the demo model, that is."""
    if not spec.is_moe:
        return None
    try:
        return RoutingTrace.load(demo_profile_path(), routed_model(file, spec))
    except (ModelFormatError, ModelNotFoundError):
        return None
