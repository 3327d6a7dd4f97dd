"""Statistics of experts that a GPU does not hold."""

import json
from dataclasses import asdict

import numpy as np

from coldstream.cli.bench import describe_gpu, describe_times
from coldstream.experts.gpu_statistics import (
    GpuExpertStatistics,
    MissShareStatistics,
    StepTimes,
    describe_shares,
)
from coldstream.experts.slots.cache import Counters

# Two layers, in milliseconds: the second one read a pair over the bus.
SUMS = np.zeros((2, 2, 6), np.uint64)
SUMS[0, 0] = [1, *(ms * 10**6 for ms in (100, 101, 103, 103, 104))]
SUMS[1, 1] = [1, *(ms * 10**6 for ms in (109, 110, 114, 119, 120))]
TIMES = StepTimes.of(SUMS, np.array([0, 1], np.uint64))
NO_TIMES = StepTimes.of(np.zeros((2, 2, 6), np.uint64), np.zeros(2, np.uint64))


def statistics() -> GpuExpertStatistics:
    counters = Counters(2)
    counters.hits[:] = (6, 1)
    counters.misses[:] = (2, 1)
    counters.whole_steps[:] = (5, 4)
    counters.copies[:] = (9, 4)
    counters.evictions[:] = (3, 2)
    counters.copied_bytes[:] = (10**9, 5 * 10**8)
    work = [(3, 5, 0.5), (0, 0, 0.0)]
    prompts = np.array([7, 8]), np.array([3, 2]), np.array([1, 0])
    ahead = [(9, 4, 5), (0, 0, 0)]
    return GpuExpertStatistics.of(4, 512, counters, work, ahead, *prompts, TIMES)


def test_everything_is_plain_values_by_layer() -> None:
    values = json.loads(json.dumps(asdict(statistics())))
    assert values["hits"] == [6, 1]
    assert (values["copies"], values["evictions"]) == ([9, 4], [3, 2])
    assert values["copied_bytes"] == [10**9, 5 * 10**8]
    assert (values["cpu_requests"], values["cpu_pairs"], values["cpu_s"]) == ([3, 0], [5, 0], [0.5, 0.0])
    assert (values["cpu_expected"], values["cpu_right"], values["cpu_asked"]) == ([9, 0], [4, 0], [5, 0])
    assert values["whole_steps"] == [5, 4]
    assert values["prompt_streamed"] == [7, 8]
    assert values["prompt_unused"] == [3, 2]
    assert values["prompt_on_cpu"] == [1, 0]
    assert values["step_times"]["wait"] == [0.0, 0.005]
    assert values["step_times"]["bus_pairs"] == [0, 1]
    assert statistics().hit_rate == 0.7


def test_without_a_decoded_token_nothing_was_hit() -> None:
    empty = GpuExpertStatistics.of(
        0, 512, Counters(2), [], [], *(np.zeros(2, np.int64) for _ in range(3)), NO_TIMES
    )
    assert empty.hit_rate == 0
    assert empty.cpu_requests == ()


def test_shares_are_described_in_a_line() -> None:
    line = describe_shares(MissShareStatistics(12, 1.5, 0.25, (1, 1, 2), 6))
    assert "misses 1, 1, 2 come over the bus now, and 6 CPU threads compute the others: in 12 updates" in line
    assert "took the CPU 1.50 times as long as planned and the bus 0.25 times" in line


def test_one_line_says_it_all() -> None:
    line = describe_gpu(statistics())
    assert line.startswith("4 of 512 experts fit into the GPU's memory; 70% of their uses")
    assert "1.50 GB were copied, the CPU computed 5 in 0.50 s" in line


def test_one_line_says_where_the_time_went() -> None:
    assert describe_times(TIMES) == (
        "a token's layers take 20.00 ms on the GPU: other 25%, router 10%, resident 10%, bus 20%, wait 25%, "
        "combine 10%"
    )
