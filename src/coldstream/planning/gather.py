"""From a configuration to a plan: gathers facts about a file, a machine and a drafter for `choose.py`.

All that reads files, counts and measures is here; what is chosen, and advised, are pure functions of the
facts. Unit of work: one open model.

Memory is counted by runs of the runners that compute later, without reading weights. A GPU's runner is
counted over tensors without memory, which takes some tenths of a second for a large model.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from coldstream.assets import demo_profile_path
from coldstream.errors import ConfigError, ModelFormatError, ModelNotFoundError, host_memory_errors
from coldstream.experts.cpu.pooled_stacks import PooledStacks
from coldstream.experts.prefetch import LAYERS_AHEAD, MAX_PREFETCHED, Prefetching
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.cpu_ops import UnreadCpuOps
from coldstream.kernels.cuda.device import missing_packages
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.kernels.ops import ExpertWeights
from coldstream.kvcache.cache import CacheSize
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.cuda.capacity import mailbox_ranks, ngram_bytes
from coldstream.models.expert_stacks import disk_tier, expert_stacks, placed_stacks
from coldstream.models.footprint import drafted_share, file_bytes, model_sizes, nextn_bytes, routed_model
from coldstream.models.mtp.model import MAX_DRAFT_IDS
from coldstream.models.read_spec import read_spec
from coldstream.models.runner_capacity import RunnerCapacity
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.disk_rate import measure_disk
from coldstream.placement.forecast import NEXT_BYTES
from coldstream.placement.hardware import Hardware
from coldstream.placement.limits import Limits
from coldstream.placement.lock_file import LockRefusal, last_refusal, lock_path
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions
from coldstream.placement.plan_file import load_plan
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.advice import advised
from coldstream.planning.choose import TooSmall, choose, concrete_config, place, with_ram
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import OpenProgress, device_to_plan_for
from coldstream.planning.draft_file import NOTHING_IS_DRAFTED, open_draft, open_target
from coldstream.planning.draft_reason import draft_reason
from coldstream.planning.facts import DraftNeeds, Facts, ModelFacts, with_kv_type
from coldstream.planning.machine import hardware_of, measured_hardware, why_not_kept, why_unusable
from coldstream.planning.memory import SHORT_CHUNK
from coldstream.planning.planned import Planned
from coldstream.planning.unknowns import (
    GpuShape,
    MachineRates,
    Missing,
    RamParts,
    RamShape,
    Unknown,
    WorkspaceShape,
)

_MIB: Final = 2**20
Counted = TypeVar("Counted")


def count_on_gpu(
    file: GGUFFile, spec: ModelSpec, sizes: ModelSizes, shape: GpuShape, *, is_kept: bool = False
) -> FixedPart:
    """What a runner on a GPU takes beside experts, with the embedding in RAM.

    is_kept: whether what was counted in an earlier start is taken from there, and kept for a later one.
    Otherwise the small tensors of the file are read. Raises as `CausalLM.load` and `MtpModel.load`.
    """
    # Imported here because its kernels need packages that a machine without a GPU may not have.
    from coldstream.models.cuda.kept_counts import kept_count
    from coldstream.models.cuda.limits import Limits
    from coldstream.models.cuda.memory_plan import count_memory

    capacity, draft = shape.capacity, shape.capacity.draft
    limits = Limits(
        capacity.cache_size,
        capacity.ctx_size,
        capacity.kv_type,
        has_mtp=draft.has_mtp,
        aux_layers=draft.aux_layers,
        has_host_tables=True,
    )
    ring_bytes = 0
    if spec.is_moe:
        # With the memory of prefetching other than places; the placement itself counts experts and the ring.
        most = Prefetching(LAYERS_AHEAD, MAX_PREFETCHED)
        ring_bytes = most.num_layers * most.experts * max(sizes.expert_bytes)
        limits = replace(
            limits, expert_bytes=0, ring_bytes=ring_bytes, prefetching=most, shared_rows=MAX_SHARED_ROWS
        )
    elif sizes.is_dense:
        ring_bytes = max(sizes.expert_bytes)
        limits = replace(limits, expert_bytes=0, ring_bytes=ring_bytes, is_dense=True)
    count = kept_count if is_kept else count_memory
    windowed = spec.with_window(shape.attention_window)
    plan = count(file, windowed, limits, shape.chunk_size)
    return FixedPart(
        ctx_size=capacity.ctx_size,
        kv_type=capacity.kv_type,
        chunk_size=plan.chunk_size,
        weights=plan.weights - ring_bytes,
        caches=plan.caches,
        workspace=plan.workspace,
        drafter=draft.drafter_bytes,
        graphs=plan.graphs,
        reserve=plan.reserve,
        num_sequences=capacity.cache_size.num_states,
        num_tree_rows=capacity.cache_size.num_tree_rows,
        num_window_blocks=capacity.cache_size.num_window_blocks,
        window_caches=capacity.cache_size.window_bytes(windowed, capacity.kv_type),
        host_tables=plan.tables,
        host_ngrams=ngram_bytes(spec, plan.chunk_size),
    )


def count_in_ram(
    file: GGUFFile, spec: ModelSpec, shape: RamShape, cache_size: CacheSize | None = None
) -> RamParts:
    """What a runner on the CPU takes beside experts. Raises as `CpuRunner.count_memory`.

    cache_size: None for one that suits the memory.
    """

    windowed = spec.with_window(shape.attention_window)

    def part(*, in_slots: bool) -> FixedPart:
        size = cache_size or CacheSize.shared(
            windowed,
            shape.ctx_size,
            shape.kv_type,
            is_scarce=in_slots,
            num_rows=CpuRunner.chunk_size,
            num_tree_rows=shape.draft.num_tree_rows,
            num_contexts=shape.num_contexts,
        )
        capacity = RunnerCapacity(shape.ctx_size, shape.kv_type, size, shape.draft)
        tier = disk_tier(file, spec) if in_slots else None
        fixed = CpuRunner.count_memory(file, windowed, shape.threads, shape.tier, capacity, tier)
        return replace(fixed, num_contexts=shape.num_contexts)

    return part(in_slots=False), part(in_slots=True) if spec.is_moe else None


def count_workspace(file: GGUFFile, spec: ModelSpec, shape: WorkspaceShape) -> int:
    """What the threads take to compute a layer's experts, counted without reading any."""
    ops = UnreadCpuOps(shape.threads)
    rows = shape.num_rows
    x = np.zeros((rows, spec.hidden_size), np.float32)
    ids = np.zeros((rows, mailbox_ranks(spec)), np.int32)

    def count(stacks: Sequence[TensorInfo]) -> int:
        first, *others, down = (ops.map_weight(file, info) for info in stacks)
        half = first.num_rows // 2
        gate, up = (first, *others) if others else (first.rows(0, half), first.rows(half, 2 * half))
        captured = ops.capture(rows, lambda: ops.routed_experts(x, ids, ExpertWeights(gate, up, down)))
        return captured.graph.scratch_bytes

    # One layer of each kind.
    kinds = {tuple((info.quant_type, info.shape) for info in of): of for of in placed_stacks(file, spec)}
    return max(map(count, kinds.values()))


