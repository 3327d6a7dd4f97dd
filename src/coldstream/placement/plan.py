"""PlacementPlan: the contents of fast memory, to the byte, and the experts that begin there. Pure.

The fast memory is the GPU's ("vram") or RAM under a budget ("ram"). Beside a GPU, the CPU computes everything
else, or the GPU reads it over the bus. Beside RAM, the rest is on the disk. Knows sizes, uses and a budget,
no tensors and no devices.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from coldstream.errors import OutOfMemoryError
from coldstream.placement.ranking import (
    assumed_uses,
    layers_to_pin,
    ranked,
    take_fitting,
    weights_by_layer,
)
from coldstream.placement.routing_trace import RoutedModel
from coldstream.placement.sizes import SHARE_WITH_PLACES, ModelSizes

Array = np.ndarray[Any, Any]
Tier = Literal["vram", "ram"]

_RING_SHARE: Final = 8  # the ring takes at most one eighth of the memory left for experts
# Smaller rings cost prompts up to half of their speed (docs/notes/streaming.md).
_GOOD_RING_BYTES: Final = 256 * 2**20
_FAST_RING_BYTES: Final = 64 * 2**20
RING_LAYERS: Final = 2  # one is computed while the next is copied
PROMPT_CACHE: Final = "the prompt cache"  # a part of a budget of RAM, for people
_MEMORY_NAMES: Final = {"vram": "the GPU's memory", "ram": "RAM"}


@dataclass(frozen=True)
class FixedPart:
    """Bytes that do not depend on the placement of experts, by purpose."""

    ctx_size: int  # tokens of a sequence, at most
    kv_type: str
    chunk_size: int  # tokens that prefill computes at once
    weights: int  # all but the routed experts
    caches: int  # keys and values, recurrent states
    workspace: int  # activations
    drafter: int = 0  # weights and caches of a draft model
    graphs: int = 0  # captured steps
    reserve: int = 0  # the driver's own
    num_contexts: int = 1  # whole contexts that the caches hold together
    num_sequences: int = 1  # recurrent states in the caches
    num_tree_rows: int = 0  # rows of draft trees in the caches
    num_window_blocks: int = 0  # of layers with windows in the caches; 0: they keep all positions
    window_caches: int = 0  # of `caches`, bytes of these blocks
    prompt_cache: int = 0  # kept prefixes of prompts that have no room in the caches, in RAM
    host_tables: int = 0  # an embedding in page-locked RAM, beside this memory and in no sum; 0: in `weights`
    host_ngrams: int = 0  # rows of n-grams in RAM: beside a GPU in no sum either, on a CPU in `weights`

    def __post_init__(self) -> None:
        beside = {name: getattr(self, name) for name in ("host_tables", "host_ngrams", "window_caches")}
        for name, num_bytes in {**self.parts, **beside}.items():
            if num_bytes < 0:
                raise ValueError(f"{name} cannot be {num_bytes} bytes")

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        names = ("weights", "caches", "workspace", "drafter", "prompt_cache", "graphs", "reserve")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlanOptions:
    """Choices that are not sizes."""

    num_pinned_layers: int = 0  # layers whose experts are resident and stay: first, last, then from 1
    min_per_layer: int = 0  # experts of every layer that are resident at first
    min_per_size: int = 0  # the same for each size of experts in layers that are not pinned
    has_ring: bool = True  # whether prefill streams cold experts through a ring
    layer_weights: tuple[tuple[int, float], ...] = ()  # (layer, weight of a use), 1 elsewhere


class BudgetTooSmallError(OutOfMemoryError):
    """A budget of a memory below `least_bytes`, the smallest sufficient one, which `parts` add up to."""

    def __init__(self, tier: Tier, budget: int, parts: Mapping[str, int]) -> None:
        self.tier, self.budget_bytes, self.parts = tier, budget, dict(parts)
        self.least_bytes = sum(parts.values())
        unit, name = (2**30, "GiB") if self.least_bytes >= 2**30 else (2**20, "MiB")
        listed = ", ".join(f"{part} {num_bytes / unit:.2f}" for part, num_bytes in parts.items() if num_bytes)
        super().__init__(
            f"--{tier}: {budget / unit:.2f} {name} of {_MEMORY_NAMES[tier]} are below the minimum of "
            f"{self.least_bytes / unit:.2f} {name}: {listed}"
        )


@dataclass(frozen=True)
class PlacementPlan:
    """A placement. Creation raises ValueError if it is contradictory or exceeds the budget."""

    model: RoutedModel
    tier: Tier  # the fast memory
    budget_bytes: int
    fixed: FixedPart
    ring_bytes: int  # for cold experts during prefill
    expert_bytes: tuple[int, ...]  # of one expert, by layer
    resident: tuple[tuple[int, ...], ...]  # experts that begin in fast memory, by layer, ascending
    pinned_layers: tuple[int, ...] = field(default=())  # ascending; their experts are never evicted
    # Weight of a use by layer, for the competition for fast memory; empty: 1 in all layers.
    layer_weights: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(problem)

    @property
    def num_resident(self) -> int:
        """Experts that begin in fast memory: one per slot."""
        return sum(map(len, self.resident))

    @property
    def num_all(self) -> int:
        """Experts of all layers."""
        return self.model.num_layers * self.model.num_experts

    @property
    def is_all_resident(self) -> bool:
        return self.num_resident == self.num_all

    @property
    def resident_bytes(self) -> int:
        return sum(len(ids) * size for ids, size in zip(self.resident, self.expert_bytes, strict=True))

    @property
    def cold_bytes(self) -> int:
        """Bytes of the experts that begin elsewhere."""
        return self.model.num_experts * sum(self.expert_bytes) - self.resident_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed.total + self.ring_bytes + self.resident_bytes

    @property
    def slots(self) -> dict[int, int]:
        """Number of slots by bytes of an expert, ascending. All are filled at first."""
        counts: Counter[int] = Counter()
        for ids, size in zip(self.resident, self.expert_bytes, strict=True):
            counts[size] += len(ids)
        return dict(sorted(counts.items()))

    @property
    def expert_weights(self) -> Array | None:
        """`layer_weights` by number of the expert, float64 [experts of all layers]; None: all are 1."""
        if not self.layer_weights:
            return None
        return np.repeat(np.array(self.layer_weights, np.float64), self.model.num_experts)

    def resident_numbers(self) -> Array:
        """The numbers of the resident experts, int64, ascending."""
        num_experts = self.model.num_experts
        numbers = [layer * num_experts + i for layer, ids in enumerate(self.resident) for i in ids]
        return np.array(numbers, np.int64)

    def _problem(self) -> str | None:
        num_layers, num_experts = self.model.num_layers, self.model.num_experts
        if len(self.resident) != num_layers or len(self.expert_bytes) != num_layers:
            return f"{len(self.resident)} layers with residents, {num_layers} layers"
        if min(self.budget_bytes, self.ring_bytes, *self.expert_bytes) < 0:
            return "a size below 0"
        for layer, ids in enumerate(self.resident):
            if any(one >= other for one, other in pairwise((-1, *ids, num_experts))):
                return f"experts of layer {layer} are not rising numbers below {num_experts}"
        if any(one >= other for one, other in pairwise((-1, *self.pinned_layers, num_layers))):
            return f"pinned layers are not rising numbers below {num_layers}"
        if any(len(self.resident[layer]) != num_experts for layer in self.pinned_layers):
            return "a pinned layer is not all resident"
        if self.layer_weights and len(self.layer_weights) != num_layers:
            return f"{len(self.layer_weights)} weights of layers, {num_layers} layers"
        if not all(0 < weight < np.inf for weight in self.layer_weights):
            return "a layer's weight that is no number above 0"
        if self.total_bytes > self.budget_bytes:
            return f"{self.total_bytes} bytes of a budget of {self.budget_bytes}"
        return None


def plan_placement(
    model: ModelSizes,
    fixed: FixedPart,
    budget_bytes: int,
    *,
    tier: Tier = "vram",
    uses: Array | None = None,
    options: PlanOptions | None = None,
) -> PlacementPlan:
    """The placement of `model` in fast memory of `budget_bytes`.

    uses: float [layers, experts], expected uses a step or counts. None: nothing is known. Experts are taken
    by weighted uses per byte until no more fit, and equal ones by rank in the layer, layer and id. If all fit
    there is no ring. The same arguments give the same plan. A larger budget never gives fewer resident bytes.
    Raises BudgetTooSmallError if the budget is below `least_budget`.
    """
    options = options or PlanOptions()
    shape = (model.num_layers, model.num_experts)
    uses = assumed_uses(*shape) if uses is None else np.asarray(uses, np.float64)
    if uses.shape != shape or not (np.isfinite(uses).all() and (uses >= 0).all()):
        raise ValueError(f"uses must be numbers from 0 on, of shape {shape}, not {uses.shape}")
    pinned = sorted(layers_to_pin(model.num_layers, options.num_pinned_layers))
    weights = weights_by_layer(model.num_layers, options.layer_weights)
    if weights:
        uses = uses * np.array(weights)[:, None]
    left = budget_bytes - fixed.total
    if left >= model.all_expert_bytes:
        ring, taken = 0, list(range(uses.size))
    else:
        order = ranked(uses, model.expert_bytes)
        first = _first(order, pinned, options, model)
        sizes = np.repeat(np.asarray(model.expert_bytes, np.int64), model.num_experts)
        first_bytes = int(sizes[first].sum())
        ring = _ring_bytes(model, left - first_bytes) if options.has_ring else 0
        if first_bytes + ring > left:
            raise BudgetTooSmallError(
                tier, budget_bytes, least_parts(fixed, *least_of_experts(model, options))
            )
        chosen = set(first)
        rest = [number for number in order.tolist() if number not in chosen]
        taken = first + take_fitting(rest, sizes, left - ring - first_bytes)
    return PlacementPlan(
        model=model.routed,
        tier=tier,
        budget_bytes=budget_bytes,
        fixed=fixed,
        ring_bytes=ring,
        expert_bytes=model.expert_bytes,
        resident=_by_layer(taken, model),
        pinned_layers=tuple(pinned),
        layer_weights=weights,
    )


def least_budget(model: ModelSizes, fixed: FixedPart, options: PlanOptions) -> int:
    """The smallest budget in bytes that `plan_placement` accepts."""
    return fixed.total + sum(least_of_experts(model, options))


def least_parts(fixed: FixedPart, ring: int, first: int, what: str = "experts") -> dict[str, int]:
    """The bytes of the smallest budget, by name for people. first: of `what` must be resident."""
    names = {
        "weights": "weights of every token",
        "caches": f"caches of {fixed.ctx_size} tokens",
        "prompt_cache": PROMPT_CACHE,
    }
    parts = {names.get(name, name): num_bytes for name, num_bytes in fixed.parts.items()}
    return parts | {"ring": ring, f"{what} that must be resident": first}


def fast_ring(model: ModelSizes) -> int:
    """Bytes of a ring that are worth more than as many bytes of resident experts, and than longer steps.

    It has places for a token's experts, and for those with which the GPU shares out short prompts' itself.
    Where these would be beyond _GOOD_RING_BYTES, it has none of them.
    """
    places = math.ceil(SHARE_WITH_PLACES * model.num_experts) * max(model.expert_bytes)
    least = _smallest_ring(model)
    wanted = least + places
    return wanted if wanted <= _GOOD_RING_BYTES else max(least, _FAST_RING_BYTES)


def least_of_experts(model: ModelSizes, options: PlanOptions) -> tuple[int, int]:
    """Bytes of the smallest ring and of the experts that must be resident, or of all experts if less."""
    order = np.arange(model.num_layers * model.num_experts)
    pinned = layers_to_pin(model.num_layers, options.num_pinned_layers)
    layers = [number // model.num_experts for number in _first(order, pinned, options, model)]
    first = sum(model.expert_bytes[layer] for layer in layers)
    ring = _smallest_ring(model) if options.has_ring else 0
    return (ring, first) if ring + first < model.all_expert_bytes else (0, model.all_expert_bytes)


def _first(order: Array, pinned: Sequence[int], options: PlanOptions, model: ModelSizes) -> list[int]:
    """The experts of `order` that must be resident.

    They are the experts of pinned layers, and the best ones of each other layer and of each other size.
    """
    first = []
    for layer in range(model.num_layers):
        count = model.num_experts if layer in pinned else min(options.min_per_layer, model.num_experts)
        own = order[order // model.num_experts == layer]
        first += own[:count].tolist()
    if options.min_per_size:
        sizes = np.repeat(np.asarray(model.expert_bytes, np.int64), model.num_experts)
        is_free = ~np.isin(order // model.num_experts, pinned)
        for size in sorted(set(model.expert_bytes)):
            own = order[is_free & (sizes[order] == size)]
            first += own[: options.min_per_size].tolist()
    return list(dict.fromkeys(first))


def _smallest_ring(model: ModelSizes) -> int:
    """Bytes for one token's experts of a layer, and for the next layer's, which arrive meanwhile."""
    return RING_LAYERS * model.num_experts_per_tok * max(model.expert_bytes)


def _ring_bytes(model: ModelSizes, left: int) -> int:
    """Bytes of the ring: two layers, but at most an eighth of `left`.

    It is raised to `fast_ring` as far as `left` allows, to _GOOD_RING_BYTES as far as half of it does, and is
    at least `_smallest_ring`.
    """
    largest = RING_LAYERS * model.num_experts * max(model.expert_bytes)
    good = max(min(fast_ring(model), left), min(_GOOD_RING_BYTES, left // 2))
    return min(largest, max(_smallest_ring(model), good, left // _RING_SHARE))


def _by_layer(numbers: Sequence[int], model: ModelSizes) -> tuple[tuple[int, ...], ...]:
    ids: list[list[int]] = [[] for _ in range(model.num_layers)]
    for number in sorted(numbers):
        layer, expert = divmod(number, model.num_experts)
        ids[layer].append(expert)
    return tuple(map(tuple, ids))
