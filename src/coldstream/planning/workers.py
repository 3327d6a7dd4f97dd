"""Who computes what a GPU does not hold: the CPU's threads, the bus, a pool in RAM, experts fetched ahead.

Pure. The last part of a choice: what lies where is known by then.
"""

from dataclasses import replace

import numpy as np

from coldstream.errors import ConfigError
from coldstream.experts.prefetch import LAYERS_AHEAD, Prefetching
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.placement.cost import COPY_BYTES_PER_STEP, PREFETCHED, miss_times_of, prefetch_gain
from coldstream.placement.forecast import Known, hit_rates_of
from coldstream.placement.plan import PROMPT_CACHE, BudgetTooSmallError
from coldstream.placement.pool_plan import HostPart, PoolPlan, plan_pool
from coldstream.placement.prompt_cost import MAX_CPU_ROWS, rows_with_cpu
from coldstream.placement.rates import Rates
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.facts import Facts, hit_curve, with_kv_type
from coldstream.planning.memory import HOST_RESERVE_BYTES, buffer_bytes
from coldstream.planning.unknowns import WorkspaceShape


def with_workers(run: RunPlan, config: EngineConfig, facts: Facts, ram: int) -> RunPlan:
    """`run` with threads and, on a GPU that does not hold all experts, what is done about the others.

    ram: the budget of RAM in bytes. Raises ConfigError for prefetched experts that were asked for and have no
    place; NotKnownError and BudgetTooSmallError.
    """
    placement, num_cores = run.placement, facts.hardware.num_physical_cores
    if placement.tier == "ram":
        return replace(run, threads=num_cores if config.threads == "auto" else config.threads)
    if placement.is_all_resident:
        pool_of(run, facts, ram)  # raises if RAM has no room for kept prefixes
        return run
    rates = Rates.of(facts.rated_hardware())
    # One core is for the thread that launches and waits for the GPU.
    threads = max(1, num_cores - 1) if config.threads == "auto" else config.threads
    run = replace(run, threads=threads)
    if facts.model.on_gpu.is_dense:
        return _with_layers(run, config, facts, ram)
    run = replace(
        run,
        max_cpu_rows=min(MAX_CPU_ROWS, placement.fixed.chunk_size),
        copy_bytes_per_step=COPY_BYTES_PER_STEP,
    )
    run = replace(run, pool=pool_of(run, facts, ram))
    if run.pool is None:
        run = _with_long_steps(run, facts, rates, ram)
    source = None if config.prefetch == "auto" else "--prefetch"
    count = 0 if config.prefetch == "auto" else config.prefetch
    if facts.locked_share(placement, run.pool) > 0:  # else nothing comes over the bus, ahead neither
        run = replace(run, miss_times=miss_times_of(facts.model.on_gpu, rates))
        if config.prefetch == "auto":
            return _with_open_places(run, is_paying=_is_prefetch_paying(run, facts, rates))
    return with_places(run, count, placement.ring_bytes, source)


def _with_long_steps(run: RunPlan, facts: Facts, rates: Rates, ram: int) -> RunPlan:
    """`run` with room for the CPU's part of longer steps of a prompt, if that pays and RAM has it as well."""
    placement = run.placement
    resident = np.zeros((placement.model.num_layers, placement.model.num_experts), np.bool_)
    resident.ravel()[placement.resident_numbers()] = True
    rows = rows_with_cpu(
        facts.model.on_gpu, rates, resident, placement.fixed.chunk_size, placement.ring_bytes
    )
    if rows <= MAX_CPU_ROWS:
        return run
    longer = replace(run, max_cpu_rows=rows)
    return longer if pool_of(longer, facts, ram) is None else run


def _is_prefetch_paying(run: RunPlan, facts: Facts, rates: Rates) -> bool:
    """Whether fetching experts ahead is expected to save time."""
    sizes = with_kv_type(facts.model.on_gpu, facts.model.spec, run.placement.fixed.kv_type)
    known = Known(sizes, rates, hit_curve(facts.trace, run.placement))
    return prefetch_gain(sizes, rates, hit_rates_of(run.placement, known)) > 0


