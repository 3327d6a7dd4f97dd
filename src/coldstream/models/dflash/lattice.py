"""What a draft of a DFlash drafter says: candidates of every position behind the anchor."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DraftLattice:
    """K candidates of each of L positions, and how likely they are.

    token_ids: int64 [L, K], the likeliest first by the target's head alone.

    log_probs: float64. [L, K] if a position does not depend on the token before it: over the whole
    vocabulary. [L, K, K] if it does: log_probs[d, a, b] of candidate b after candidate a of the position
    before, over the candidates; at the first position a has no meaning, since the anchor is before it.
    """

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    @property
    def is_conditional(self) -> bool:
        return self.log_probs.ndim == 3

    @property
    def is_finite(self) -> bool:
        """Whether every position has a likeliest candidate, and none is not a number.

        −infinity is a candidate that the head excludes.
        """
        return bool(np.isfinite(self.log_probs.max(axis=-1)).all())  # of a row with NaN, that is NaN
