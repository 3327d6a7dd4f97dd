"""How many nodes a drafter is asked for, before it is known how likely they are to be accepted.

A draft takes longer the more nodes it is to have, and what further nodes bring depends on the text. Both are
learned from the drafts before: the time by the nodes asked for, and by a number of nodes how much more a step
was worth whose size could be chosen among the first so many of them. A draft shorter than what was asked for
says that asking for more brings nothing.

Everything is a pure function of the calls so far. Times are seconds, and worth is counted in tokens.
"""

from collections.abc import Sequence
from typing import Final

from coldstream.decoding.row_times import MAX_ROWS, StepTimes

_FIRST: Final = 4  # nodes asked for before anything is known
_MORE: Final = 1  # than are best of those that any draft was asked for, as of others nothing is known
_WEIGHT: Final = 1 / 16  # of the newest draft
_LEAST_S: Final = 1e-9


class AskedNodes:
    """Learns from drafts how many nodes to ask for."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._gains: list[float] = []  # of the first node, the first two and so on
        self._num_asked = 1  # of the last draft

    @property
    def draft_s(self) -> float:
        """What drafts that are to have as many nodes as the last one take; 0 before that is known."""
        return self._seconds(self._num_asked)

    def record(self, draft_s: float, worths: Sequence[float]) -> None:
        """A draft took so long.

        worths: by number of nodes, of 0 first and of those asked for last, at least 1: what a step is worth
        beside its time that has the best size up to it. None is less than the one before.
        """
        self._num_asked = len(worths) - 1
        self._times.record(min(self._num_asked, MAX_ROWS), max(_LEAST_S, draft_s))
        for each, worth in enumerate(worths[1:]):
            gain = worth - worths[0]
            if each < len(self._gains):
                self._gains[each] += _WEIGHT * (gain - self._gains[each])
            else:
                self._gains.append(gain)

    def best(self, most: int, tokens_s: float) -> int:
        """How many to ask for, at most `most`, where a second is worth so many tokens."""
        if not self._times.has_any:
            return min(most, _FIRST)
        worths = [
            gain - tokens_s * self._seconds(1 + each)
            for each, gain in enumerate(self._gains[: min(most, MAX_ROWS)])
        ]
        return min(most, 1 + worths.index(max(worths)) + _MORE)

    def _seconds(self, num_asked: int) -> float:
        return self._times.seconds(min(num_asked, MAX_ROWS)) or 0.0
