"""The best of several runs: three that are alike, or as many as there is time for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.kernels import best_runs
from coldstream.kernels.best_runs import ALIKE, FEWEST_RUNS, are_alike, best_seconds

RATES = st.lists(st.floats(1e-3, 1e12), max_size=9)


class Clock:
    """Time that each run takes of a list, of which the last lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, self.num_runs, self._seconds = 0.0, 0, seconds
        monkeypatch.setattr(best_runs.time, "perf_counter", lambda: self.now)

    def run(self) -> None:
        self.now += self._seconds[min(self.num_runs, len(self._seconds) - 1)]
        self.num_runs += 1


@given(RATES)
def test_rates_are_alike_when_three_are_near_the_best(rates: list[float]) -> None:
    near = [rate for rate in rates if rate >= ALIKE * max(rates)]
    assert are_alike(rates) == (len(near) >= FEWEST_RUNS)


@pytest.mark.parametrize(
    ("seconds", "num_runs", "found"),
    [
        pytest.param((9, 1, 1, 1), 4, 1, id="quiet"),
        pytest.param((1, 1, 1, 0.5), 3, 1, id="quiet, without caches to fill"),
        pytest.param((5, 3, 3.1, 2, 2, 1, 1, 1), 8, 1, id="disturbed, then three that are alike"),
        pytest.param((9, 5, 5, 5, 1), 4, 5, id="disturbed alike, which nothing shows"),
        pytest.param((9, 8, 4, 3, 2, 1), 5, 2, id="no time for more"),
        pytest.param((80, 90, 40, 20), 3, 40, id="three runs in any case"),
    ],
)
def test_runs_go_on_until_three_are_alike(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], num_runs: int, found: float
) -> None:
    """The first run, which fills caches, takes nothing of the time that there is."""
    clock = Clock(monkeypatch, *seconds)
    assert best_seconds(clock.run, 0.0, 16) == pytest.approx(found)
    assert clock.num_runs == num_runs


def test_runs_that_are_short_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.25)
    assert best_seconds(clock.run, 2.0, 20.0) == 0.25
    assert clock.num_runs == 1 + 8
