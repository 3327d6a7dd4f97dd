"""How a rotary embedding is stretched beyond the context of training: linearly, or by YaRN.

By YaRN (arXiv 2309.00071) a frequency that turns more than `beta_fast` times within the original context is
kept, one that turns less than `beta_slow` times is divided by the factor, and those between are blended
linearly. Cosines and sines of queries and keys alike are scaled by a magnitude; the scale of attention stays
1/√head_dim. All is computed in float64, once a model.
"""

from dataclasses import dataclass
from math import ceil, floor, log, tau

from coldstream.kernels.ops import RopeScaling, RopeSpec


def yarn_magnitude(factor: float) -> float:
    """The scale of cosines and sines where a file names no other; 1 for a factor of at most 1."""
    return 0.1 * log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Yarn:
    """What YaRN depends on beside the plain rotary embedding."""

    factor: float
    original_context: int  # positions
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the first and the last dimension that are blended are whole numbers

    def frequency_factors(self, rope: RopeSpec) -> tuple[float, ...]:
        """By what frequencies of a plain `rope`, whose theta is above 1, are multiplied [num_dims / 2]."""
        low, high = self._dimension(self.beta_fast, rope), self._dimension(self.beta_slow, rope)
        if self.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, rope.num_dims - 1)
        width = max(high - low, 0.001)  # of a ramp without one, as others have it
        divided = (min(max((i - low) / width, 0.0), 1.0) for i in range(rope.num_dims // 2))
        return tuple(1.0 - share + share / self.factor for share in divided)

    def _dimension(self, turns: float, rope: RopeSpec) -> float:
        """The dimension, not rounded, that turns so often within the original context."""
        return rope.num_dims * log(self.original_context / (turns * tau)) / (2 * log(rope.theta))


def linear(rope: RopeSpec, factor: float, magnitude: float = 1.0) -> RopeScaling | None:
    """All frequencies of `rope` divided by `factor`; None if nothing is scaled."""
    if factor == magnitude == 1:
        return None
    return RopeScaling((1.0 / factor,) * (rope.num_dims // 2), magnitude)
