"""Chooses how a model runs: a pure function of the settings and of facts, without I/O, clocks and callbacks.

`coldstream plan` prints its choices, and opening a model carries them out. Unit of work: one configuration.
Where a choice follows from something that has not been counted or measured yet, it says so in place of a
plan; `gather.py` finds out and asks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from coldstream.errors import ConfigError, ModelFormatError, OutOfMemoryError
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.ops import MAX_TREE_ROWS
from coldstream.kvcache.cache import affordable_context, context_bytes, least_kv_bytes
from coldstream.models.runner_capacity import DraftMemory
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.layer_plan import plan_layers
from coldstream.placement.plan import (
    BudgetTooSmallError,
    PlacementPlan,
    PlanOptions,
    Tier,
    plan_placement,
)
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.config import MAX_PARALLEL, EngineConfig
from coldstream.planning.facts import Facts, with_kv_type
from coldstream.planning.memory import GpuMemory, RamNeeds, least_bytes
from coldstream.planning.unknowns import Missing, NotKnownError, RamShape
from coldstream.planning.workers import pool_of, with_places, with_workers

Array = np.ndarray[Any, Any]

ALL_BYTES: Final = 2**62  # a budget without effect
# What `ctx_size` resolves to where memory is short, if DEFAULT_CACHE_SHARE allows it.
DEFAULT_CTX_SIZE: Final = 32768
DEFAULT_CACHE_SHARE: Final = 0.25  # share of available memory for the cache of a default context
# Share of what is free beside all weights, for a context beyond DEFAULT_CTX_SIZE.
SPARE_CACHE_SHARE: Final = 0.5
# Of the bytes that a plain token reads, the most that a drafted one may read for drafts by default on a CPU.
# With more, no size of draft gained a tenth over plain steps; see docs/notes/drafts-cpu.md.
MOST_DRAFTED_SHARE: Final = 0.2
PARALLEL_SHARE: Final = 0.125  # share of the budget for the caches of whole contexts
_MOST_BESIDE_FILE: Final = 4 * 2**30  # RAM of a runner on a GPU beside the mapped file
_AUTO_RAM_SHARE: Final = 0.9  # share of available RAM; the rest is for all other programs
_AGAIN: Final = "make another with `coldstream plan`"
_NO_OPTIONS: Final = PlanOptions()
NO_DRAFTER: Final = "spec_type dflash: no drafter is given: name its file or folder with --model-draft"


@dataclass(frozen=True)
class TooSmall:
    """A budget that is too small, and what the smallest sufficient one is made of, in bytes by name."""

    tier: Tier
    budget_bytes: int
    made_of: Mapping[str, int]

    @property
    def least_bytes(self) -> int:
        """The smallest sufficient budget; a larger one may have to hold more."""
        return sum(self.made_of.values())


def choose(
    config: EngineConfig, facts: Facts, options: PlanOptions = _NO_OPTIONS, prompt_cache_bytes: int = 0
) -> RunPlan | TooSmall | Missing:
    """The plan on the device of `config`, which is cpu or cuda; or why there is none.

    Follows the plan that `config` names, or its budgets, or else free memory. prompt_cache_bytes: of RAM,
    within its budget, for kept prefixes of prompts; those of a named plan are its own. Raises ConfigError for
    settings that the model cannot have, for pinned or weighted layers that do not exist, and for prefetched
    experts without a place. Also for a named plan of another device, context or file.
    """
    options = _of_placed_layers(options, facts.model.spec.placed_layers)
    try:
        if facts.given is not None:
            return _followed(config, facts, facts.given, options)
        return _chosen(config, facts, options, prompt_cache_bytes)
    except (NotKnownError, BudgetTooSmallError) as error:
        return _no_plan(error)


def place(
    config: EngineConfig, facts: Facts, options: PlanOptions = _NO_OPTIONS, prompt_cache_bytes: int = 0
) -> PlacementPlan | TooSmall | Missing:
    """What `choose` places in fast memory: without a plan that `config` names, and before workers."""
    options = _of_placed_layers(options, facts.model.spec.placed_layers)
    chooser = _Chooser(facts, options, prompt_cache_bytes)
    try:
        return chooser.placed(chooser.resolved(config))
    except (NotKnownError, BudgetTooSmallError) as error:
        return _no_plan(error)


def with_ram(run: RunPlan, facts: Facts, ram: int) -> RunPlan | TooSmall | Missing:
    """`run`, a plan with a pool in RAM beside a GPU, with the pool in `ram` bytes."""
    try:
        return replace(run, pool=pool_of(run, facts, ram))
    except (NotKnownError, BudgetTooSmallError) as error:
        return _no_plan(error)


def _no_plan(error: NotKnownError | BudgetTooSmallError) -> TooSmall | Missing:
    if isinstance(error, NotKnownError):
        return Missing(error.what)
    return TooSmall(error.tier, error.budget_bytes, error.parts)


def concrete_config(config: EngineConfig, run: RunPlan, num_cores: int) -> EngineConfig:
    """`config` with what `run`, a plan that was chosen for it, made of its settings."""
    fixed, threads = run.placement.fixed, config.threads
    planned: dict[str, Any] = {}
    if config.plan is not None:
        planned = {
            "plan": None,
            run.placement.tier: run.placement.budget_bytes,
            **({"ram": run.pool.budget_bytes} if run.pool else {}),
            "cache_type_k": fixed.kv_type,
            "cache_type_v": fixed.kv_type,
            "attention_window": run.attention_window,
            "tree_budget": run.tree_budget or "auto",
        }
        threads = run.threads or threads if threads == "auto" else threads
    has_no_use = run.placement.is_all_resident and config.prefetch != "auto"
    return replace(
        config,
        **planned,
        ctx_size=fixed.ctx_size,
        spec_type=run.spec_type,
        parallel=fixed.num_contexts,
        threads=num_cores if threads == "auto" else threads,
        prefetch=config.prefetch if has_no_use else run.prefetch,
    )


def ram_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Bytes of RAM: what the configuration allows, or else most of what is available."""
    return config.ram if isinstance(config.ram, int) else int(hardware.ram_available_bytes * _AUTO_RAM_SHARE)