@dataclass(frozen=True)
class Sources:
    """Where facts come from.

    measured: returns `hardware` with its rates, or without those that a plan shall assume. None: it has what
    there is. keeps_counts: whether counts of a GPU's memory are kept, and taken from earlier starts. refusal:
    what the machine refused to page-lock last.
    """

    file: GGUFFile
    spec: ModelSpec
    hardware: Hardware
    trace: RoutingTrace | None = None
    drafter: DraftNeeds | None = None
    measured: Callable[[], Hardware] | None = None
    keeps_counts: bool = False
    refusal: LockRefusal | None = None


class Gathered:
    """The facts so far, of a model on the device of a configuration."""

    def __init__(self, sources: Sources, config: EngineConfig) -> None:
        self._sources = sources
        model = model_facts(sources.file, sources.spec)
        self.facts = Facts(
            model=model,
            hardware=sources.hardware,
            has_rates=sources.measured is None,
            is_estimated=config.device == "cuda" and bool(missing_packages()),
            trace=sources.trace,
            drafter=sources.drafter,
            refusal=sources.refusal,
            given=None if config.plan is None else load_plan(Path(config.plan), model.all_sizes),
        )

    def find_out(self, what: Unknown) -> None:
        """Adds what a choice has to know. Raises as counting and measuring do."""
        facts, file, spec = self.facts, self._sources.file, self._sources.spec
        if isinstance(what, MachineRates):
            assert self._sources.measured is not None, "rates are missing only where they can be measured"
            self.facts = replace(facts, hardware=self._sources.measured(), has_rates=True)
            return
        counts = facts.counts
        if isinstance(what, GpuShape):
            sizes, is_kept = facts.model.on_gpu, self._sources.keeps_counts
            counted = _or_error(partial(count_on_gpu, file, spec, sizes, what, is_kept=is_kept))
            counts = replace(counts, on_gpu=MappingProxyType({**counts.on_gpu, what: counted}))
        elif isinstance(what, RamShape):
            in_ram = _or_error(partial(count_in_ram, file, spec, what))
            counts = replace(counts, in_ram=MappingProxyType({**counts.in_ram, what: in_ram}))
        else:
            workspace = count_workspace(file, spec, what)
            counts = replace(counts, workspaces=MappingProxyType({**counts.workspaces, what: workspace}))
        self.facts = replace(facts, counts=counts)


