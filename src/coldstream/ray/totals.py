"""The counts of several engines as those of one. Pure, and used without Ray."""

from collections.abc import Sequence

from coldstream.engine.engine_statistics import LiveState, total_statistics


def total_live(each: Sequence[LiveState]) -> LiveState:
    """The sums of all counts, and the experts of the first engine that notes their uses: places of experts
    have no sum.
    """
    maps = [live.experts for live in each if live.experts is not None]
    return LiveState(total_statistics([live.statistics for live in each]), maps[0] if maps else None)
