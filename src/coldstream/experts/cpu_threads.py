"""How many threads of the CPU compute the experts that a token misses. Pure.

All of a plan's threads are the beginning. A program that takes cores makes waiting for all of them expensive:
the thread that shares its core ends last. Then fewer are faster, until the program has ended.
"""

from typing import Final

from coldstream.placement.control import Climb, Work

EIGHTHS: Final = range(2, 9)  # of a plan's threads: the numbers that are tried


class CpuThreads:
    """The number that computes a missing expert in the least time.

    That is the time in which CPU and bus together do one, if both are at work all the time. So it counts too
    what the threads take from the bus, and does not depend on how the experts are divided.
    """

    def __init__(self, most: int) -> None:
        """most: threads of the plan."""
        settings = sorted({max(1, round(most * eighths / 8)) for eighths in EIGHTHS})
        self._climb = Climb(settings, most)
        self._bus_per_s = 0.0  # experts, in the last update in which there were any

    @property
    def count(self) -> int:
        """For the next steps."""
        return self._climb.setting

    @property
    def is_trying(self) -> bool:
        """Whether this number is tried beside the best one so far."""
        return self._climb.setting != self._climb.best

    def learn(self, cpu: Work, bus: Work) -> None:
        """Takes note of what both places did in an update, in experts."""
        if bus.is_usable:
            self._bus_per_s = bus.units / bus.seconds
        if cpu.is_usable:
            self._climb.learn(cpu.seconds / (cpu.units + self._bus_per_s * cpu.seconds))