def is_sure_to_map(config: EngineConfig, hardware: Hardware, file_bytes: int, expert_bytes: int) -> bool:
    """Whether a GPU is sure to lack some experts and RAM to hold the file, whatever else a plan will say.

    file_bytes: with all that is kept in RAM beside the file. expert_bytes: of all experts, or FFNs.
    """
    if config.device != "cuda" or config.plan is not None or hardware.gpu is None:
        return False
    is_partial = expert_bytes > budget_bytes(config, hardware)
    return is_partial and file_bytes + _MOST_BESIDE_FILE <= ram_bytes(config, hardware)


def budget_bytes(config: EngineConfig, hardware: Hardware) -> int:
    """Bytes of the fast memory: what the configuration allows, or else what is free."""
    if config.device == "cuda":
        if isinstance(config.vram, int):
            return config.vram
        assert hardware.gpu is not None, "a configuration for a GPU needs one, or a budget"
        return hardware.gpu.free_bytes
    return ram_bytes(config, hardware)


def _chosen(config: EngineConfig, facts: Facts, options: PlanOptions, prompt_cache_bytes: int) -> RunPlan:
    """By budgets, or else free memory."""
    chooser = _Chooser(facts, options, prompt_cache_bytes)
    concrete = chooser.resolved(config)
    run = RunPlan(
        chooser.placed(concrete),
        0,
        None if chooser.uses is None else tuple(map(tuple, chooser.uses.tolist())),
        attention_window=config.attention_window,
        spec_type=concrete.spec_type,
        tree_budget=0 if config.tree_budget == "auto" else config.tree_budget,
        prompt_cache_bytes=prompt_cache_bytes,
    )
    return with_workers(run, config, facts, ram_bytes(config, facts.hardware))


