"""Who computes what a GPU does not hold: the CPU's threads, the bus, a pool in RAM, experts fetched ahead."""

from collections.abc import Callable
from dataclasses import astuple, replace

from coldstream.errors import ConfigError
from coldstream.experts.prefetching import LAYERS_AHEAD, Prefetching
from coldstream.placement.cost import (
    COPY_BYTES_PER_STEP,
    MAX_CPU_ROWS,
    PREFETCHED,
    miss_times,
    prefetch_gain,
)
from coldstream.placement.forecast import hit_rates_of
from coldstream.placement.hardware import Hardware
from coldstream.placement.pool_plan import PoolPlan
from coldstream.placement.rates import Rates
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import EngineConfig
from coldstream.planning.planned import Planned

# The pool in RAM beside a GPU for these threads of the CPU and rows of a prompt; None: experts are mapped.
MakePool = Callable[[int, int], PoolPlan | None]


def with_workers(
    planned: Planned,
    asked: EngineConfig,
    measured: Callable[[], Hardware] | None,
    make_pool: MakePool = lambda threads, max_cpu_rows: None,
) -> Planned:
    """Adds threads and, on a GPU that does not hold all experts, what is done about the others.

    Raises ConfigError for prefetched experts that were asked for and have no place; as `make_pool`.
    """
    config, plan = planned.config, planned.plan
    assert isinstance(config.threads, int)
    if plan.tier == "ram":
        return replace(
            planned, run=replace(planned.run, threads=config.threads), config=with_prefetch(config, 0)
        )
    if plan.is_all_resident:
        make_pool(0, 0)  # raises if RAM has no room for kept prefixes
        return replace(planned, config=with_prefetch(config, 0))
    if measured is not None:
        planned = replace(planned, hardware=measured())
    # One core is for the thread that launches and waits for the GPU.
    num_cores = planned.hardware.num_physical_cores
    threads = max(1, num_cores - 1) if asked.threads == "auto" else config.threads
    if planned.known.model.is_dense:
        return _with_layers(planned, threads, make_pool)
    max_cpu_rows = min(MAX_CPU_ROWS, plan.fixed.chunk_size)
    run = replace(
        planned.run,
        threads=threads,
        max_cpu_rows=max_cpu_rows,
        copy_bytes_per_step=COPY_BYTES_PER_STEP,
        pool=make_pool(threads, max_cpu_rows),
    )
    is_asked = config.prefetch != "auto"
    if run.pool is not None:
        # Its experts do not stay where they are while a step runs, so that the GPU reads none of them.
        config = with_prefetch(config, 0)
    else:
        rates = Rates.of(planned.hardware)
        run = replace(run, miss_times=miss_times(max(plan.expert_bytes), rates))
        if not is_asked:
            known = planned.known
            gain = prefetch_gain(known.model, known.rates, hit_rates_of(plan, known))
            config = with_prefetch(config, PREFETCHED if gain > 0 else 0)
    run, config = with_places(run, config, plan.ring_bytes, "--prefetch" if is_asked else None)
    return replace(planned, run=run, config=config)


def _with_layers(planned: Planned, threads: int, make_pool: MakePool) -> Planned:
    """`with_workers` for a GPU that lacks layers of a dense model, of which no experts are guessed."""
    config = planned.config
    if config.prefetch not in ("auto", 0):
        raise ConfigError(
            f"--prefetch {config.prefetch}: a dense model has no experts to fetch ahead: leave it out"
        )
    make_pool(threads, 0)  # raises if there is no room in RAM
    times = miss_times(max(planned.plan.expert_bytes), Rates.of(planned.hardware), is_layer=True)
    run = replace(planned.run, threads=threads, miss_times=times)
    return replace(planned, run=run, config=with_prefetch(config, 0))


def with_prefetch(config: EngineConfig, count: int) -> EngineConfig:
    """`config` with `count` prefetched experts in place of `auto`."""
    return replace(config, prefetch=count) if config.prefetch == "auto" else config


def with_places(
    run: RunPlan, config: EngineConfig, cap_bytes: int, source: str | None
) -> tuple[RunPlan, EngineConfig]:
    """Both with as many prefetched experts as `config` has and as fit into `cap_bytes` of the ring, guessed
    as many layers ahead as `run` says.

    source: the setting that asked for a number of them, or None. Raises ConfigError if there is one and not
    even one expert of each layer fits, or they lie in a pool.
    """
    count, plan = config.prefetch, run.placement
    assert isinstance(count, int)
    if count and run.pool is not None:
        raise ConfigError(
            f"{source} {count}: experts are fetched ahead from the mapped file, for which there is no room "
            f"in {run.pool.budget_bytes / 2**30:.2f} GiB of RAM: choose --prefetch 0, or a larger --ram"
        )
    if count == 0 or plan.is_all_resident:
        return replace(run, prefetch=0, prefetch_bytes=0, layers_ahead=0), config
    wanted, largest = Prefetching(run.layers_ahead or LAYERS_AHEAD, count), max(plan.expert_bytes)
    fitting = wanted.fitting(min(cap_bytes, plan.ring_bytes), largest)
    if fitting is None and source is not None:
        least = wanted.num_layers * largest
        raise ConfigError(
            f"{source} {count}: places for an expert of each of {wanted.num_layers} layers take {least} "
            f"bytes, and the cap in the ring is {cap_bytes}: choose --prefetch 0, or a larger --vram"
        )
    ahead, experts, num_bytes = astuple(fitting) if fitting else (0, 0, 0)
    run = replace(run, prefetch=experts, prefetch_bytes=num_bytes, layers_ahead=ahead)
    return run, replace(config, prefetch=experts)
