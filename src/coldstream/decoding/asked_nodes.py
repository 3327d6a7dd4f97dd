"""How many nodes a drafter is asked for, before it is known how likely they are to be accepted.

A draft takes longer the more nodes it is to have, and what further nodes bring depends on the text. Both are
learned from the drafts before: the time by the nodes asked for, and by node how much more a step was worth
whose size could be chosen with it than without it. Of a draft shorter than what was asked for, the nodes that
it does not have brought nothing.

Everything is a pure function of the calls so far. Times are seconds, and worth is counted in tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from coldstream.decoding.row_times import MAX_ROWS, RowTimes

_FIRST: Final = 4  # nodes asked for before anything is known
_MORE_DISTANCE: Final = 2  # drafts from one to the next that is to have a node more than is best
_WEIGHT: Final = 1 / 16  # of the newest draft
_LEAST_S: Final = 1e-9


class AskedNodes:
    """Learns from drafts how many nodes to ask for."""

    def __init__(self) -> None:
        self._times = RowTimes()
        self._brought: list[float] = []  # by each node, beyond those before it
        self._num_asked = 1  # of the last draft
        self._num_drafts = 0

    @property
    def draft_s(self) -> float:
        """What drafts that are to have as many nodes as the last one take; 0 before that is known."""
        return self._seconds(self._num_asked)

    def record(self, draft_s: float, worths: Sequence[float]) -> None:
        """A draft took so long.

        worths: by number of nodes, of 0 first and of those asked for last, at least 1: what a step is worth
        beside its time that has the best size up to it. None is less than the one before.
        """
        self._num_drafts += 1
        self._num_asked = len(worths) - 1
        self._times.record(min(self._num_asked, MAX_ROWS), max(_LEAST_S, draft_s))
        for node, (before, worth) in enumerate(pairwise(worths)):
            if node < len(self._brought):
                self._brought[node] += _WEIGHT * (worth - before - self._brought[node])
            else:
                self._brought.append(worth - before)

    def best(self, most: int, tokens_s: float) -> int:
        """How many to ask for, at most `most`, where a second is worth so many tokens.

        Of every other draft one more than is best, and of all if none had that one: what nodes bring is seen
        only where they are asked for.
        """
        if not self._times.has_any:
            return min(most, _FIRST)
        gains = accumulate(self._brought[: min(most, MAX_ROWS)])
        worths = [gain - tokens_s * self._seconds(1 + node) for node, gain in enumerate(gains)]
        best = 1 + worths.index(max(worths))
        if best == len(self._brought) or self._num_drafts % _MORE_DISTANCE == 0:
            best += 1
        return min(most, best)

    def _seconds(self, num_asked: int) -> float:
        return self._times.seconds(min(num_asked, MAX_ROWS)) or 0.0
