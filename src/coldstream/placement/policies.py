"""Policies that choose the experts in fast memory, and their simulation over a trace. Pure.

The experts of all layers share one pool of slots, so an expert is a number, layer · num_experts + expert. The
unit of work is a step, one token through all layers. A use is a hit if the expert was resident when the step
began. After the step a policy may admit missed experts. Each gets a free slot, or replaces a resident expert
that the step did not use: a step's experts are the likeliest of the next step.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from coldstream.placement.routing_trace import RoutingTrace

Array = np.ndarray[Any, Any]

DECAY: Final = 0.99  # of frequency, per step
RECENCY_DECAY: Final = 0.5
RECENCY_WEIGHT: Final = 16.0  # of a use in the last step, in units of the frequency
HYSTERESIS: Final = 1.10  # times the weakest resident's score
PAYBACK: Final = 2.0  # least gain in expected uses for which a copy pays

# For copies that can be read only some steps after the miss: the next use may come before that.
LATE_RECENCY_DECAY: Final = 0.9
LATE_RECENCY_WEIGHT: Final = 8.0
LATE_PAYBACK: Final = 8.0

_NONE: Final = np.empty(0, np.int64)
_NOTHING: Final = 1e-100  # uses


@dataclass(frozen=True)
class Changes:
    """The changes after a step: int64 numbers of experts, each once. Evictions come first."""

    admitted: Array
    evicted: Array


class Policy(ABC):
    """Keeps a score for each expert. Missed experts of the highest scores replace residents of the lowest.

    Of equal scores the lower number is preferred. The same calls give the same changes. At most max_copies
    experts are admitted after a step; None: no limit.
    """

    scores: Array  # float64 [experts of all layers], set by `start`
    max_copies: int | None = None  # default for subclasses that set none

    def __init__(self, max_copies: int | None = None) -> None:
        self.max_copies = max_copies

    @abstractmethod
    def start(self, profile: Array) -> None:
        """Resets the state. profile: expected uses per step, float64 [experts of all layers]; 0: unknown."""

    @abstractmethod
    def observe(self, used: Array) -> None:
        """Updates `scores` with a step that used these experts, each once."""

    def pays(self, candidates: Array, victims: Array) -> Array:
        """bool [n]: which replacements to make, by the scores of both; −∞ for a free slot."""
        return candidates > victims

    def replaceable(self, resident: Array, used: Array) -> Array:
        """The residents that may be evicted."""
        mask = resident.copy()
        mask[used] = False
        return np.flatnonzero(mask)

    def step(self, used: Array, resident: Array, capacity: int) -> Changes:
        """The changes after a step that used the experts `used`, int64 [n], each once.

        resident: bool [experts of all layers], at most `capacity` of them True; it is not changed.
        """
        self.observe(used)
        missed = used[~resident[used]]
        if missed.size == 0 or self.max_copies == 0:
            return Changes(_NONE, _NONE)
        num_free = capacity - int(np.count_nonzero(resident))
        return self.choose(missed, self.replaceable(resident, used), num_free)

    def choose(self, candidates: Array, residents: Array, num_free: int) -> Changes:
        """The candidates that are worth a slot, best first, and the residents they replace, weakest first.

        candidates: int64, each once, none of them resident; residents: int64, those that may be evicted. The
        first num_free candidates get free slots.
        """
        values = self.scores[candidates]
        count = candidates.size if self.max_copies is None else min(candidates.size, self.max_copies)
        num_free = min(count, num_free)
        # Their numbers negated, so that of equally weak residents the highest goes first.
        of_residents = self.scores[residents]
        weakest = _first(of_residents, -residents, count - num_free)
        strongest = _first(-values, candidates, num_free + weakest.size)
        victims = np.concatenate([np.full(num_free, -np.inf), of_residents[weakest]])
        # Candidates descend and victims ascend in score, so those that pay are a prefix of both.
        num_paid = int(np.count_nonzero(self.pays(values[strongest], victims)))
        return Changes(candidates[strongest[:num_paid]], residents[weakest[: max(0, num_paid - num_free)]])


class Static(Policy):
    """Changes nothing."""

    def __init__(self) -> None:
        super().__init__(max_copies=0)

    def start(self, profile: Array) -> None:
        self.scores = profile.astype(np.float64)

    def observe(self, used: Array) -> None:
        """Learns nothing."""


class Lru(Policy):
    """Evicts the least recently used, and admits every miss."""

    def start(self, profile: Array) -> None:
        self.scores = profile - profile.max() - 1.0  # below any use, in order of frequency
        self._clock = 0

    def observe(self, used: Array) -> None:
        self.scores[used] = np.arange(self._clock, self._clock + used.size)
        self._clock += used.size


class Lfu(Policy):
    """Evicts the least often used since the start, and admits every miss."""

    def start(self, profile: Array) -> None:
        self.scores = profile / (profile.max() + 1.0)  # less than one use: only their order matters

    def observe(self, used: Array) -> None:
        self.scores[used] += 1.0

    def pays(self, candidates: Array, victims: Array) -> Array:
        return np.ones(candidates.size, bool)


class DecayedFrequency(Policy):
    """Frequency over about a hundred steps plus recency over about two, changed only where a copy pays.

    A score estimates the uses in the next 1 / (1 − decay) steps from past ones. weights: of a use, float64
    [experts of all layers], above 0; None: 1.
    """

    def __init__(
        self,
        max_copies: int | None = None,
        *,
        decay: float = DECAY,
        recency_decay: float = RECENCY_DECAY,
        recency_weight: float = RECENCY_WEIGHT,
        hysteresis: float = HYSTERESIS,
        payback: float = PAYBACK,
        weights: Array | None = None,
    ) -> None:
        super().__init__(max_copies)
        self._decay = decay
        self._recency_decay = recency_decay
        self._recency_weight = recency_weight
        self._hysteresis = hysteresis
        self._payback = payback
        self._weights = weights

    @classmethod
    def for_late_copies(cls, max_copies: int | None = None, *, weights: Array | None = None) -> Self:
        """For copies that can be read only some steps after the miss, as those of `ExpertCache`."""
        return cls(
            max_copies,
            recency_decay=LATE_RECENCY_DECAY,
            recency_weight=LATE_RECENCY_WEIGHT,
            payback=LATE_PAYBACK,
            weights=weights,
        )

    def start(self, profile: Array) -> None:
        self._frequency = profile / (1.0 - self._decay)
        self._recency = self._recency_weight * profile / (1.0 - self._recency_decay)
        self._num_steps = 0
        self.scores = np.empty_like(self._frequency)
        self._score()

    def observe(self, used: Array) -> None:
        self._frequency *= self._decay
        self._recency *= self._recency_decay
        self._num_steps += 1
        if self._num_steps % 256 == 0:
            # Scores that only decay would become subnormal, which multiply ten times slower.
            self._frequency[self._frequency < _NOTHING] = 0.0
            self._recency[self._recency < _NOTHING] = 0.0
        self._frequency[used] += 1.0
        self._recency[used] += self._recency_weight
        self._score()

    def pays(self, candidates: Array, victims: Array) -> Array:
        return (candidates > self._hysteresis * victims) & (candidates - victims >= self._payback)

    def _score(self) -> None:
        np.add(self._frequency, self._recency, out=self.scores)
        if self._weights is not None:
            self.scores *= self._weights


class Belady(Policy):
    """Knows the trace and keeps the experts that are used soonest: the most hits of any policy that admits
    only missed experts. A bound, not a policy, as it may evict an expert right after its use.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        super().__init__()
        used = numbers(trace)
        following = np.full(num_numbers(trace), np.inf)
        self._next_uses = np.empty(used.shape)
        for step in range(len(used) - 1, -1, -1):
            self._next_uses[step] = following[used[step]]
            following[used[step]] = step
        self._first_uses = following

    def start(self, profile: Array) -> None:
        self.scores = -self._first_uses
        self._steps = iter(self._next_uses)

    def observe(self, used: Array) -> None:
        self.scores[used] = -next(self._steps)

    def replaceable(self, resident: Array, used: Array) -> Array:
        return np.flatnonzero(resident)