def _or_error(count: Callable[[], Counted]) -> Counted | ModelFormatError:
    try:
        return count()
    except ModelFormatError as error:  # of a block for drafts, perhaps, without which the model can run
        return error.with_traceback(None)  # its frames would keep what was counted


def model_facts(file: GGUFFile, spec: ModelSpec) -> ModelFacts:
    """What the header of an open file says to a plan."""
    on_gpu = model_sizes(spec, file.tensors, file.fingerprint, 0, places_layers=True)
    mapped = model_sizes(spec, file.tensors, file.fingerprint, 0, file_bytes)
    in_slots = mapped
    if spec.is_moe:
        in_slots = replace(mapped, expert_bytes=PooledStacks(file, expert_stacks(file, spec)).expert_bytes)
    return ModelFacts(
        spec,
        on_gpu,
        mapped,
        in_slots,
        nextn_bytes(spec, file.tensors),
        drafted_share(spec, file.tensors, MAX_DRAFT_IDS) if spec.num_nextn_layers else None,
        tuple(frozenset(info.shard for info in layer) for layer in placed_stacks(file, spec)),
        tuple(file.shard_bytes),
    )


def plan_model(
    config: EngineConfig,
    sources: Sources,
    options: PlanOptions | None = None,
    *,
    more_bytes: int = 0,
    prompt_cache_bytes: int = 0,
) -> Planned:
    """Plans an open model on the device of `config`, which is cpu or cuda.

    more_bytes: further memory, for `larger_plan` and `more_ram`. prompt_cache_bytes: of RAM, within its
    budget, for kept prefixes of prompts. Raises as `choose`, and as `load_plan` for a plan that `config`
    names; OutOfMemoryError with a sufficient budget as advice; and ConfigError for kept prefixes beside a
    plan.
    """
    options = options or PlanOptions()
    if config.plan is not None and prompt_cache_bytes:
        raise ConfigError("prompt_cache (--prompt-cache SIZE) is part of the plan: leave it out, or --plan")
    gathered = Gathered(sources, config)
    while isinstance(run := choose(config, gathered.facts, options, prompt_cache_bytes), Missing):
        gathered.find_out(run.what)
    if isinstance(run, TooSmall):
        while isinstance(error := advised(run, config, gathered.facts, options, prompt_cache_bytes), Missing):
            gathered.find_out(error.what)
        raise error
    planned = _planned(run, config, gathered.facts)
    return _with_more(planned, gathered, options, more_bytes) if more_bytes else planned


def _planned(run: RunPlan, config: EngineConfig, facts: Facts) -> Planned:
    spec, placement = facts.model.spec, run.placement
    sizes = with_kv_type(facts.model.sizes_for(placement), spec, placement.fixed.kv_type)
    concrete = concrete_config(config, run, facts.hardware.num_physical_cores)
    locked = 0
    if placement.tier == "vram" and not placement.is_all_resident:
        locked = run.pool.slot_bytes if run.pool else facts.model.mapped_bytes(placement)
    return Planned(
        run,
        None,
        sizes,
        concrete,
        facts.hardware,
        facts.trace,
        warnings=_draft_warnings(facts),
        draft_reason=draft_reason(config, run, facts),
        locked_bytes=locked,
        refusal=facts.refusal,
    )


def _draft_warnings(facts: Facts) -> tuple[str, ...]:
    """Why the model's own block does not draft, if it cannot."""
    counts = [*facts.counts.on_gpu.values(), *facts.counts.in_ram.values()]
    problems = [count for count in counts if isinstance(count, ModelFormatError)]
    return tuple(NOTHING_IS_DRAFTED.format(error) for error in problems)


