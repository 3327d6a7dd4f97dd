"""From a configuration to a placement: sizes of the model, budget of the machine, and the plan for both."""

from dataclasses import dataclass, replace
from pathlib import Path

from coldstream.engine.config import EngineConfig, cache_bytes_per_token, resolve
from coldstream.engine.machine import measured_hardware
from coldstream.engine.opened_model import OpenProgress, choose_device
from coldstream.engine.routing_profile import routed_model
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import gpu_is_visible
from coldstream.models.fixed_part import fixed_part_on_cpu, fixed_part_on_gpu
from coldstream.models.footprint import model_sizes
from coldstream.models.spec import ModelSpec
from coldstream.placement.forecast import Known
from coldstream.placement.hardware import Hardware
from coldstream.placement.hit_rates import PUBLISHED, HitCurve
from coldstream.placement.plan import PlacementPlan, PlanOptions, Tier, plan_placement
from coldstream.placement.rates import Rates
from coldstream.placement.routing_trace import RoutingTrace


@dataclass(frozen=True)
class Planned:
    """A plan and everything that it follows from."""

    plan: PlacementPlan
    known: Known
    options: PlanOptions
    config: EngineConfig  # with a concrete device and context
    hardware: Hardware


def plan_model(
    config: EngineConfig,
    file: GGUFFile,
    spec: ModelSpec,
    hardware: Hardware,
    *,
    trace: RoutingTrace | None = None,
    options: PlanOptions | None = None,
) -> Planned:
    """The placement of an open model by the budgets of `config`, whose device is cpu or cuda.

    Without a budget: what is free. A trace of the model says which experts are used most, and what a cache
    hits. Raises ConfigError and OutOfMemoryError as `resolve` and `plan_placement`.
    """
    tier: Tier = "vram" if config.device == "cuda" else "ram"
    budget = budget_bytes(config, hardware)
    sizes = model_sizes(spec, file.tensors, file.fingerprint, cache_bytes_per_token(config, spec))
    # A context that was asked for is not cut to the budget: the plan says what both together need.
    room = 2**62 if config.ctx_size else max(0, budget - sizes.dense_bytes)
    config = resolve(config, spec, hardware.num_physical_cores, room)
    assert config.ctx_size
    kv_type = config.cache_type_k
    if tier == "vram":
        fixed = fixed_part_on_gpu(file, spec, sizes, config.ctx_size, kv_type, budget)
    else:
        fixed = fixed_part_on_cpu(file, spec, sizes, config.ctx_size, kv_type)
    uses = trace.counts() / trace.num_steps if trace else None
    curve = HitCurve.from_trace(trace) if trace else PUBLISHED
    options = options or PlanOptions()
    options = replace(options, has_ring=tier == "vram")  # what comes from the disk waits where it is used
    plan = plan_placement(sizes, fixed, budget, tier=tier, uses=uses, options=options)
    known = Known(sizes, Rates.of(hardware), curve, uses)
    return Planned(plan, known, options, config, hardware)


def plan_by_name(
    config: EngineConfig,
    options: PlanOptions | None = None,
    profile: Path | None = None,
    progress: OpenProgress | None = None,
) -> Planned:
    """`plan_model` of the model that `config` names, on this machine, which is measured if it never was.

    Only the model's header is read. With a budget of GPU memory the plan is for a GPU, even if there is none.
    profile: the path of a trace. Raises as `open_model` besides, and as `RoutingTrace.load`.
    """
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        trace = RoutingTrace.load(profile, routed_model(file, spec)) if profile else None
        if config.vram != "auto" and not gpu_is_visible():
            config, gpu = replace(config, device="cuda"), None
        else:
            config, gpu, _ = choose_device(config)
        hardware = measured_hardware(gpu, progress)
        return plan_model(config, file, spec, hardware, trace=trace, options=options)


def budget_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Of the fast memory: what the configuration allows, or else what is free."""
    if config.device == "cuda":
        if isinstance(config.vram, int):
            return config.vram
        assert hardware.gpu is not None, "a configuration for a GPU needs one, or a budget"
        return hardware.gpu.free_bytes
    return config.ram if isinstance(config.ram, int) else hardware.ram_available_bytes