@dataclass(frozen=True)
class Simulation:
    """Counts by layer, int64 [layers] each. hits + misses are all uses."""

    hits: Array
    misses: Array
    copies: Array
    evictions: Array

    @property
    def hit_rate(self) -> float:
        """Over all layers."""
        return float(self.hits.sum() / (self.hits.sum() + self.misses.sum()))


def simulate(trace: RoutingTrace, policy: Policy, capacity: int, profile: Array | None = None) -> Simulation:
    """`policy` over `trace` with `capacity` slots: at least one.

    profile: expected uses per step, [layers, experts], of which the greatest are resident at first; None:
    none is.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    size = num_numbers(trace)
    expected = np.zeros(size) if profile is None else profile.reshape(size).astype(np.float64)
    resident = np.zeros(size, bool)
    if profile is not None:
        resident[np.argsort(-expected, kind="stable")[:capacity]] = True
    policy.start(expected)
    hits, misses, copies, evictions = (np.zeros(size, np.int64) for _ in range(4))
    for used in numbers(trace):
        held = resident[used]
        hits[used[held]] += 1
        misses[used[~held]] += 1
        changes = policy.step(used, resident, capacity)
        resident[changes.evicted] = False
        resident[changes.admitted] = True
        evictions[changes.evicted] += 1
        copies[changes.admitted] += 1
    by_layer = [
        counts.reshape(trace.model.num_layers, -1).sum(axis=1) for counts in (hits, misses, copies, evictions)
    ]
    return Simulation(*by_layer)


def numbers(trace: RoutingTrace) -> Array:
    """The experts of each step by number, int64 [steps, ids of a step], in the order of layers and ranks."""
    model = trace.model
    first = np.arange(model.num_layers, dtype=np.int64)[:, None] * model.num_experts
    return (trace.topk_ids + first).reshape(trace.num_steps, model.ids_per_step)


def num_numbers(trace: RoutingTrace) -> int:
    """Experts of all layers."""
    return trace.model.num_layers * trace.model.num_experts


def _first(keys: Array, ties: Array, count: int) -> Array:
    """Indices of the `count` lowest keys, in order; equal ones by `ties`."""
    count = min(count, keys.size)
    if count == 0:
        return _NONE
    if count == keys.size:
        return np.lexsort((ties, keys))
    where: Array = (keys <= np.partition(keys, count - 1)[count - 1]).nonzero()[0]
    return where[np.lexsort((ties[where], keys[where]))[:count]]