@dataclass(frozen=True)
class _Chooser:
    """What finds room in a budget, for one model, one machine and one set of options."""

    facts: Facts
    options: PlanOptions
    prompt_cache_bytes: int

    @property
    def spec(self) -> ModelSpec:
        return self.facts.model.spec

    @property
    def uses(self) -> Array | None:
        """Expected uses of experts, float64 [layers, experts]: those of the given plan, or of a trace."""
        given = self.facts.given
        return self.facts.uses if given is None else given.expected_uses

    def resolved(self, config: EngineConfig) -> EngineConfig:
        """`config` with concrete drafts, threads, context and number of contexts."""
        budget = budget_bytes(config, self.facts.hardware)
        if config.spec_type == "auto":
            config = replace(config, spec_type="mtp" if self._has_room_for_mtp(config, budget) else "none")
        return self._with_context(config, budget)

    def _has_room_for_mtp(self, config: EngineConfig, budget: int) -> bool:
        """Whether there is room for the file's block for multi-token prediction beside all weights and the
        same contexts. A GPU then drafts, verifies and accepts by itself. On a CPU, where a drafted token may
        read no more than `MOST_DRAFTED_SHARE`, the times of steps decide how much is drafted.

        Otherwise nothing drafts unless it is asked for: where experts are missing, drafts of most texts gain
        nothing.
        """
        if not self.spec.drafts_by_mtp:
            return False
        sizes, is_gpu = self.facts.model.on_gpu, config.device == "cuda"
        share = self.facts.model.drafted_share
        if not is_gpu and (share is None or share > MOST_DRAFTED_SHARE):
            return False
        if is_gpu and least_bytes(self.spec, sizes) + sizes.all_expert_bytes > budget:
            return False  # known before anything is counted, which takes a part of a start
        try:
            drafting = self._with_context(replace(config, spec_type="mtp"), budget)
            if not self._placed(drafting, budget).is_all_resident:
                return False
        except (OutOfMemoryError, ModelFormatError):
            return False
        if is_gpu:
            return True
        plain = self._with_context(replace(config, spec_type="none"), budget)
        return (plain.ctx_size, plain.parallel) == (drafting.ctx_size, drafting.parallel)

    def _with_context(self, config: EngineConfig, budget: int) -> EngineConfig:
        """`config` with threads, a context and how many. A requested context is not reduced: planning then
        fails with the bytes that are needed.
        """
        left = budget if config.device == "cuda" else max(0, budget - self.prompt_cache_bytes)
        return with_contexts(self._with_one_context(config, budget), self.spec, left)

    def _with_one_context(self, config: EngineConfig, budget: int) -> EngineConfig:
        num_cores = self.facts.hardware.num_physical_cores
        if config.ctx_size:
            return resolve(config, self.spec, num_cores, ALL_BYTES)
        if config.device == "cuda":
            least = least_bytes(self.spec, self.facts.model.on_gpu)
        else:
            shortest = resolve(replace(config, ctx_size=1), self.spec, num_cores, ALL_BYTES)
            least = self.ram_needs(shortest).least_bytes(self.options)
        spare = budget - least - self.facts.model.on_gpu.all_expert_bytes
        return resolve(config, self.spec, num_cores, max(0, budget - least), spare)

    def placed(self, config: EngineConfig) -> PlacementPlan:
        """What lies where with a resolved configuration."""
        return self._placed(config, budget_bytes(config, self.facts.hardware))

    def _placed(self, config: EngineConfig, budget: int) -> PlacementPlan:
        if config.device != "cuda":
            return self.ram_needs(config).place(budget, self.uses, self.options)
        memory = self._gpu_memory(config)
        fixed = memory.fixed_part(budget)
        if memory.sizes.is_dense:
            return plan_layers(memory.sizes, fixed, budget, self.options)
        return plan_placement(memory.sizes, fixed, budget, uses=self.uses, options=self.options)

    def _gpu_memory(self, config: EngineConfig) -> GpuMemory:
        assert config.ctx_size, "the context of a resolved configuration is known"
        facts, kv_type = self.facts, config.cache_type_k
        return GpuMemory(
            self.spec,
            with_kv_type(facts.model.on_gpu, self.spec, kv_type),
            facts.model.nextn_bytes,
            None if facts.is_estimated else facts.counts.on_gpu,
            config.ctx_size,
            kv_type,
            _contexts(config),
            self._draft_memory(config),
            config.attention_window,
            options=self.options,
        )

    def ram_needs(self, config: EngineConfig) -> RamNeeds:
        """The needs with the context and the threads of a resolved configuration."""
        assert isinstance(config.threads, int)
        assert config.ctx_size
        shape = RamShape(
            config.threads,
            config.tier,
            config.ctx_size,
            config.cache_type_k,
            _contexts(config),
            self._draft_memory(config),
            config.attention_window,
        )
        mapped, in_slots = self.facts.ram_parts(shape)
        needs = RamNeeds(self.facts.model.mapped, mapped, self.facts.model.in_slots, in_slots)
        return needs.with_prompt_cache(self.prompt_cache_bytes)

    def _draft_memory(self, config: EngineConfig) -> DraftMemory:
        num_contexts = _contexts(config)
        room = DraftMemory(tree_rows_of(config, num_contexts), has_mtp=config.spec_type == "mtp")
        if config.spec_type != "dflash":
            return room
        drafter = self.facts.drafter
        assert drafter is not None, "a drafter is open where one is planned"
        num_bytes = drafter.num_bytes(config.ctx_size or 1, num_contexts)
        return replace(room, drafter_bytes=num_bytes, aux_layers=drafter.aux_layers)


