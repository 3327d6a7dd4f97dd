"""The counts of several engines as those of one. Pure, and used without Ray."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from coldstream.engine.engine_statistics import EngineStatistics, LiveState


def total_statistics(each: Sequence[EngineStatistics]) -> EngineStatistics:
    """The sums of all counts. What an engine does not count (None) counts as nothing beside one that does."""
    statistics = _total(each)
    assert isinstance(statistics, EngineStatistics)
    return statistics


def total_live(each: Sequence[LiveState]) -> LiveState:
    """The sums of all counts, and the experts of the first engine that notes their uses: places of experts
    have no sum.
    """
    maps = [live.experts for live in each if live.experts is not None]
    return LiveState(total_statistics([live.statistics for live in each]), maps[0] if maps else None)


def _total(values: Sequence[Any]) -> Any:
    """The sum of numbers; of dataclasses and tuples by their places; the first of other values."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        sums = {each.name: _total([getattr(value, each.name) for value in values]) for each in fields(first)}
        return type(first)(**sums)
    if isinstance(first, tuple):
        return tuple(_total(places) for places in zip(*values, strict=True))
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    return first
