"""Runners without an engine, for benchmarks and tests: a model at a path, and plans with chosen sizes.

The product's plans are those of `coldstream.planning.planning`. These place what a caller says, without a
profile and whether or not it is the best for the machine.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from coldstream.experts.prefetching import Prefetching
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.kvcache import CacheSize
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.draft_room import NO_DRAFTS, DraftRoom
from coldstream.models.expert_stacks import disk_tier
from coldstream.models.fixed_part import fixed_parts_on_gpu
from coldstream.models.footprint import model_sizes, routed_model
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import Progress
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.cost import COPY_BYTES_PER_STEP, MAX_CPU_ROWS
from coldstream.placement.plan import FixedPart, PlacementPlan, PlanOptions, plan_placement
from coldstream.placement.policies import Policy
from coldstream.placement.pool_plan import HostPart, PoolPlan
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.budgets import ALL_BYTES


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
    taps: tuple[int, ...] = (),
) -> CpuRunner:
    """The model at `path`, within `ram_bytes` if given. Raises as `CpuRunner.load`, and
    BudgetTooSmallError.
    """
    file, spec = open_model_file(path)
    try:
        needs = CpuRunner.needs(
            file,
            spec,
            threads,
            tier,
            context_length,
            kv_type,
            cache_size=cache_size,
            draft=DraftRoom(taps=taps),
        )
        placement = needs.place(ALL_BYTES if ram_bytes is None else ram_bytes, None, PlanOptions())
        return CpuRunner.load(
            file,
            spec,
            RunPlan(placement, threads, attention_window=attention_window),
            tier=tier,
            policy=policy,
            progress=progress,
            cache_size=cache_size,
            taps=taps,
        )
    except BaseException:
        file.close()
        raise


def resident_plan(
    file: GGUFFile,
    spec: ModelSpec,
    context_length: int,
    kv_type: str = "i16",
    draft: DraftRoom = NO_DRAFTS,
) -> RunPlan:
    """All experts on the GPU, for one sequence, in prefill steps as the product chooses for what is free.

    It may need more than is free: a runner refuses it then.
    """
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    free = [find_gpu().free_bytes]
    (fixed,) = fixed_parts_on_gpu(file, spec, sizes, context_length, kv_type, free, draft)
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
    counts = [spec.num_experts if layer in pinned else num_resident for layer in range(spec.num_layers)]
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
        run, prefetch=fitting.experts, prefetch_bytes=fitting.cap_bytes, layers_ahead=fitting.distance
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

    streamed: the share of them that is copied over the bus in a step of few rows, above 0.
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
    return MissTimes(max(1, round(1e6 * (1 - streamed))), (cpu,) * MAX_MAILBOX_ROWS)


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
