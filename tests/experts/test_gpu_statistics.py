"""What is shown of experts that a GPU does not hold."""

import json
from dataclasses import asdict

import numpy as np

from coldstream.cli.bench import describe_gpu
from coldstream.experts.cache import Counters
from coldstream.experts.gpu_statistics import GpuExpertStatistics


def statistics() -> GpuExpertStatistics:
    counters = Counters(2)
    counters.hits[:] = (6, 1)
    counters.misses[:] = (2, 1)
    counters.copied_bytes[:] = (10**9, 5 * 10**8)
    work = [(3, 5, 0.5), (0, 0, 0.0)]
    return GpuExpertStatistics.of(4, 512, counters, work, np.array([7, 8]), np.array([1, 0]))


def test_everything_is_plain_values_by_layer() -> None:
    values = json.loads(json.dumps(asdict(statistics())))
    assert values["hits"] == [6, 1]
    assert values["cpu_pairs"] == [5, 0]
    assert values["prompt_streamed"] == [7, 8]
    assert statistics().hit_rate == 0.7


def test_without_a_decoded_token_nothing_was_hit() -> None:
    empty = GpuExpertStatistics.of(0, 512, Counters(2), [], np.zeros(2, np.int64), np.zeros(2, np.int64))
    assert empty.hit_rate == 0
    assert empty.cpu_requests == ()


def test_one_line_says_it_all() -> None:
    line = describe_gpu(statistics())
    assert line.startswith("4 of 512 experts fit into the GPU's memory; 70% of their uses")
    assert "1.50 GB were copied, the CPU computed 5 in 0.50 s" in line
