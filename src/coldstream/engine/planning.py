"""From a configuration to a placement: sizes of the model, budget of the machine, and the plan for both."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from coldstream.assets import demo_profile_path
from coldstream.engine.config import EngineConfig, cache_bytes_per_token, resolve
from coldstream.engine.device_choice import OpenProgress, device_to_plan_for
from coldstream.engine.machine import measured_hardware
from coldstream.engine.routing_profile import routed_model
from coldstream.errors import ConfigError, ModelFormatError, ModelNotFoundError
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.models.fixed_part import fixed_part_on_cpu, fixed_parts_on_gpu, least_bytes
from coldstream.models.footprint import model_sizes
from coldstream.models.spec import ModelSpec
from coldstream.placement.disk_rate import measure_disk
from coldstream.placement.forecast import NEXT_BYTES, Known
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import PUBLISHED, HitCurve
from coldstream.placement.plan import PlacementPlan, PlanOptions, Tier, plan_placement
from coldstream.placement.plan_file import load_plan
from coldstream.placement.rates import Rates
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.sizes import ModelSizes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Planned:
    """A plan, what more memory would make of it, and everything that both follow from."""

    plan: PlacementPlan
    larger_plan: PlacementPlan | None  # None: all is resident already, or nobody asked
    sizes: ModelSizes
    config: EngineConfig  # with a concrete device and context
    hardware: Hardware
    trace: RoutingTrace | None
    disk_bytes_per_s: float | None = None
    warnings: tuple[str, ...] = ()  # about the device, for people

    @cached_property
    def known(self) -> Known:
        """For forecasts. With a trace it is replayed, which takes seconds for a large model."""
        curve = HitCurve.from_trace(self.trace) if self.trace else PUBLISHED
        return Known(
            self.sizes,
            Rates.of(self.hardware, self.disk_bytes_per_s),
            curve,
            expected_uses(self.trace),
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
) -> Planned:
    """The placement of an open model, on the device of `config`, which is cpu or cuda.

    By the plan that `config` names, or by its budgets; without one, by what is free. A trace of the model
    says which experts are used most. more_bytes: of fast memory, for a larger plan besides. Raises
    ConfigError and OutOfMemoryError as `resolve` and `plan_placement`, as `load_plan`, and ConfigError for a
    plan for the other device and for more pinned layers than there are.
    """
    tier: Tier = "vram" if config.device == "cuda" else "ram"
    options = options or PlanOptions()
    if options.num_pinned_layers > spec.num_layers:
        raise ConfigError(
            f"--pin-layers {options.num_pinned_layers}: the model has {spec.num_layers} layers, so it can be "
            f"0 to {spec.num_layers}"
        )
    options = replace(options, has_ring=tier == "vram")  # what comes from the disk waits where it is used
    plan = None
    if config.plan is not None:
        config, plan = _given_plan(config, file, spec, tier)
        config = resolve(config, spec, hardware.num_physical_cores, 2**62)
    else:
        config = _with_context(config, file, spec, hardware)
    sizes = _sizes(config, file, spec)
    budget = plan.budget_bytes if plan else budget_bytes(config, hardware)
    budgets = [budget, budget + more_bytes] if more_bytes else [budget]
    assert config.ctx_size
    memory = (config.ctx_size, config.cache_type_k)
    if tier == "vram":
        parts = fixed_parts_on_gpu(file, spec, sizes, *memory, budgets)
    else:
        parts = [fixed_part_on_cpu(file, spec, sizes, *memory)] * len(budgets)
    place = partial(plan_placement, sizes, tier=tier, uses=expected_uses(trace), options=options)
    plan = plan or place(parts[0], budget)
    larger = place(parts[-1], budgets[-1]) if more_bytes and not plan.is_all_resident else None
    return Planned(plan, larger, sizes, config, hardware, trace)


def expected_uses(trace: RoutingTrace | None) -> Array | None:
    """Uses a step of each expert, float64 [layers, experts]; None if there is no trace."""
    return trace.counts() / trace.num_steps if trace else None


def _with_context(config: EngineConfig, file: GGUFFile, spec: ModelSpec, hardware: Hardware) -> EngineConfig:
    """`config` with a context. One that was asked for is not cut: the plan says what all needs together."""
    tier: Tier = "vram" if config.device == "cuda" else "ram"
    room = budget_bytes(config, hardware) - least_bytes(spec, _sizes(config, file, spec), tier)
    room = 2**62 if config.ctx_size else max(0, room)
    return resolve(config, spec, hardware.num_physical_cores, room)


def _given_plan(
    config: EngineConfig, file: GGUFFile, spec: ModelSpec, tier: Tier
) -> tuple[EngineConfig, PlacementPlan]:
    """The plan that `config` names, and `config` with what the plan says in its place."""
    assert config.plan is not None
    plan = load_plan(Path(config.plan), _sizes(config, file, spec))
    if plan.tier != tier:
        raise ConfigError(
            f"{config.plan} is a plan for {'a GPU' if plan.tier == 'vram' else 'the CPU'}, the device is "
            f"{config.device}: make another with `coldstream plan`, or choose the other --device"
        )
    if plan.fixed.kv_type not in CACHE_LAYOUTS or not 0 < plan.fixed.ctx_size <= spec.context_length:
        raise ConfigError(
            f"{config.plan} is for {plan.fixed.ctx_size} tokens of {plan.fixed.kv_type}, which this model "
            "cannot have: make another with `coldstream plan`"
        )
    said: dict[str, Any] = {
        "plan": None,
        tier: plan.budget_bytes,
        "ctx_size": plan.fixed.ctx_size,
        "cache_type_k": plan.fixed.kv_type,
        "cache_type_v": plan.fixed.kv_type,
    }
    return replace(config, **said), plan


def _sizes(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> ModelSizes:
    return model_sizes(spec, file.tensors, file.fingerprint, cache_bytes_per_token(config, spec))


def plan_by_name(
    config: EngineConfig,
    options: PlanOptions | None = None,
    profile: Path | None = None,
    progress: OpenProgress | None = None,
) -> Planned:
    """`plan_model` of the model that `config` names, on this machine, which is measured if it never was.

    Only the model's header is read. With a budget of GPU memory the plan is for a GPU, even if there is none.
    profile: the path of a trace; None: the bundled one, for the demo model. Raises as `open_model` besides,
    and as `RoutingTrace.load`.
    """
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        trace = bundled_profile(file, spec)
        if profile is not None:
            trace = RoutingTrace.load(profile, routed_model(file, spec))
        config, gpu, warnings = device_to_plan_for(config)
        hardware = measured_hardware(gpu, progress)
        planned = plan_model(
            config, file, spec, hardware, trace=trace, options=options, more_bytes=NEXT_BYTES
        )
    planned = replace(planned, warnings=warnings)
    if planned.plan.tier == "ram" and not planned.plan.is_all_resident:
        matrix_bytes = max(planned.sizes.expert_bytes) // 3
        planned = replace(planned, disk_bytes_per_s=measure_disk(path, matrix_bytes))
    return planned


def load_plan_by_name(
    config: EngineConfig, path: Path, progress: OpenProgress | None = None
) -> PlacementPlan:
    """The plan in the file at `path`, of the model that `config` names. Raises as `load_plan`."""
    model = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(model) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        return load_plan(path, _sizes(config, file, spec))


def budget_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Of the fast memory: what the configuration allows, or else what is free."""
    if config.device == "cuda":
        if isinstance(config.vram, int):
            return config.vram
        assert hardware.gpu is not None, "a configuration for a GPU needs one, or a budget"
        return hardware.gpu.free_bytes
    return config.ram if isinstance(config.ram, int) else hardware.ram_available_bytes


def bundled_profile(file: GGUFFile, spec: ModelSpec) -> RoutingTrace | None:
    """The trace that comes with the package if it is of this model: of the demo model, that is."""
    if not spec.is_moe:
        return None
    try:
        return RoutingTrace.load(demo_profile_path(), routed_model(file, spec))
    except (ModelFormatError, ModelNotFoundError):
        return None
