"""Which experts of a layer are the bus's, and when all are, to see what the bus brings alone."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.experts import step_division
from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.cpu_share import Share
from coldstream.experts.step_division import (
    CHEAP,
    MOST_COST,
    MOST_PROBED,
    PROBED_EXPERTS,
    Division,
    StepDivision,
)
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes

ROWS, EXPERTS, SIZE = 512, 64, 10**6


class Steps:
    """Steps of layers whose missing experts have one to 64 rows.

    The bus brings `rate` while the CPU computes, and `gain` times as much alone. cpu_s: the CPU's time for a
    row of an expert.
    """

    def __init__(self, rate: float = 1e10, gain: float = 1.0, cpu_s: float = 1e-6) -> None:
        self.division = StepDivision(2048)
        cpu = tuple(max(1, round(1e9 * cpu_s * rows)) for rows in range(1, MAX_MAILBOX_ROWS + 1))
        self.division.begin_with(MissTimes(max(1, round(1e9 * SIZE / rate)), cpu), SIZE)
        self.rate, self.gain, self.now = rate, gain, 0.0

    def step(self, layers: int, *, missing: int = EXPERTS, seconds: float = 1.0) -> list[Division]:
        self.division.start(ROWS, self.now)
        counts, lacking = np.arange(1, EXPERTS + 1), np.arange(EXPERTS) < missing
        found = []
        for _ in range(layers):
            found.append(self.division.divide(counts, lacking, [], SIZE, 0))
            num_bytes = SIZE * len(found[-1].streamed)
            rate = self.rate * (self.gain if found[-1].is_alone else 1.0)
            self.division.copied(num_bytes, num_bytes / rate, is_alone=found[-1].is_alone)
        self.now += seconds
        self.division.end(self.now)
        return found


@given(rate=st.floats(1e9, 1e11), cpu_s=st.floats(1e-7, 1e-4), missing=st.integers(0, EXPERTS))
def test_each_missing_expert_is_in_one_place(rate: float, cpu_s: float, missing: int) -> None:
    steps = Steps(rate, cpu_s=cpu_s)
    for _ in range(3):
        for division in steps.step(5, missing=missing):
            assert sorted([*division.streamed, *division.on_cpu]) == list(range(missing))
            assert not (division.is_alone and division.on_cpu)


@pytest.mark.parametrize("missing", [EXPERTS, 40, 3])
def test_some_layers_are_all_the_bus_s_until_it_is_known_what_it_brings(missing: int) -> None:
    """As many as are needed to see it, and no more than a few."""
    steps = Steps(gain=1.0, cpu_s=1e-4)
    num_layers = min(MOST_PROBED, -(-PROBED_EXPERTS // missing))
    assert [each.is_alone for each in steps.step(8, missing=missing)] == [True] * num_layers + [False] * (
        8 - num_layers
    )
    for _ in range(3):
        assert not any(each.is_alone for each in steps.step(8, missing=missing))


def slow_bus(monkeypatch: pytest.MonkeyPatch, times_as_long: float) -> None:
    """A layer takes a second, and so many without the CPU."""
    share = Share(10, 1.0, times_as_long)
    monkeypatch.setattr(step_division.CpuShare, "split", lambda *others: share)


@pytest.mark.parametrize("times_as_long", [CHEAP + 0.1, 5.0, 20.0])
def test_layers_that_would_take_several_times_as_long_cost_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, times_as_long: float
) -> None:
    slow_bus(monkeypatch, times_as_long)
    steps, extra, layers = Steps(), times_as_long - CHEAP, 10
    num_steps = math.ceil(extra / (MOST_COST * layers))
    steps_layers = [steps.step(layers, seconds=layers) for _ in range(num_steps + 2)]
    probed = [sum(each.is_alone for each in divisions) for divisions in steps_layers]
    assert not any(probed[:num_steps])
    assert next(count for count in probed if count) == 1, "two layers would cost twice as much"


def test_layers_that_would_not_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_bus(monkeypatch, CHEAP)
    assert Steps().step(3)[0].is_alone


class Part:
    """In place of `CpuPart`. learned: what each step taught."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: bool = True) -> None:
        self.learned: list[dict[str, Any]] = []
        monkeypatch.setattr(CpuPart, "choose", lambda part, rows: way)
        monkeypatch.setattr(CpuPart, "learn", self._learn)

    def _learn(self, rows: int, seconds: float, on_bus: float, **others: Any) -> None:
        self.learned.append({"rows": rows, "seconds": seconds, "on_bus": on_bus, **others})


