"""How long drafts that do not pay are left alone.

Observing tokens costs a drafter time, and a fused step without a draft takes longer than a plain step.
"""

from typing import Final

# Steps before a draft from which on a drafter observes tokens. With 64 rows of 2,600 the demo model's block
# gives 3.24 tokens a step, with all of them 3.42.
OBSERVED_STEPS: Final = 64
AWAKE_STEPS: Final = 512  # of WAKE_DISTANCE steps in which drafts do not pay
WAKE_DISTANCE: Final = 4096


class Backoff:
    """Once drafts have not gained for AWAKE_STEPS steps, they are tried in so many of WAKE_DISTANCE only."""

    def __init__(self) -> None:
        self._num_lost = 0  # steps since drafts gained

    @property
    def num_steps(self) -> int:
        """How many steps, the next one first, drafts are left alone; 0 while they may be tried."""
        is_at = self._num_lost % WAKE_DISTANCE
        return WAKE_DISTANCE - is_at if is_at >= AWAKE_STEPS else 0

    def went_by(self, num_steps: int, *, has_gained: bool) -> None:
        """So many steps went by. has_gained: whether drafts pay in the mean."""
        self._num_lost = 0 if has_gained else self._num_lost + num_steps
