"""Counts and times of the experts that a GPU does not hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from coldstream.experts.prefetch_statistics import PrefetchStatistics
from coldstream.experts.slots.cache import Counters
from coldstream.experts.step_times import StepTimes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GpuExpertStatistics:
    """Since the model was opened, by layer that may miss an expert.

    hits, misses: uses by decoded tokens; whole_steps: decoding steps that missed no expert of the layer;
    copies, copied_bytes, evictions: of slots. cpu_pairs: (token, expert) pairs that the CPU computed for
    cpu_requests, in cpu_s seconds, beside the GPU. prompt_streamed: experts of long prompts copied over the
    bus; prompt_unused: those of them that no token chose, copied before their router had run; prompt_on_cpu:
    those that the CPU computed. step_times: of decoded tokens. prefetch: None if nothing is prefetched.
    """

    num_slots: int
    num_experts: int
    hits: tuple[int, ...]
    misses: tuple[int, ...]
    whole_steps: tuple[int, ...]
    copies: tuple[int, ...]
    copied_bytes: tuple[int, ...]
    evictions: tuple[int, ...]
    cpu_requests: tuple[int, ...]
    cpu_pairs: tuple[int, ...]
    cpu_s: tuple[float, ...]
    prompt_streamed: tuple[int, ...]
    prompt_unused: tuple[int, ...]
    prompt_on_cpu: tuple[int, ...]
    step_times: StepTimes
    prefetch: PrefetchStatistics | None = None

    @classmethod
    def of(
        cls,
        num_slots: int,
        num_experts: int,
        counters: Counters,
        cpu_work: Sequence[tuple[int, int, float]],
        prompt_streamed: Array,
        prompt_unused: Array,
        prompt_on_cpu: Array,
        step_times: StepTimes,
        prefetch: PrefetchStatistics | None = None,
    ) -> Self:
        """cpu_work: (requests, pairs, seconds) by layer; the arrays: int64 [layers]."""
        return cls(
            num_slots=num_slots,
            num_experts=num_experts,
            hits=_plain(counters.hits),
            misses=_plain(counters.misses),
            whole_steps=_plain(counters.whole_steps),
            copies=_plain(counters.copies),
            copied_bytes=_plain(counters.copied_bytes),
            evictions=_plain(counters.evictions),
            cpu_requests=tuple(requests for requests, _, _ in cpu_work),
            cpu_pairs=tuple(pairs for _, pairs, _ in cpu_work),
            cpu_s=tuple(seconds for _, _, seconds in cpu_work),
            prompt_streamed=_plain(prompt_streamed),
            prompt_unused=_plain(prompt_unused),
            prompt_on_cpu=_plain(prompt_on_cpu),
            step_times=step_times,
            prefetch=prefetch,
        )

    @property
    def hit_rate(self) -> float:
        """Over all layers; 0 before the first decoded token."""
        return sum(self.hits) / max(1, sum(self.hits) + sum(self.misses))


def _plain(counts: Array) -> tuple[int, ...]:
    return tuple(int(count) for count in counts)