def _with_more(planned: Planned, gathered: Gathered, options: PlanOptions, more_bytes: int) -> Planned:
    """Adds what further memory would hold: of the kind that experts are in, and of RAM beside a pool."""
    run, placement = planned.run, planned.plan
    if not placement.is_all_resident:
        wider = planned.config.with_budget(placement.tier, placement.budget_bytes + more_bytes)
        kept = run.prompt_cache_bytes
        while isinstance(larger := place(wider, gathered.facts, options, kept), Missing):
            gathered.find_out(larger.what)
        # With layers that are pinned, a longer context in more memory may leave too little for them.
        if isinstance(larger, PlacementPlan):
            planned = replace(planned, larger_plan=larger)
            longer = _longer_steps(planned, gathered, options, more_bytes)
            planned = replace(planned, longer_steps=longer)
    if run.pool is not None:
        ram = run.pool.budget_bytes + more_bytes
        while isinstance(more_ram := with_ram(run, gathered.facts, ram), Missing):
            gathered.find_out(more_ram.what)
        if isinstance(more_ram, RunPlan):  # not if the plan is given, and of a version that took less
            planned = replace(planned, more_ram=more_ram)
    return planned


def _longer_steps(
    planned: Planned, gathered: Gathered, options: PlanOptions, more_bytes: int
) -> PlacementPlan | None:
    """The plan in the fewest whole MiB with steps of SHORT_CHUNK tokens, if those of `planned` are shorter.

    None if more than `more_bytes` would be needed, or if no text is so long.
    """
    placement = planned.plan
    steps = min(SHORT_CHUNK, placement.fixed.ctx_size)
    if placement.tier != "vram" or placement.fixed.chunk_size >= steps:
        return None

    def plan_in(mib: int) -> PlacementPlan | None:
        wider = planned.config.with_budget("vram", mib * _MIB)
        while isinstance(found := place(wider, gathered.facts, options), Missing):
            gathered.find_out(found.what)
        return found if isinstance(found, PlacementPlan) else None

    def has_long(plan: PlacementPlan | None) -> bool:
        return plan is not None and plan.fixed.chunk_size >= steps

    def has_long_or_all(plan: PlacementPlan | None) -> bool:
        return has_long(plan) or (plan is not None and plan.is_all_resident)

    # Longer steps need more memory. But where all experts begin to fit, they do so beside shorter steps.
    budgets = range(placement.budget_bytes // _MIB + 1, (placement.budget_bytes + more_bytes) // _MIB + 1)
    for suffices in (has_long_or_all, has_long):
        budgets = budgets[bisect_left(budgets, True, key=lambda mib: suffices(plan_in(mib))) :]
        if budgets and has_long(found := plan_in(budgets[0])):
            return found
    return None


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
    target = open_target(path, config, progress)
    with target.file as file:
        config, spec = target.config, target.spec
        trace = bundled_profile(file, spec)
        if profile is not None:
            trace = RoutingTrace.load(profile, routed_model(file, spec))
        config, gpu, warnings = device_to_plan_for(config)
        warnings += why_unusable(hardware_of(gpu))
        hardware = measured_hardware(gpu, progress, again=measure)
        warnings += why_not_kept(hardware)
        refusal = last_refusal(hardware, lock_path())
        with open_draft(replace(target, config=config), progress) as draft:
            planned = plan_model(
                draft.config,
                Sources(file, spec, hardware, trace, draft.needs, refusal=refusal),
                options,
                more_bytes=NEXT_BYTES,
                prompt_cache_bytes=prompt_cache_bytes,
            )
            warnings += draft.warnings + file.metadata.warnings + spec.warnings
    warnings += planned.warnings + planned.lock_warnings(Limits.read())
    planned = replace(planned, warnings=warnings)
    if planned.reads_disk:
        matrix_bytes = max(planned.sizes.expert_bytes) // 3
        planned = replace(planned, disk_bytes_per_s=measure_disk(path, matrix_bytes))
    return planned


def load_plan_by_name(config: EngineConfig, path: Path, progress: OpenProgress | None = None) -> RunPlan:
    """The plan in the file at `path`, of the model that `config` names. Raises as `load_plan`."""
    model = resolve_model(config.model, offline=config.offline, progress=progress)
    with GGUFFile.open(model) as file:
        spec = read_spec(file.metadata, file.tensors)
        return load_plan(path, model_facts(file, spec).all_sizes)


def bundled_profile(file: GGUFFile, spec: ModelSpec) -> RoutingTrace | None:
    """The trace in the package if it is of this model, which then is the demo model."""
    if not spec.is_moe:
        return None
    try:
        return RoutingTrace.load(demo_profile_path(), routed_model(file, spec))
    except (ModelFormatError, ModelNotFoundError):
        return None
