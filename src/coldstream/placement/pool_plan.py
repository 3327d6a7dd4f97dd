"""PoolPlan: experts in RAM under a budget beside a GPU's slots; the rest is on the disk. Pure.

If RAM holds the whole file beside a GPU, the file is mapped and there is no such plan. The pool is for what
the GPU does not hold. Its slots begin with the most used of the other experts. An expert of the GPU is there
too only if all others are. Knows sizes, uses and a budget, no tensors and no devices.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from coldstream.placement.plan import PROMPT_CACHE, BudgetTooSmallError, PlacementPlan
from coldstream.placement.ranking import assumed_uses, ranked, take_fitting

Array = np.ndarray[Any, Any]

# Slots of each size, in experts of a token of a layer: a step reads into some while it computes others, and
# as many are on their way to the GPU.
LEAST_TOKENS: Final = 3


@dataclass(frozen=True)
class HostPart:
    """Bytes of RAM that do not depend on the pool, by purpose."""

    buffers: int  # page-locked: what is asked of the CPU and its answers, experts on their way, logits
    workspace: int  # activations of the CPU's experts
    reserve: int  # the driver's, the program's, and buffers through which weights are loaded
    prompt_cache: int = 0  # kept prefixes of prompts that have no room in the GPU's memory

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name for people."""
        return {PROMPT_CACHE if name == "prompt_cache" else name: size for name, size in asdict(self).items()}


@dataclass(frozen=True)
class PoolPlan:
    """The contents of RAM. Creation raises ValueError if it is contradictory or exceeds the budget."""

    budget_bytes: int
    fixed: HostPart
    expert_bytes: tuple[int, ...]  # of one expert in a slot, by layer; 0: the GPU holds the whole layer
    loaded: tuple[tuple[int, ...], ...]  # experts that begin in the pool, by layer, ascending; one per slot

    def __post_init__(self) -> None:
        if len(self.loaded) != len(self.expert_bytes):
            raise ValueError(f"{len(self.loaded)} layers in RAM, {len(self.expert_bytes)} layers")
        if min(*asdict(self.fixed).values(), *self.expert_bytes, self.budget_bytes) < 0:
            raise ValueError("a size in RAM below 0")
        for layer, (ids, size) in enumerate(zip(self.loaded, self.expert_bytes, strict=True)):
            if any(one >= other for one, other in pairwise((-1, *ids))):
                raise ValueError(f"experts of layer {layer} in RAM are not rising numbers")
            if ids and not size:
                raise ValueError(f"experts of layer {layer} in RAM, all of which the GPU holds")
        if self.total_bytes > self.budget_bytes:
            raise ValueError(f"{self.total_bytes} bytes of a budget of {self.budget_bytes} of RAM")

    @property
    def slots(self) -> dict[int, int]:
        """Number of slots by bytes of an expert, ascending. All are filled at first."""
        counts: Counter[int] = Counter()
        for ids, size in zip(self.loaded, self.expert_bytes, strict=True):
            if size:
                counts[size] += len(ids)
        return dict(sorted(counts.items()))

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.loaded))

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(size * count for size, count in self.slots.items())

    @property
    def total_bytes(self) -> int:
        return self.fixed.total + self.slot_bytes


def plan_pool(
    placement: PlacementPlan,
    expert_bytes: tuple[int, ...],
    fixed: HostPart,
    budget_bytes: int,
    *,
    uses: Array | None = None,
) -> PoolPlan:
    """The pool in RAM of `budget_bytes` beside the slots of `placement`, a plan for a GPU.

    expert_bytes: of one expert in a slot in RAM, by layer. uses as for `plan_placement`. The same arguments
    give the same plan, and a larger budget never fewer bytes in the pool. Raises BudgetTooSmallError.
    """
    model = placement.model
    uses = assumed_uses(model.num_layers, model.num_experts) if uses is None else np.asarray(uses, np.float64)
    if placement.layer_weights:
        uses = uses * np.array(placement.layer_weights)[:, None]
    order = ranked(uses, expert_bytes)
    order = order[~np.isin(order // model.num_experts, placement.pinned_layers)]
    is_on_gpu = np.isin(order, placement.resident_numbers())
    order = np.concatenate([order[~is_on_gpu], order[is_on_gpu]])
    sizes = np.repeat(np.asarray(expert_bytes, np.int64), model.num_experts)
    first: list[int] = []
    for size in np.unique(sizes[order]):
        first += order[sizes[order] == size][: LEAST_TOKENS * model.num_experts_per_tok].tolist()
    left = budget_bytes - fixed.total - int(sizes[first].sum())
    if left < 0:
        parts = fixed.parts | {"experts that must find room": int(sizes[first].sum())}
        raise BudgetTooSmallError("ram", budget_bytes, parts)
    chosen = set(first)
    rest = [number for number in order.tolist() if number not in chosen]
    loaded: list[list[int]] = [[] for _ in range(model.num_layers)]
    for number in sorted(first + take_fitting(rest, sizes, left)):
        loaded[number // model.num_experts].append(number % model.num_experts)
    pinned = placement.pinned_layers
    return PoolPlan(
        budget_bytes,
        fixed,
        tuple(0 if layer in pinned else size for layer, size in enumerate(expert_bytes)),
        tuple(map(tuple, loaded)),
    )
