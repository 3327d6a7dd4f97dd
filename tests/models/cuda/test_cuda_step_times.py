"""Where the time of decoded tokens goes on a GPU that holds some of the experts."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence
from runner_cases import token_ids

from coldstream.assets import demo_model_path
from coldstream.experts.gpu_statistics import PARTS, StepTimes

pytestmark = pytest.mark.gpu

COUNT = 40


@pytest.fixture(params=[(0.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.9, 1.0)], ids=str)
def runner(request: pytest.FixtureRequest) -> Iterator[OneSequence]:
    """With some share of the experts, and some share of the missing ones read over the bus."""
    share, streamed = request.param
    with open_partly(demo_model_path(), share, streamed=streamed) as opened:
        yield opened


def times_of(runner: OneSequence) -> StepTimes:
    statistics = runner.gpu_experts
    assert statistics is not None
    return statistics.step_times


def decode(runner: OneSequence, count: int = COUNT) -> None:
    for token in token_ids(count):
        runner.decode(token)


def test_parts_of_every_layer_add_up_to_the_span_of_its_steps(runner: OneSequence) -> None:
    before, start = times_of(runner), time.perf_counter()
    decode(runner)
    elapsed = time.perf_counter() - start
    times = times_of(runner)
    assert (before.steps, times.steps) == (0, COUNT)
    for part in PARTS:
        values = np.array(getattr(times, part))
        assert values.shape == (runner.spec.num_layers,)
        assert (values >= 0).all(), part
    for part in ("router", "combine"):
        assert min(getattr(times, part)) > 0
    assert times.other[0] == 0 < min(times.other[1:])
    assert np.add(times.resident, times.bus).min() > 0
    assert sum(times.parts.values()) == times.seconds
    assert 0 < times.seconds <= elapsed  # both are seconds


def test_a_layer_without_requests_to_the_cpu_does_not_wait(runner: OneSequence) -> None:
    before = np.array(runner.gpu_experts.cpu_requests)
    decode(runner)
    asked = np.array(runner.gpu_experts.cpu_requests) - before
    wait = np.array(times_of(runner).wait)
    assert (wait[asked == 0] == 0).all()
    assert wait.sum() > 0 or not asked.any()


def test_bus_pairs_are_what_slots_and_the_cpu_leave_over(runner: OneSequence) -> None:
    pairs_before = np.array(runner.gpu_experts.cpu_pairs)
    cache = runner.expert_cache
    assert cache is not None
    misses_before = cache.counters.misses.copy()
    decode(runner)
    on_cpu = np.array(runner.gpu_experts.cpu_pairs) - pairs_before
    runner.prefill(token_ids(100))  # the last token is counted when the next step has begun
    misses = cache.counters.misses - misses_before
    times = times_of(runner)
    assert (np.array(times.bus_pairs) == misses - on_cpu).all()
    assert (np.array(times.bus_steps) <= times.bus_pairs).all()
    assert [b > 0 for b in times.bus] == [count > 0 for count in times.bus_steps]


def test_steps_of_more_rows_than_one_router_takes_are_left_out(runner: OneSequence) -> None:
    decode(runner, 3)
    for count in (9, 16, 64, 100):
        runner.reset()
        runner.prefill(token_ids(count))
    assert times_of(runner).steps == 3
    runner.reset()
    runner.prefill(token_ids(8))
    assert times_of(runner).steps == 4
