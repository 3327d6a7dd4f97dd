"""Rates of a GPU's steps: what is launched runs on the host, and figures follow from times."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels import _csrc
from coldstream.kernels.cuda.contents import read
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.kernels.experts import gpu_rates
from coldstream.kernels.experts.cpu_rates import written_codes
from coldstream.kernels.experts.gpu_rates import (
    LAUNCHES,
    MOST,
    LayerShape,
    MeasuredLayers,
    measure_step_rates,
)
from coldstream.kernels.experts.step_rates import StepRates

SHAPE = LayerShape(256, 256, num_experts=16, cpu_experts=16, num_layers=2, bus_layers=2, prompt_rows=65)
CODES = written_codes(2, 16 * SHAPE.expert_bytes)
EXPERT_SERVER = _csrc.ExpertServer


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
    # Requests come from the host, which launches nothing for them. Undone before the fixture's own patch is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_csrc, "ExpertServer", EXPERT_SERVER)
        rates = measure_step_rates(2, CODES, SHAPE)
    assert {*gpu_rates._OF_ONE_ROW} < launched
    product = {program.source.name for program, _ in launched - {*gpu_rates._OF_ONE_ROW}}
    assert product == {"gemm.cu"}, "which is compiled before, for the shape that is measured"
    assert (rates.launch_s, rates.row_bytes_per_s) == (None, None), "more experts took no longer"
    assert rates.row_bus_alone == gpu_rates.MISSING * SHAPE.bus_layers * SHAPE.expert_bytes / 1e-3
    assert min(rates.misses_alone, rates.misses_beside, rates.queue_s) > 0
    assert rates.request_s >= 0
    assert rates.prompt_ops_per_s == 2 * 65 * (16 * 256) * 256 / 1e-3
    allocations.trim()
    assert calls.free_memory() == before


@pytest.mark.usefixtures("gpu")
def test_experts_over_the_bus_are_those_in_the_gpus_memory() -> None:
    """Both graphs compute the same sums, of experts that are nonzero."""
    with closing(MeasuredLayers(CODES, SHAPE)) as layers:
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
    request_s: float  # of a request, whatever it asks for
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

    def requests(self, num_threads: int, layer_s: float) -> AbstractContextManager["Requests"]:
        return nullcontext(Requests(self.machine))


class Requests:
    """In place of `ExpertRequests`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def best_seconds(self, number: int, share: float = 1.0) -> float:
        return self.machine.request_s + number * LayerShape().expert_bytes / (share * self.machine.cpu)


rates = st.floats(1e9, 1e13)


@given(
    st.builds(
        Machine, st.floats(1e-7, 1e-4), rates, rates, rates, rates, st.floats(1e-7, 1e-3), st.floats(0.1, 1.0)
    )
)
@settings(max_examples=50, deadline=None)
def test_a_machines_rates_are_found(machine: Machine) -> None:
    found = measured(machine)
    assert found.launch_s == pytest.approx(machine.launch_s, rel=1e-3)
    assert found.row_bytes_per_s == pytest.approx(machine.vram, rel=1e-6)
    assert found.row_bus_alone == pytest.approx(machine.bus, rel=1e-3)
    assert found.row_bus_beside == pytest.approx(machine.beside * machine.bus, rel=1e-3)
    assert found.staged_beside == pytest.approx(machine.beside * machine.staged)
    assert found.request_s == pytest.approx(machine.request_s, rel=1e-3, abs=1e-9)
    assert found.misses_alone == pytest.approx(machine.cpu, rel=1e-6)
    assert found.misses_beside == pytest.approx(machine.beside * machine.cpu, rel=1e-3)


def measured(machine: Machine) -> StepRates:
    """By times alone; nothing runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_rates, "graph_seconds", lambda graph, num_runs=1: num_runs * graph(1.0))
        patch.setattr(gpu_rates, "_WARM_S", 0.0)
        request_s = Requests(machine).best_seconds(MOST, machine.beside)
        patch.setattr(gpu_rates, "best_beside", lambda graph, *_: (graph(machine.beside), request_s))
        return gpu_rates._rates_of(Layers(machine), 1)  # type: ignore[arg-type]


def test_a_window_beside_the_bus_has_as_many_runs_as_it_would_take_without_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bus's time is of a run, and requests go on for as long as the runs."""
    runs, asked = [], []

    class Event:
        def __init__(self, has_time: bool) -> None:
            self.place = 0

        def record(self) -> None:
            self.place = len(runs)

        def query(self) -> bool:
            return len(asked) % 3 == 0

        def synchronize(self) -> None:
            pass

        def milliseconds_since(self, begin: "Event") -> float:
            return 2.0 * (self.place - begin.place)

    class Window:
        def window(self, number: int, is_over: Callable[[], bool]) -> float:
            asked.append(number)
            while not is_over():
                asked.append(number)
            return 1e-4

    monkeypatch.setattr(gpu_rates.streams, "Event", Event)
    run_s, request_s = gpu_rates.best_beside(Launched(runs), 1e-3, 10, Window(), 10)  # type: ignore[arg-type]
    assert (run_s, request_s) == (pytest.approx(2e-3), 1e-4)
    assert len(runs) % 20 == 0, "of 0.02 s, if the CPU were idle"
    assert len(asked) % 3 == 0
    assert set(asked) == {MOST}


class Launched:
    """A graph that only counts its launches."""

    def __init__(self, runs: list[int]) -> None:
        self.runs = runs

    def launch(self) -> None:
        self.runs.append(1)
