"""Rates of a GPU's steps: what is launched runs on the host, and figures follow from times."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.cuda.contents import read
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.kernels.experts import gpu_rates
from coldstream.kernels.experts.gpu_rates import (
    LAUNCHES,
    LayerShape,
    MeasuredLayers,
    measure_step_rates,
)
from coldstream.kernels.experts.step_rates import StepRates

SHAPE = LayerShape(256, 256, num_experts=16, fewest_experts=16, num_layers=2, bus_layers=2, prompt_rows=65)
RAM_BYTES = 2**30


@pytest.mark.usefixtures("gpu")
def test_what_is_measured_runs_and_all_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, where an event is always a millisecond behind another one."""
    launched, kernel = set(), CudaProgram.kernel

    def noted(program: CudaProgram, instance: str) -> Any:
        launched.add((program, instance))
        return kernel(program, instance)

    monkeypatch.setattr(CudaProgram, "kernel", noted)
    monkeypatch.setattr(gpu_rates, "_WARM_S", 0.0)
    before = calls.free_memory()
    rates = measure_step_rates(2, RAM_BYTES, SHAPE)
    assert {*gpu_rates._OF_ONE_ROW} < launched
    product = {program.source.name for program, _ in launched - {*gpu_rates._OF_ONE_ROW}}
    assert product == {"gemm.cu"}, "which is compiled before, for the shape that is measured"
    assert (rates.launch_s, rates.row_bytes_per_s) == (None, None), "more experts took no longer"
    assert rates.row_bus_alone == gpu_rates.MISSING * SHAPE.bus_layers * SHAPE.expert_bytes / 1e-3
    assert min(rates.misses_alone, rates.misses_beside, rates.queue_s) > 0
    assert rates.prompt_ops_per_s == 2 * 65 * (16 * 256) * 256 / 1e-3
    allocations.trim()
    assert calls.free_memory() == before


@pytest.mark.usefixtures("gpu")
def test_experts_over_the_bus_are_those_in_the_gpus_memory() -> None:
    """Both graphs compute the same sums, of experts that are nonzero."""
    with closing(MeasuredLayers(RAM_BYTES, SHAPE)) as layers:
        totals = []
        for stacks in (layers.resident, layers.mapped):
            layers.step(stacks, 3, SHAPE.num_layers)()
            totals.append(read(layers.last_total))
        assert np.isfinite(totals[0]).all()
        assert (totals[0] != totals[0][0, 0]).any()
        np.testing.assert_array_equal(*totals)
        staged = layers.staging_graph(3, SHAPE.bus_layers)
        staged.launch()
        place = read(layers.places)[: SHAPE.matrix_bytes]
        np.testing.assert_array_equal(place, layers.codes[3 * SHAPE.matrix_bytes :][: SHAPE.matrix_bytes])


@dataclass(frozen=True)
class Machine:
    """What a machine is, of which everything else follows."""

    launch_s: float
    vram: float  # bytes a second
    bus: float
    staged: float
    cpu: float
    beside: float  # what is left of the bus and of the CPU beside each other


class Layers:
    """In place of `MeasuredLayers`: graphs are functions of whether the CPU is busy, with their seconds."""

    resident, mapped = "vram", "bus"

    def __init__(self, machine: Machine) -> None:
        self.machine, self.shape = machine, LayerShape()

    def graph(self, memory: str, number: int, num_layers: int) -> Callable[[float], float]:
        fixed = LAUNCHES * self.machine.launch_s
        num_bytes, rate = number * self.shape.expert_bytes, getattr(self.machine, memory)
        # Over the bus launches come and go while it is busy.
        fixed = self.machine.launch_s if memory == "bus" else fixed
        return lambda share: num_layers * (fixed + num_bytes / (share * rate))

    def staging_graph(self, number: int, num_layers: int) -> Callable[[float], float]:
        return lambda share: num_layers * number * self.shape.expert_bytes / (share * self.machine.staged)

    def queue_seconds(self) -> float:
        return 1e-5

    def prompt_ops_per_s(self) -> float:
        return 1e14

    def cpu_run(self, num_threads: int, number: int) -> tuple[Callable[[], None], int]:
        return lambda: None, number * self.shape.expert_bytes


rates = st.floats(1e9, 1e13)


@given(st.builds(Machine, st.floats(1e-7, 1e-4), rates, rates, rates, rates, st.floats(0.1, 1.0)))
@settings(max_examples=50, deadline=None)
def test_a_machines_rates_are_found(machine: Machine) -> None:
    found = measured(machine)
    assert found.launch_s == pytest.approx(machine.launch_s, rel=1e-3)
    assert found.row_bytes_per_s == pytest.approx(machine.vram, rel=1e-6)
    assert found.row_bus_alone == pytest.approx(machine.bus, rel=1e-3)
    assert found.row_bus_beside == pytest.approx(machine.beside * machine.bus, rel=1e-3)
    assert found.staged_beside == pytest.approx(machine.beside * machine.staged)
    assert found.misses_alone == pytest.approx(machine.cpu)
    assert found.misses_beside == pytest.approx(machine.beside * machine.cpu)


def measured(machine: Machine) -> StepRates:
    """By times alone; nothing runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rates, "graph_seconds", lambda graph, num_runs=1: num_runs * graph(1.0))
        patch.setattr(gpu_rates, "_WARM_S", 0.0)
        patch.setattr(gpu_rates, "best_alone", lambda cpu: machine.cpu)
        patch.setattr(gpu_rates.CpuExperts, "running", lambda *_: nullcontext())
        beside = machine.beside
        patch.setattr(gpu_rates, "best_window", lambda graph, *_: (graph(beside), beside * machine.cpu))
        return gpu_rates._rates_of(Layers(machine), 1)  # type: ignore[arg-type]


class Cpu:
    """The CPU's experts, of which a call ends only with every third question."""

    def __init__(self) -> None:
        self.questions = 0

    @property
    def num_bytes(self) -> int:
        self.questions += 1
        return self.questions // 3 * 1000


def test_the_cpu_alone_is_measured_until_it_has_computed_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rates.time, "sleep", lambda seconds: None)
    assert gpu_rates.best_alone(Cpu()) > 0  # type: ignore[arg-type]


def test_a_window_lasts_until_the_cpu_has_computed_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(gpu_rates, "graph_seconds", lambda graph, num: runs.append(num) or num * 2e-3)
    run_s, cpu_rate = gpu_rates.best_window(None, 1e-3, 10, Cpu())  # type: ignore[arg-type]
    assert run_s == pytest.approx(2e-3), "of a run, whatever their number"
    assert cpu_rate > 0
    assert set(runs) == {30}, "of 0.03 s, if the CPU were idle"
