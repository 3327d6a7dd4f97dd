"""ModelToPlan: an open model as planning asks about it: its sizes, and what finds room in a budget.

Unit of work: one question with a budget. It makes no choices between devices and reads no given plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coldstream.errors import ModelFormatError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.draft_room import DraftRoom
from coldstream.models.fixed_part import fixed_parts_on_gpu, least_bytes
from coldstream.models.footprint import model_sizes
from coldstream.models.host_part import host_part, mapped_bytes
from coldstream.models.ram_budget import RamNeeds, sizes_in_ram
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.layer_plan import plan_layers
from coldstream.placement.plan import (
    PROMPT_CACHE,
    BudgetTooSmallError,
    FixedPart,
    PlacementPlan,
    PlanOptions,
    plan_placement,
)
from coldstream.placement.pool_plan import PoolPlan, plan_pool
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.budgets import ALL_BYTES
from coldstream.planning.config import (
    EngineConfig,
    cache_bytes_per_token,
    resolve,
    tree_rows_of,
    with_contexts,
)
from coldstream.planning.draft_file import NOTHING_IS_DRAFTED, DraftNeeds

Array = np.ndarray[Any, Any]
Place = tuple[PlacementPlan, ModelSizes]  # a placement, and the sizes on which it is based


@dataclass(frozen=True)
class ModelToPlan:
    """An open model, and the parts of planning that do not depend on a budget."""

    file: GGUFFile
    spec: ModelSpec
    options: PlanOptions
    uses: Array | None
    num_cores: int
    draft: DraftNeeds | None
    prompt_cache_bytes: int = 0  # of RAM for kept prefixes

    @property
    def uses_as_data(self) -> tuple[tuple[float, ...], ...] | None:
        return None if self.uses is None else tuple(map(tuple, self.uses.tolist()))

    def sizes(self, config: EngineConfig) -> ModelSizes:
        """The sizes with experts in a GPU's slots."""
        return _sizes(config, self.file, self.spec)

    def ram_needs(self, config: EngineConfig) -> RamNeeds:
        """The needs with the context and the threads of `config`."""
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
            draft=self._draft_room(config),
            num_contexts=_contexts(config),
        ).with_prompt_cache(self.prompt_cache_bytes)

    def _draft_room(self, config: EngineConfig) -> DraftRoom:
        num_contexts = _contexts(config)
        room = DraftRoom(tree_rows_of(config, num_contexts), has_mtp=config.spec_type == "mtp")
        if config.spec_type != "dflash":
            return room
        assert self.draft is not None, "a drafter is open where one is planned"
        num_bytes = self.draft.num_bytes(config.ctx_size or 1, num_contexts)
        return replace(room, drafter_bytes=num_bytes, taps=self.draft.taps)

    def with_drafts(
        self, config: EngineConfig, budget: int
    ) -> tuple[EngineConfig, list[Place] | None, tuple[str, ...]]:
        """`config` with what drafts made concrete, its places in the budget if they are known, and warnings.

        auto: the file's block for multi-token prediction, if a GPU has room for it beside all weights and the
        same contexts, and so drafts, verifies and accepts by itself. Otherwise nothing: where experts are
        missing, or on a CPU, drafts of most texts gain nothing.
        """
        if config.spec_type != "auto":
            return config, None, ()
        without, drafting = (replace(config, spec_type=name) for name in ("none", "mtp"))
        if config.device != "cuda" or self.spec.num_nextn_layers != 1:
            return without, None, ()
        sizes = self.sizes(config)
        if least_bytes(self.spec, sizes) + sizes.all_expert_bytes > budget:
            return without, None, ()  # known before anything is counted, which takes a part of a start
        try:
            places = self.place(self.with_context(drafting, budget), [budget])
        except OutOfMemoryError:
            return without, None, ()
        except ModelFormatError as error:  # of the block, or of the rest, which then is refused as well
            return without, None, (NOTHING_IS_DRAFTED.format(error),)
        return (drafting, places, ()) if places[0][0].is_all_resident else (without, None, ())

    def with_context(self, config: EngineConfig, budget: int) -> EngineConfig:
        """`config` with threads, a context and how many. A requested context is not reduced: planning then
        fails with the bytes that are needed.
        """
        left = budget if config.device == "cuda" else max(0, budget - self.prompt_cache_bytes)
        return with_contexts(self._with_one_context(config, budget), self.spec, left)

    def _with_one_context(self, config: EngineConfig, budget: int) -> EngineConfig:
        if config.ctx_size:
            return resolve(config, self.spec, self.num_cores, ALL_BYTES)
        if config.device == "cuda":
            least = least_bytes(self.spec, self.sizes(config))
        else:
            shortest = resolve(replace(config, ctx_size=1), self.spec, self.num_cores, ALL_BYTES)
            least = self.ram_needs(shortest).least_bytes(self.options)
        free = max(0, budget - least)
        spare = budget - least - self.sizes(config).all_expert_bytes
        return resolve(config, self.spec, self.num_cores, free, spare)

    def place(self, config: EngineConfig, budgets: Sequence[int]) -> list[Place]:
        """The placement for each budget, and the sizes on which it is based."""
        assert config.ctx_size
        if config.device != "cuda":
            needs = self.ram_needs(config)
            plans = [needs.place(budget, self.uses, self.options) for budget in budgets]
            return [(plan, needs.parts_for(plan)[0]) for plan in plans]
        sizes = self.sizes(config)
        memory = (config.ctx_size, config.cache_type_k)
        room = self._draft_room(config)
        parts = fixed_parts_on_gpu(self.file, self.spec, sizes, *memory, budgets, room, _contexts(config))
        return [(self._placed(sizes, *each), sizes) for each in zip(parts, budgets, strict=True)]

    def _placed(self, sizes: ModelSizes, fixed: FixedPart, budget: int) -> PlacementPlan:
        """In `budget` bytes of a GPU's memory."""
        if sizes.is_dense:
            return plan_layers(sizes, fixed, budget, self.options)
        return plan_placement(sizes, fixed, budget, uses=self.uses, options=self.options)

    def pool(self, placement: PlacementPlan, ram: int, threads: int, max_cpu_rows: int) -> PoolPlan | None:
        """The pool in `ram` bytes of RAM beside a GPU; None if the whole file finds room there, or if the GPU
        lacks nothing of it.
        """
        is_whole, kept = placement.is_all_resident, self.prompt_cache_bytes
        if is_whole and not kept:
            return None
        fixed = host_part(self.file, self.spec, placement, threads, max_cpu_rows, kept)
        parts = {"what runs beside": fixed.total - kept, PROMPT_CACHE: kept}
        parts["the mapped file"] = 0 if is_whole else mapped_bytes(self.file, self.spec, placement)
        if sum(parts.values()) <= ram:
            return None
        if is_whole or not self.spec.is_moe:
            raise BudgetTooSmallError("ram", ram, parts)  # a dense layer is never on the disk
        in_slots = sizes_in_ram(self.file, self.spec, 0)[1].expert_bytes
        return plan_pool(placement, in_slots, fixed, ram, uses=self.uses)

    def try_budget(self, config: EngineConfig, budget: int) -> None:
        """Raises as `place` if `budget` is not enough."""
        self.place(self.with_context(config, budget), [budget])


def _contexts(config: EngineConfig) -> int:
    """Whole contexts of a configuration that may not be resolved."""
    return 1 if config.parallel == "auto" else config.parallel


def _sizes(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> ModelSizes:
    kv_token_bytes = cache_bytes_per_token(config, spec)
    return model_sizes(spec, file.tensors, file.fingerprint, kv_token_bytes, places_layers=True)


def all_sizes(config: EngineConfig, file: GGUFFile, spec: ModelSpec) -> tuple[ModelSizes, ...]:
    """Sizes with experts in a GPU's slots, mapped, and in slots in RAM."""
    return (_sizes(config, file, spec), *sizes_in_ram(file, spec, cache_bytes_per_token(config, spec)))
