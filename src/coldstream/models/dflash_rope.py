"""The rotary embedding of a DFlash drafter, plain or stretched by YaRN.

By YaRN (arXiv 2309.00071) a frequency that turns more than `beta_fast` times within the original context is
kept, one that turns less than `beta_slow` times is divided by the factor, and those between are blended
linearly in the frequency. Cosines and sines of queries and keys alike are scaled by the magnitude; the scale
of attention stays 1/√head_dim.
"""

from dataclasses import dataclass
from math import ceil, floor, log, tau

import numpy as np
from numpy.typing import NDArray


def yarn_magnitude(factor: float) -> float:
    """The scale of cosines and sines where a file names no other."""
    return 0.1 * log(factor) + 1.0


@dataclass(frozen=True)
class Yarn:
    """How a rotary embedding is stretched."""

    factor: float  # at least 1
    original_context: int  # positions
    magnitude: float  # of cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DflashRope:
    """The rotary embedding of all layers, over all of a head, its halves rotated against each other."""

    theta: float
    yarn: Yarn | None = None

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position, [head_dim / 2]."""
        plain = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        yarn = self.yarn
        if yarn is None:
            return plain

        def dimension(turns: float) -> float:
            """The dimension, not rounded, that turns so often within the original context."""
            return head_dim * log(yarn.original_context / (turns * tau)) / (2 * log(self.theta))

        low = max(floor(dimension(yarn.beta_fast)), 0)
        high = min(ceil(dimension(yarn.beta_slow)), head_dim - 1)
        # Transformers' own guard against a ramp of no width.
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
        return plain * (1.0 - ramp) + plain / yarn.factor * ramp

    def cos_sin(
        self, positions: NDArray[np.integer], head_dim: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, times the magnitude, of positions [n]: both [n, head_dim / 2]."""
        angles = positions[:, None].astype(np.float64) * self.inverse_frequencies(head_dim)
        magnitude = 1.0 if self.yarn is None else self.yarn.magnitude
        return (magnitude * np.cos(angles)).astype(np.float32), (magnitude * np.sin(angles)).astype(
            np.float32
        )