@given(rate=st.floats(1e9, 1e11), gain=st.floats(1.0, 3.0))
def test_a_step_without_the_cpu_takes_what_the_bus_brings_alone(rate: float, gain: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        part, steps = Part(patch), Steps(rate, gain, cpu_s=1e-4)
        steps.step(8, seconds=0.5)
        (found,) = part.learned
        assert found["on_bus"] == pytest.approx(8 * EXPERTS * SIZE / (gain * rate))
        assert (found["rows"], found["seconds"], found["with_cpu"]) == (ROWS, 0.5, True)


def test_while_that_is_not_known_it_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no such step is tried; but for one that misses nothing."""
    slow_bus(monkeypatch, 20.0)
    part, steps = Part(monkeypatch), Steps()
    steps.step(3)
    assert part.learned[-1]["on_bus"] == math.inf
    monkeypatch.undo()
    part = Part(monkeypatch)
    Steps().step(3, missing=0)
    assert part.learned[-1]["on_bus"] == 0.0


def test_a_step_without_the_cpu_has_all_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    part, steps = Part(monkeypatch, way=False), Steps(1e10)
    for division in steps.step(4):
        assert (len(division.streamed), division.on_cpu, division.is_alone) == (EXPERTS, [], False)
    assert part.learned[-1]["on_bus"] == pytest.approx(4 * EXPERTS * SIZE / 1e10)


def test_what_is_coming_is_shared_out_no_more_and_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    part, division = Part(monkeypatch), StepDivision(2048)
    division.start(ROWS, 0.0)
    counts, missing = np.ones(8, np.int64), np.ones(8, bool)
    shared = division.divide(counts, missing, [1, 2], SIZE, 0)
    assert sorted([*shared.streamed, *shared.on_cpu]) == [0, 3, 4, 5, 6, 7]
    division.copied(6 * SIZE, 6e-3, is_alone=shared.is_alone)
    division.end(1.0)
    assert shared.is_alone
    assert part.learned[-1]["on_bus"] == pytest.approx(8e-3)


def test_the_first_step_of_a_way_and_one_that_is_recorded_are_not_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, steps = Part(monkeypatch), Steps()
    for number in range(3):
        steps.division.start(ROWS, steps.now)
        if number == 1:
            steps.division.note_recording()
        steps.division.end(steps.now + 1)
    assert [each["is_usual"] for each in part.learned] == [False, False, True]
    steps.division.start(4096, 0.0)
    assert not steps.division.with_cpu
    steps.division.end(1.0)
    assert len(part.learned) == 3, "longer steps have no part for the CPU, and are not compared"


def test_requests_teach_what_the_ones_before_took() -> None:
    division, seconds = StepDivision(2048), 0.0
    division.begin_with(MissTimes(10**6, tuple(range(1, MAX_MAILBOX_ROWS + 1))), SIZE)
    division.start(ROWS, 0.0)
    rows = np.full(10, 5)
    for _ in range(8):
        division.asked(rows, SIZE, seconds)
        seconds += 3 * 10 * 5e-9
    share = division.share.split(ROWS, np.full(100, 5), SIZE, 10**12)
    assert share.on_cpu == 100
    assert division.share.split(ROWS, rows, SIZE, 0).seconds <= 3.01 * 10 * 5e-9
    paces = division.share._paces
    assert [pace.factor for pace in paces.values()] == [pytest.approx(3.0)]
