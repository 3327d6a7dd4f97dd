"""Runners without an engine, for benchmarks and tests: a model at a path, and plans with chosen sizes.

The product's plans are those of `coldstream.planning.gather`. These place what a caller says, without a
profile and whether or not it is the best for the machine.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from coldstream.experts.prefetch import Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.kvcache import CacheSize
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.expert_stacks import disk_tier
from coldstream.models.footprint import model_sizes, nextn_bytes, routed_model
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import Progress
from coldstream.models.runner_capacity import NO_DRAFTS, DraftMemory
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.cost import COPY_BYTES_PER_STEP
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions, plan_placement
from coldstream.placement.policies import Policy
from coldstream.placement.pool_plan import HostPart, PoolPlan
from coldstream.placement.prompt_cost import MAX_CPU_ROWS
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.choose import ALL_BYTES
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Gathered, Sources, count_in_ram, count_on_gpu, model_facts
from coldstream.planning.memory import GpuMemory, RamNeeds
from coldstream.planning.unknowns import GpuShape, NotKnownError, RamShape
from coldstream.planning.workers import with_workers


def open_model_file(path: Path) -> tuple[GGUFFile, ModelSpec]:
    file = GGUFFile.open(path)
    return file, read_spec(file.metadata, file.tensors)


def open_cpu_runner(
    path: Path,
    *,
    threads: int,
    tier: str = "auto",
    context_length: int = 4096,
    kv_type: str = "i16",
    ram_bytes: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    cache_size: CacheSize | None = None,
    attention_window: int | None = None,
    aux_layers: tuple[int, ...] = (),
) -> CpuRunner:
    """The model at `path`, within `ram_bytes` if given. Raises as `CpuRunner.load`, and
    BudgetTooSmallError.
    """
    file, spec = open_model_file(path)
    try:
        drafts = DraftMemory(aux_layers=aux_layers)
        shape = RamShape(threads, tier, context_length, kv_type, 1, drafts, attention_window)
        needs = ram_needs(file, spec, shape, cache_size)
        placement = needs.place(ALL_BYTES if ram_bytes is None else ram_bytes, None, PlanOptions())
        return CpuRunner.load(
            file,
            spec,
            RunPlan(placement, threads, attention_window=attention_window),
            tier=tier,
            policy=policy,
            progress=progress,
            cache_size=cache_size,
            aux_layers=aux_layers,
        )
    except BaseException:
        file.close()
        raise


def ram_needs(
    file: GGUFFile, spec: ModelSpec, shape: RamShape, cache_size: CacheSize | None = None
) -> RamNeeds:
    """What a runner on the CPU needs. cache_size: None for one that suits the memory."""
    model = model_facts(file, spec)
    mapped, in_slots = count_in_ram(file, spec, shape, cache_size)
    return RamNeeds(model.mapped, mapped, model.in_slots, in_slots)


def fixed_part_on_gpu(file: GGUFFile, memory: GpuMemory, budget: int) -> FixedPart:
    """The part of a budget that does not depend on the placement of experts, counted as far as needed."""
    counts = dict(memory.counts) if memory.counts is not None else None
    while True:
        try:
            return replace(memory, counts=counts).fixed_part(budget)
        except NotKnownError as error:
            shape = error.what
        assert isinstance(shape, GpuShape)
        assert counts is not None, "what is estimated needs no counts"
        counts[shape] = count_on_gpu(file, memory.spec, memory.sizes, shape)


def plan_with_workers(run: RunPlan, config: EngineConfig, sources: Sources) -> RunPlan:
    """`run`, a plan for a GPU, with what the product does about missing experts in any amount of RAM."""

    gathered = Gathered(sources, config)
    while True:
        try:
            return with_workers(run, config, gathered.facts, ALL_BYTES)
        except NotKnownError as error:
            gathered.find_out(error.what)


def resident_plan(
    file: GGUFFile,
    spec: ModelSpec,
    context_length: int,
    kv_type: str = "i16",
    draft: DraftMemory = NO_DRAFTS,
) -> RunPlan:
    """All experts on the GPU, for one sequence, in prefill steps as the product chooses for what is free.

    It may need more than is free: a runner refuses it then.
    """
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    memory = GpuMemory(spec, sizes, nextn_bytes(spec, file.tensors), {}, context_length, kv_type, 1, draft)
    fixed = fixed_part_on_gpu(file, memory, find_gpu().free_bytes)
    placement = plan_placement(sizes, replace(fixed, num_sequences=1), ALL_BYTES)
    return RunPlan(placement, threads=0, spec_type="mtp" if draft.has_mtp else "none")


def partial_plan(
    file: GGUFFile,
    spec: ModelSpec,
    num_resident: int,
    *,
    context_length: int,
    chunk_size: int,
    ring_bytes: int,
    threads: int,
    streamed: float = 0.0,
    pinned: tuple[int, ...] = (),
    layer_weights: tuple[float, ...] = (),
    prefetching: Prefetching | None = None,
    num_in_ram: int | None = None,
) -> RunPlan:
    """With slots for the first `num_resident` experts of each layer, and all of `pinned` layers.

    num_in_ram: how many of the others the pool in RAM begins with, of each layer; None: the file is mapped.
    streamed: the share of the missing experts that the GPU reads over the bus. Of `prefetching` as much as
    fits into the ring.
    """
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    counts = [spec.num_experts if layer in pinned else num_resident for layer in range(sizes.num_layers)]
    placement = PlacementPlan(
        model=routed_model(file, spec),
        tier="vram",
        budget_bytes=ALL_BYTES,
        fixed=FixedPart(context_length, "i16", chunk_size, 0, 0, 0),
        ring_bytes=ring_bytes,
        expert_bytes=sizes.expert_bytes,
        resident=tuple(tuple(range(count)) for count in counts),
        pinned_layers=pinned,
        layer_weights=layer_weights,
    )
    run = RunPlan(
        placement,
        threads,
        miss_times=_miss_times(streamed),
        max_cpu_rows=min(MAX_CPU_ROWS, chunk_size),
        copy_bytes_per_step=COPY_BYTES_PER_STEP,
        pool=None if num_in_ram is None else _pool(file, spec, placement, num_in_ram),
    )
    fitting = prefetching.fitting(ring_bytes, max(sizes.expert_bytes)) if prefetching else None
    if fitting is None or fitting.cap_bytes is None:
        return run
    return replace(
        run,
        prefetch=fitting.experts,
        prefetch_bytes=fitting.cap_bytes,
        layers_ahead=fitting.distance,
        ahead="fixed" if fitting.from_start else "later",
    )


def layers_plan(
    file: GGUFFile,
    spec: ModelSpec,
    missing: Collection[int],
    *,
    context_length: int,
    chunk_size: int,
    threads: int,
    streamed: float,
    num_places: int = 2,
) -> RunPlan:
    """A dense model on a GPU without the FFNs of the layers `missing`, and a ring with places for so many.

    streamed: the share of them that is copied over the bus in a decode step, above 0.
    """
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0, places_layers=True)
    resident = tuple(layer for layer in range(spec.num_layers) if layer not in missing)
    placement = PlacementPlan(
        model=sizes.routed,
        tier="vram",
        budget_bytes=ALL_BYTES,
        fixed=FixedPart(context_length, "i16", chunk_size, 0, 0, 0),
        ring_bytes=num_places * max(sizes.expert_bytes),
        expert_bytes=sizes.expert_bytes,
        resident=tuple((0,) if layer in resident else () for layer in range(spec.num_layers)),
        pinned_layers=resident,
    )
    return RunPlan(placement, threads, miss_times=_miss_times(streamed))


def _miss_times(streamed: float) -> MissTimes | None:
    """By which the bus reads that share of the missing experts, whatever their numbers of rows."""
    if not streamed:
        return None
    cpu = max(1, round(1e6 * streamed))
    times = MissTimes(max(1, round(1e6 * (1 - streamed))), (cpu,) * MAX_MAILBOX_ROWS)
    return replace(times, layer=10**9)  # all that is guessed comes in time


def _pool(file: GGUFFile, spec: ModelSpec, placement: PlacementPlan, count: int) -> PoolPlan:
    sizes = disk_tier(file, spec).expert_bytes
    pinned = placement.pinned_layers
    others = [range(len(ids), min(len(ids) + count, spec.num_experts)) for ids in placement.resident]
    return PoolPlan(
        ALL_BYTES,
        HostPart(0, 0, 0),
        tuple(0 if layer in pinned else size for layer, size in enumerate(sizes)),
        tuple(() if layer in pinned else tuple(ids) for layer, ids in enumerate(others)),
    )
