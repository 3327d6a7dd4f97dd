"""How much more than by its average time the bus is spared, by what missing experts took altogether. Pure.

A division by average times takes two experts over the bus for twice as long as one. But copies into slots and
the CPU take of the same bus and memory, so that a second one may take longer. Divisions that give the bus a
little more or less than the averages say are tried, and the one with which experts take the least is kept.
"""

from typing import Final

from coldstream.placement.control import Climb

STEP: Final = 1.25  # times the average, from one tilt to the next
TILTS: Final = range(-2, 3)
SETTLING: Final = 6  # updates in which averages settle


class BusTilt:
    """Begins without a tilt."""

    def __init__(self) -> None:
        self._climb, self._num_updates = Climb(TILTS, 0), 0

    @property
    def factor(self) -> float:
        """Of the bus's time, for the next steps."""
        return float(STEP**self._climb.setting)

    @property
    def is_trying(self) -> bool:
        """Whether this tilt is tried beside the best one so far."""
        return self._climb.setting != self._climb.best

    def learn(self, seconds: float) -> None:
        """Takes note of what a missing expert took in an update on average, on CPU and bus together."""
        self._num_updates += 1
        if self._num_updates > SETTLING:
            self._climb.learn(seconds)
