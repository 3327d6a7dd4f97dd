"""A number of threads that is about the best one of a simulated machine, also while others take its cores."""

import itertools
import math
import random
from collections.abc import Callable
from statistics import median

import pytest

from coldstream.experts.cpu_threads import CpuThreads
from coldstream.placement.control import Work

MOST = 15
UPDATES = 100 // 4  # of four tokens
BUS = Work(100, 100 * 40e-6)

Seconds = Callable[[int], float]  # of an expert on the CPU, by its threads


def machine(free: int, enough: int = 10) -> Seconds:
    """So many free cores, of which `enough` read as fast as memory gives. The other threads share cores."""

    def seconds(count: int) -> float:
        shared = max(0, count - free)
        return (150e-6 / min(count, enough)) * (1 + bool(shared) * (0.5 + 1.5 * shared / count))

    return seconds


def together(seconds: float, bus: float = 40e-6) -> float:
    """Of a missing expert, if both places are at work all the time."""
    return 1 / (1 / seconds + 1 / bus)


def best(seconds: Seconds) -> float:
    return min(together(seconds(count)) for count in range(1, MOST + 1))


class Steps:
    """Updates of steps with about 100 experts on the CPU. Noise, and now and then one that is held up."""

    def __init__(self, seed: int, noise: float) -> None:
        self._generator, self._noise = random.Random(seed), noise

    def run(self, threads: CpuThreads, seconds: Seconds, updates: int) -> list[float]:
        """Seconds of a missing expert in each update."""
        found = []
        for _ in range(updates):
            true = seconds(threads.count)
            found.append(together(true))
            units = self._generator.randint(60, 140)
            seen = units * true * math.exp(self._generator.gauss(0, self._noise))
            if self._generator.random() < 0.02:
                seen *= 20
            threads.learn(Work(units, seen), BUS)
        return found


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_threads_that_others_keep_waiting_are_given_up_and_taken_again(noise: float) -> None:
    """Within a hundred tokens, of most of many runs, as tries depend on luck."""
    ratios: list[list[float]] = [[], [], []]
    for seed in range(20):
        threads, steps = CpuThreads(MOST), Steps(seed, noise)
        for ratio, free in zip(ratios, (16, 8, 16), strict=True):
            steps.run(threads, machine(free), UPDATES)
            later = steps.run(threads, machine(free), 2 * UPDATES)
            ratio.append(sum(later) / len(later) / best(machine(free)))
    assert all(median(ratio) <= 1.1 for ratio in ratios)
    assert max(map(max, ratios)) <= 1.35, "and no run is lost"


def test_all_threads_stay_where_none_has_to_wait() -> None:
    threads = CpuThreads(MOST)
    found = Steps(1, 0.02).run(threads, machine(16, enough=16), 300)
    assert sum(found) / len(found) <= 1.05 * best(machine(16, enough=16))


@pytest.mark.parametrize("most", [1, 2, 3, 15, 64])
def test_no_input_makes_a_number_that_is_none(most: int) -> None:
    threads = CpuThreads(most)
    assert threads.count == most
    absurd = (math.nan, math.inf, -1.0, 0.0, 5e-324, 1e308, 1.0)
    for values in itertools.product(absurd, repeat=4):
        threads.learn(Work(*values[:2]), Work(*values[2:]))
        assert 1 <= threads.count <= most