def _with_open_places(run: RunPlan, *, is_paying: bool) -> RunPlan:
    """`run` with places for prefetched experts, of which steps will say whether they are used.

    If they are expected not to pay, they may not take the room in which steps of several rows share out.
    """
    found = with_places(run, PREFETCHED, run.placement.ring_bytes, None)
    if found.prefetch == 0 or (not is_paying and found.shared_rows < run.shared_rows):
        return run
    return replace(found, ahead="first" if is_paying else "later")


def _with_layers(run: RunPlan, config: EngineConfig, facts: Facts, ram: int) -> RunPlan:
    """`with_workers` for a GPU that lacks layers of a dense model, of which no experts are guessed."""
    if config.prefetch not in ("auto", 0):
        raise ConfigError(
            f"--prefetch {config.prefetch}: a dense model has no experts to fetch ahead: leave it out"
        )
    pool_of(run, facts, ram)  # raises if there is no room in RAM
    rates = Rates.of(facts.rated_hardware())
    return replace(run, miss_times=miss_times_of(facts.model.on_gpu, rates, is_layer=True))


def pool_of(run: RunPlan, facts: Facts, ram: int) -> PoolPlan | None:
    """The pool in `ram` bytes of RAM beside a GPU, for the threads and the rows of a prompt of `run`.

    None if the whole file finds room there, or if the GPU lacks nothing of it. Raises BudgetTooSmallError and
    NotKnownError.
    """
    placement, model = run.placement, facts.model
    is_whole, kept = placement.is_all_resident, run.prompt_cache_bytes
    if is_whole and not kept:
        return None
    fixed = _host_part(run, facts)
    parts = {"what runs beside": fixed.total - kept, PROMPT_CACHE: kept}
    parts["the mapped file"] = 0 if is_whole else model.mapped_bytes(placement)
    if sum(parts.values()) <= ram:
        return None
    if is_whole or not model.spec.is_moe:
        raise BudgetTooSmallError("ram", ram, parts)  # a dense layer is never on the disk
    return plan_pool(placement, model.in_slots.expert_bytes, fixed, ram, uses=run.expected_uses)


def _host_part(run: RunPlan, facts: Facts) -> HostPart:
    """What RAM holds beside experts. Where the GPU holds all of them, the CPU is asked for none."""
    if run.placement.is_all_resident:
        fixed = run.placement.fixed
        return HostPart(fixed.host_tables + fixed.host_ngrams, 0, HOST_RESERVE_BYTES, run.prompt_cache_bytes)
    shape = WorkspaceShape(run.threads, max(run.max_cpu_rows, MAX_MAILBOX_ROWS))
    return HostPart(
        buffers=buffer_bytes(facts.model.spec, run.placement, run.max_cpu_rows),
        workspace=facts.workspace_bytes(shape),
        reserve=HOST_RESERVE_BYTES,
        prompt_cache=run.prompt_cache_bytes,
    )


def with_places(run: RunPlan, count: int, cap_bytes: int, source: str | None) -> RunPlan:
    """`run` with as many prefetched experts, up to `count`, as fit into `cap_bytes` of the ring.

    They are guessed as many layers ahead as `run` says. source: the setting that asked for a number of them,
    or None. Raises ConfigError if there is one and not even one expert of each layer fits.
    """
    placement = run.placement
    if count == 0 or placement.is_all_resident:
        return replace(run, prefetch=0, prefetch_bytes=0, layers_ahead=0)
    wanted, largest = Prefetching(run.layers_ahead or LAYERS_AHEAD, count), max(placement.expert_bytes)
    fitting = wanted.fitting(min(cap_bytes, placement.ring_bytes), largest)
    if fitting is None and source is not None:
        least = wanted.num_layers * largest
        raise ConfigError(
            f"{source} {count}: places for an expert of each of {wanted.num_layers} layers take {least} "
            f"bytes, and the cap in the ring is {cap_bytes}: choose --prefetch 0, or a larger --vram"
        )
    if fitting is None:
        return replace(run, prefetch=0, prefetch_bytes=0, layers_ahead=0)
    num_bytes = fitting.cap_bytes or 0
    return replace(run, prefetch=fitting.experts, prefetch_bytes=num_bytes, layers_ahead=fitting.distance)
