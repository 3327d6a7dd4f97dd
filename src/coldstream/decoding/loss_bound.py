"""What drafts may lose beside plain steps, whatever a text is like.

An estimate of what drafts bring comes too late for a short text, and it may be wrong. So losses are counted
as they come, and bounded: by a share of the time so far, by a stake of a few plain steps, and by what drafts
gained lately. When nothing is left, steps are plain until something is earned again. Only the last draft can
lose more than was left.

The first step of a shape is a loss too where a device captures a graph for it. With missing experts it takes
as long as forty plain steps. So such a shape has a price, which is saved before it is paid.
"""

from math import ceil
from typing import Final

_SHARE: Final = 0.005  # of the time so far
_STAKE_STEPS: Final = 3.0
_MOST_STEPS: Final = 16.0  # what is saved at most
_STALL_STEPS: Final = 20.0  # a draft that loses more stood still for another reason, as for a disk


class LossBound:
    """Seconds that drafts may lose, of which a plain step takes `plain_s`.

    first_use_s: what the first step of a shape takes more than others.
    """

    def __init__(self, first_use_s: float = 0.0) -> None:
        self.first_use_s = first_use_s
        self._left_s: float | None = None  # None: nothing is known of plain steps

    def earn(self, num_steps: int, seconds: float, plain_s: float) -> None:
        """So many steps took so long together, with drafts or without."""
        if self._left_s is None:
            self._left_s = _STAKE_STEPS * plain_s
        self._keep(_SHARE * seconds, plain_s)

    def gained(self, gain_s: float, plain_s: float) -> None:
        """A draft brought so much, less than 0 if it lost. One that stood still counts as the stake."""
        has_stalled = gain_s < -_STALL_STEPS * plain_s - self.first_use_s
        self._keep(-_STAKE_STEPS * plain_s if has_stalled else gain_s, plain_s)

    def has_gained(self, plain_s: float) -> bool:
        """Whether as much as the stake was gained lately, and is there beside it."""
        return self.affords(2 * _STAKE_STEPS * plain_s)

    def affords(self, seconds: float) -> bool:
        """Whether so much may be lost."""
        return self._left_s is not None and self._left_s >= seconds

    def num_steps_until_any(self, plain_s: float, first_s: float = 0.0) -> int:
        """After how many more plain steps something may be lost beside `first_s`: 0 if it may."""
        return 0 if self._left_s is None else max(0, ceil((first_s - self._left_s) / (_SHARE * plain_s)))

    def _keep(self, seconds: float, plain_s: float) -> None:
        assert self._left_s is not None, "steps are earned before drafts gain"
        self._left_s = min(self._left_s + seconds, _MOST_STEPS * plain_s + self.first_use_s)
