"""HitCurve: the hit rate in fast memory as a function of the share of experts that fits. Pure.

PUBLISHED is LRU over 256 tokens of Qwen3-30B-A3B in Q4_K_M (https://github.com/kekzl/imp/pull/1374), which
has 128 experts a layer: 36.6, 74.1, 89.4 and 96.2 % at 6, 19, 38 and 68 %. A trace of the model at hand is
better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coldstream.placement.policies import DecayedFrequency, simulate
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.sizes import NOVELTY

Array = np.ndarray[Any, Any]

_MOST_TOGETHER, _LEAST_TOGETHER = 512, 16  # tokens of a stretch
_LEAST_STRETCHES: Final = 4
_HALVINGS: Final = 30
_MAX_STEPS: Final = 2000  # of a trace that are replayed; a hundred settle the policy
_SHARES: Final = (0.03, 0.06, 0.12, 0.19, 0.25, 0.38, 0.5, 0.75)


@dataclass(frozen=True)
class HitCurve:
    """Points (share of experts, hit rate) between (0, 0) and (1, 1), joined by straight lines."""

    shares: tuple[float, ...]
    hit_rates: tuple[float, ...]
    source: str  # for people

    def __post_init__(self) -> None:
        for values in (self.shares, self.hit_rates):
            if list(values) != sorted(values) or (values[0], values[-1]) != (0.0, 1.0):
                raise ValueError(f"a hit curve rises from 0 to 1, not {values}")

    def at(self, share: float) -> float:
        """The hit rate where `share` of the experts fits."""
        return float(np.interp(share, self.shares, self.hit_rates))

    @classmethod
    def from_trace(cls, trace: RoutingTrace, weights: Array | None = None) -> "HitCurve":
        """Replays the end of a trace with this package's policy, which starts from the uses before it.

        weights as for `DecayedFrequency`. Takes seconds for a large model.
        """
        split = max(trace.num_steps - _MAX_STEPS, trace.num_steps // 2)
        model, end = trace.model, RoutingTrace(trace.model, trace.topk_ids[split:])
        profile = RoutingTrace(model, trace.topk_ids[:split]).counts() / split if split else None
        num_all = model.num_layers * model.num_experts
        rates = [
            simulate(end, DecayedFrequency(weights=weights), max(1, round(share * num_all)), profile).hit_rate
            for share in _SHARES
        ]
        rising = np.maximum.accumulate(rates).tolist()
        source = f"replay of the last {end.num_steps} tokens of a trace"
        return cls((0.0, *_SHARES, 1.0), (0.0, *rising, 1.0), source)


def novelty_of(trace: RoutingTrace) -> float:
    """The `ModelSizes.novelty` of a trace, by the experts that stretches of it touch.

    NOVELTY where it has too few tokens.
    """
    count = min(_MOST_TOGETHER, trace.num_steps // _LEAST_STRETCHES)
    if count < _LEAST_TOGETHER:
        return NOVELTY
    model, stretches = trace.model, range(0, trace.num_steps - count + 1, count)
    layers = np.arange(model.num_layers)[:, None] * model.num_experts
    touched = [np.unique(trace.topk_ids[start : start + count] + layers).size for start in stretches]
    odds = np.minimum(trace.counts() / trace.num_steps, 1.0 - 1e-12)
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        novelty = (least + most) / 2
        is_less = (1.0 - (1.0 - odds) ** count**novelty).sum() < np.mean(touched)
        least, most = (novelty, most) if is_less else (least, novelty)
    return most


PUBLISHED: Final = HitCurve(
    (0.0, 0.06, 0.19, 0.38, 0.68, 1.0),
    (0.0, 0.366, 0.741, 0.894, 0.962, 1.0),
    "published for Qwen3-30B-A3B, LRU",
)


def expected_hit_rates(curve: HitCurve, resident: Sequence[int], num_experts: int) -> tuple[float, ...]:
    """Hit rates by layer. resident: experts of each layer that fit; layers that are whole always hit."""
    partial = [count for count in resident if count < num_experts]
    rate = curve.at(sum(partial) / (len(partial) * num_experts)) if partial else 1.0
    return tuple(rate if count < num_experts else 1.0 for count in resident)
