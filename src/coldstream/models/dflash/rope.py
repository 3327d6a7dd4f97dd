"""The rotary embedding of a DFlash drafter, plain or stretched (`kernels/rope/scaling.py`)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.rope.scaling import Yarn


@dataclass(frozen=True)
class DflashRope:
    """The rotary embedding of all layers, over all of a head, its halves rotated against each other."""

    theta: float
    yarn: Yarn | None = None
    magnitude: float = 1.0  # of cosines and sines
    divisor: float = 1.0  # of all frequencies

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position, [head_dim / 2]."""
        plain: NDArray[np.float64] = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.yarn is None:
            return plain / self.divisor
        factors: NDArray[np.float64] = np.array(self.yarn.frequency_factors(RopeSpec(head_dim, self.theta)))
        return plain * factors

    def cos_sin(
        self, positions: NDArray[np.integer], head_dim: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, times the magnitude, of positions [n]: both [n, head_dim / 2]."""
        angles = positions[:, None].astype(np.float64) * self.inverse_frequencies(head_dim)
        cos, sin = self.magnitude * np.cos(angles), self.magnitude * np.sin(angles)
        return cos.astype(np.float32), sin.astype(np.float32)
