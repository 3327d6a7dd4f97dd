"""Policies and traces for tests of the cache."""

from collections.abc import Callable

import numpy as np
from fake_device import Caller

from coldstream.experts import ExpertCache
from coldstream.placement.policies import (
    DecayedFrequency,
    Lfu,
    Lru,
    Policy,
    Static,
)
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace
from random_residency import RandomResidency

POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "static": Static,
    "random": lambda: RandomResidency(1),
    "ours": DecayedFrequency,
    "ours, 2 copies": lambda: DecayedFrequency(2),
}


def eager() -> DecayedFrequency:
    """A policy that admits every used expert."""
    return DecayedFrequency(decay=1 - 1e-9, recency_weight=0.0, hysteresis=1e-9, payback=-1e9)


def drifting(seed: int, num_layers: int, num_experts: int, num_per_tok: int, num_steps: int) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    likes = rng.normal(size=(num_layers, num_experts)) * 1.5
    topk_ids = np.empty((num_steps, num_layers, num_per_tok), np.uint16)
    for step in range(num_steps):
        likes += rng.normal(size=likes.shape) * 0.3
        order = np.argsort(likes + rng.gumbel(size=likes.shape), axis=1)
        topk_ids[step] = order[:, -num_per_tok:]
    return RoutingTrace(RoutedModel("0" * 32, num_layers, num_experts, num_per_tok), topk_ids)


def settle(caller: Caller, num_steps: int = 4) -> None:
    """Carries out all decisions so far, in steps that use nothing."""
    for _ in range(num_steps):
        caller.step([], trains=False)


def hit_rate(cache: ExpertCache) -> float:
    """Hit rate over all layers."""
    hits, misses = cache.counters.hits.sum(), cache.counters.misses.sum()
    return float(hits / (hits + misses))