def _contexts(config: EngineConfig) -> int:
    """Whole contexts of a configuration that may not be resolved."""
    return 1 if config.parallel == "auto" else config.parallel


def _followed(config: EngineConfig, facts: Facts, given: RunPlan, options: PlanOptions) -> RunPlan:
    """The plan that `config` names, with the threads and the prefetching of `config`, which go before it."""
    name, placement, model = config.plan, given.placement, facts.model
    _check_given(config, given, model.spec)
    if given.spec_type == "dflash" and facts.drafter is None:
        raise ConfigError(NO_DRAFTER)
    stated = concrete_config(config, given, facts.hardware.num_physical_cores)
    stated = resolve(stated, model.spec, facts.hardware.num_physical_cores, ALL_BYTES)
    assert isinstance(stated.threads, int)
    run = replace(given, threads=stated.threads if given.threads else 0)
    if config.prefetch == "auto":
        run = with_places(run, given.prefetch, given.prefetch_bytes, f"{name}: prefetch")
    else:
        run = replace(with_places(run, config.prefetch, placement.ring_bytes, "--prefetch"), ahead="fixed")
    if placement.tier == "ram":
        needs = _Chooser(facts, options, given.prompt_cache_bytes).ram_needs(stated)
        try:  # other threads or another version may need more than when the plan was made
            placement = replace(placement, fixed=needs.fixed_part_for(placement))
        except ValueError as error:
            raise ConfigError(
                f"{name} does not fit its budget with {stated.threads} threads: {error}; {_AGAIN}"
            ) from None
        run = replace(run, placement=placement)
    if placement.expert_bytes != model.sizes_for(placement).expert_bytes:
        raise ConfigError(f"{name} has experts of other sizes than they have on this device: {_AGAIN}")
    return run


def _check_given(config: EngineConfig, given: RunPlan, spec: ModelSpec) -> None:
    """Raises ConfigError for a plan for another device, or for a context that the model cannot have."""
    name, placement = config.plan, given.placement
    if placement.tier != ("vram" if config.device == "cuda" else "ram"):
        raise ConfigError(
            f"{name} is a plan for {'a GPU' if placement.tier == 'vram' else 'the CPU'}, the device is "
            f"{config.device}: {_AGAIN}, or choose the other --device"
        )
    fixed = placement.fixed
    if fixed.kv_type not in CACHE_LAYOUTS or not 0 < fixed.ctx_size <= spec.context_length:
        raise ConfigError(
            f"{name} is for {fixed.ctx_size} tokens of {fixed.kv_type}, which this model cannot have: "
            f"{_AGAIN}"
        )


def _of_placed_layers(options: PlanOptions, layers: Sequence[int]) -> PlanOptions:
    """`options` with the weights of the model's `layers` by their place among them.

    Raises ConfigError for other layers, and for more pinned ones than there are.
    """
    count = options.num_pinned_layers
    if count > len(layers):
        raise ConfigError(
            f"--pin-layers {count}: {len(layers)} layers can be pinned, so it can be 0 to {len(layers)}"
        )
    places = {layer: place for place, layer in enumerate(layers)}
    for layer, weight in options.layer_weights:
        if layer not in places:
            raise ConfigError(
                f"--layer-weights {layer}={weight:g}: {len(layers)} layers can have a weight, from "
                f"{layers[0]} to {layers[-1]}"
            )
    weights = tuple((places[layer], weight) for layer, weight in options.layer_weights)
    return replace(options, layer_weights=weights)


