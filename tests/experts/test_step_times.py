"""Where the time of a step goes: sums of stamps against the steps themselves."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts.gpu_statistics import PARTS, LayerTotals, StepSums, StepTimes, describe_parts
from coldstream.kernels.experts.stamps import SUMS

MODULUS = 2**64


@dataclass(frozen=True)
class Layer:
    """A layer of a step: nanoseconds of its parts in the order of time, and pairs over the bus."""

    other: int
    router: int
    experts: int
    wait: int
    combine: int
    pairs: int


NANOSECONDS = st.integers(0, 60 * 10**9)
LAYERS = st.builds(Layer, *[NANOSECONDS] * 5, pairs=st.integers(0, 8))
STEPS = st.integers(1, 5).flatmap(
    lambda count: st.lists(st.lists(LAYERS, min_size=count, max_size=count), min_size=1, max_size=6)
)


def summed(steps: list[list[Layer]], start: int) -> tuple[np.ndarray, np.ndarray]:
    """The stamps of the device if its clock shows `start` when the first step begins."""
    sums = np.zeros((len(steps[0]), 2, len(SUMS)), object)
    now = start
    for step in steps:
        for number, layer in enumerate(step):
            stamps = []
            for passed in (layer.other, layer.router, layer.experts, layer.wait, layer.combine):
                now += passed
                stamps.append(now)
            sums[number, int(layer.pairs > 0)] += [1, *stamps]
    pairs = [sum(step[number].pairs for step in steps) for number in range(len(steps[0]))]
    return (sums % MODULUS).astype(np.uint64), np.array(pairs, np.uint64)


@given(STEPS, st.integers(0, MODULUS - 1))
def test_sums_that_overflow_give_the_seconds_of_every_part_of_every_layer(
    steps: list[list[Layer]], start: int
) -> None:
    times = StepTimes.of(*summed(steps, start))
    assert times.steps == len(steps)
    for number in range(len(steps[0])):
        layers = [step[number] for step in steps]
        with_pairs = [layer for layer in layers if layer.pairs]
        without = [layer for layer in layers if not layer.pairs]
        expected = {
            "other": sum(layer.other for layer in layers) if number else 0,
            "router": sum(layer.router for layer in layers),
            "resident": sum(layer.experts for layer in without),
            "bus": sum(layer.experts for layer in with_pairs),
            "wait": sum(layer.wait for layer in layers),
            "combine": sum(layer.combine for layer in layers),
        }
        assert {part: getattr(times, part)[number] for part in PARTS} == {
            part: nanoseconds / 1e9 for part, nanoseconds in expected.items()
        }
        assert times.bus_steps[number] == len(with_pairs)
        assert times.bus_pairs[number] == sum(layer.pairs for layer in layers)


@given(STEPS, st.integers(0, MODULUS - 1))
def test_sums_of_all_layers_are_those_of_the_parts_by_layer(steps: list[list[Layer]], start: int) -> None:
    stamps = summed(steps, start)
    times, together = StepTimes.of(*stamps), StepSums.of(*stamps)
    assert together.steps == times.steps
    assert together.seconds == pytest.approx(times.seconds)
    assert together.bus_s == pytest.approx(times.parts["bus"])
    assert together.experts_s == pytest.approx(sum(times.parts[part] for part in ("resident", "bus", "wait")))
    assert together.bus_pairs == sum(times.bus_pairs)
    if len(steps[0]) > 1:
        stamps[0][0, 0, 0] += 1
        assert StepSums.of(*stamps).steps == StepTimes.of(*stamps).steps == 0, "a step failed half-way"


@given(STEPS, st.integers(0, MODULUS - 1))
def test_parts_add_up_to_the_span_from_the_first_router_to_the_last_sum(
    steps: list[list[Layer]], start: int
) -> None:
    times = StepTimes.of(*summed(steps, start))
    passed = sum(
        layer.other + layer.router + layer.experts + layer.wait + layer.combine
        for step in steps
        for layer in step
    )
    span = (passed - sum(step[0].other for step in steps)) / 1e9
    assert times.seconds == pytest.approx(span)
    assert sum(times.parts.values()) == times.seconds


def test_a_clock_that_goes_back_a_little_takes_from_its_part_alone() -> None:
    times = StepTimes.of(*summed([[Layer(100, 200, -32, 0, 50, 0), Layer(10, 20, 30, 0, 50, 0)]], 0))
    assert times.resident == (-32e-9, 30e-9)
    assert times.other == (0.0, 10e-9)


def test_a_step_that_failed_half_way_leaves_nothing_to_report() -> None:
    sums, pairs = summed([[Layer(1, 1, 1, 1, 1, 1)] * 3] * 2, 10**15)
    sums[2] = summed([[Layer(1, 1, 1, 1, 1, 1)] * 3], 10**15)[0][2]
    times = StepTimes.of(sums, pairs)
    assert times.steps == 0
    assert times.seconds == 0
    assert times.bus_pairs == (0, 0, 0)


def test_without_layers_or_steps_there_is_no_time() -> None:
    for layers in (0, 3):
        times = StepTimes.of(np.zeros((layers, 2, len(SUMS)), np.uint64), np.zeros(layers, np.uint64))
        assert (times.steps, times.seconds) == (0, 0)
        assert describe_parts(times.parts) == ""


def test_shares_are_of_the_whole() -> None:
    times = StepTimes.of(*summed([[Layer(0, 10, 0, 30, 10, 0), Layer(45, 0, 5, 0, 0, 1)]], 7))
    assert describe_parts(times.parts) == "other 45%, router 10%, resident 0%, bus 5%, wait 30%, combine 10%"


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=5))
def test_totals_only_grow_and_have_all_that_was_looked_at(runs: list[tuple[list[list[Layer]], bool]]) -> None:
    """After each run, and after some the device's sums begin again, which is looked at too."""
    totals, expected, num_steps = LayerTotals(), dict.fromkeys(PARTS, 0.0), 0
    run: list[list[Layer]] = []
    for steps, begins_again in runs:
        steps = [step[:1] for step in steps]
        before, run = totals.seconds, run + steps
        totals.add(StepTimes.of(*summed(run, 0)))
        totals.add(StepTimes.of(*summed(run, 0)))  # nothing happened in between
        assert all(now >= then for now, then in zip(totals.seconds, before, strict=True))
        num_steps += len(steps)
        for part, seconds in StepTimes.of(*summed(steps, 0)).parts.items():
            expected[part] += seconds
        if begins_again:
            run = []
            totals.add(StepTimes.of(*summed([[]], 0)))
    assert totals.steps == num_steps
    assert totals.seconds == pytest.approx(tuple(expected.values()), abs=1e-6)
