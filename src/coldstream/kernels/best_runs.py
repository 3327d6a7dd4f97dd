"""The best of several measurements. There are more where they differ: other programs may have slowed all."""

import time
from collections.abc import Callable, Sequence
from typing import Final

FEWEST_RUNS: Final = 3
ALIKE: Final = 0.97  # of the best rate


def are_alike(rates: Sequence[float]) -> bool:
    """Whether three measurements found about the best rate: nothing disturbs them."""
    best = sorted(rates)[-FEWEST_RUNS:]
    return len(best) == FEWEST_RUNS and best[0] >= ALIKE * best[-1]


def best_seconds(run: Callable[[], object], least_s: float, most_s: float) -> float:
    """The shortest time of `run`.

    There are three runs or more: until those behind the first have taken `least_s` and the best are alike, or
    taken `most_s`. The first one fills caches, so it is one of the best only where there are none to fill.
    """
    times: list[float] = []
    while len(times) < FEWEST_RUNS or sum(times[1:]) < most_s:
        if sum(times[1:]) >= least_s and are_alike([1 / each for each in times]):
            break
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