def resolve(
    config: EngineConfig, spec: ModelSpec, num_cores: int, free_bytes: int, spare_bytes: int = 0
) -> EngineConfig:
    """`config` with `ctx_size`, `threads` and `spec_type` made concrete for this model and machine. Pure.

    free_bytes: device memory available for caches, and for weights that can be elsewhere. spare_bytes: what
    is left of it beside all weights, of which a default context takes a share. The tier is not resolved here,
    since only the compiled kernels list their tiers; the opened model reports its choice. Raises ConfigError
    for a context beyond the model's and for drafts that it cannot have, OutOfMemoryError if caches exceed the
    memory.
    """
    if config.spec_type == "auto":
        config = replace(config, spec_type="none")
    _check_drafts(config, spec)
    threads = num_cores if config.threads == "auto" else config.threads
    windowed, kv_type = spec.with_window(config.attention_window), config.cache_type_k
    try:
        affordable = affordable_context(windowed, int(free_bytes * DEFAULT_CACHE_SHARE), kv_type)
    except ValueError as error:
        raise ConfigError(f"cache_type_k: {error}") from error
    if config.ctx_size:
        _check_context(config, windowed, free_bytes)
        return replace(config, threads=threads)
    in_spare = affordable_context(windowed, int(max(0, spare_bytes) * SPARE_CACHE_SHARE), kv_type)
    ctx_size = max(1, min(spec.context_length, max(in_spare, min(DEFAULT_CTX_SIZE, affordable))))
    return replace(config, threads=threads, ctx_size=ctx_size)


def with_contexts(config: EngineConfig, spec: ModelSpec, budget: int) -> EngineConfig:
    """A resolved `config` with a concrete `parallel`, for a budget of device memory in bytes.

    Of MAX_PARALLEL, a half of it and so on the most whose caches take up to PARALLEL_SHARE of the budget.
    """
    if config.parallel != "auto":
        return config
    assert config.ctx_size, "the context of a resolved configuration is known"
    affordable = int(budget * PARALLEL_SHARE)
    windowed = spec.with_window(config.attention_window)
    each = context_bytes(windowed, config.ctx_size, config.cache_type_k)
    parallel = MAX_PARALLEL
    while parallel > 1 and parallel * each > affordable:
        parallel //= 2
    return replace(config, parallel=parallel)


def tree_rows_of(config: EngineConfig, num_contexts: int) -> int:
    """Rows of draft trees, one for each context, for which a resolved `config` needs memory."""
    if config.spec_type == "none":
        return 0
    if config.tree_budget == "auto":
        return MAX_TREE_ROWS
    # A GPU drafts by the model's own block for one sequence at a time.
    num_trees = 1 if config.device == "cuda" and config.spec_type == "mtp" else num_contexts
    return min(MAX_TREE_ROWS, num_trees * (1 + config.tree_budget))


def _check_drafts(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for drafts that the model cannot have."""
    if config.spec_type == "mtp" and not spec.num_nextn_layers:
        raise ConfigError(
            "spec_type mtp: the file has no block for multi-token prediction: name a file with it by "
            "--model-draft, or try ngram"
        )
    if config.spec_type == "mtp" and not spec.drafts_by_mtp:
        raise ConfigError(
            f"spec_type mtp: the file has {spec.num_nextn_layers} blocks for multi-token prediction, and "
            "drafting takes a file with one: try ngram"
        )
    if config.spec_type == "dflash" and config.model_draft is None:
        raise ConfigError(NO_DRAFTER)


def _memory_name(config: EngineConfig) -> str:
    return "GPU's memory" if config.device == "cuda" else "RAM"


def _check_context(config: EngineConfig, spec: ModelSpec, free: int) -> None:
    ctx_size = config.ctx_size or 0
    if ctx_size > spec.context_length:
        raise ConfigError(
            f"ctx_size {ctx_size} is beyond the {spec.context_length} tokens that {spec.context_bound}: "
            f"give at most --ctx-size {spec.context_length}"
        )
    need = least_kv_bytes(spec, ctx_size, config.cache_type_k)
    if need > free:
        fitting = max(1, affordable_context(spec, free // 2, config.cache_type_k))
        raise OutOfMemoryError(
            f"a context of {ctx_size} tokens needs {need / 2**30:.1f} GiB of the {_memory_name(config)}, "
            f"{free / 2**30:.1f} GiB are free: try --ctx-size {fitting}"
        )
