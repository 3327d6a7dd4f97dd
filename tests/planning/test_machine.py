"""The machine is measured once, and again when a run is far faster than its rates explain."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings")

from coldstream.errors import OutOfMemoryError
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda import kernel_loading, link
from coldstream.kernels.cuda.device import Gpu
from coldstream.kernels.cuda.link import LinkRates
from coldstream.kernels.experts import cpu_rates, gpu_rates
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.conditions import Conditions
from coldstream.placement.hardware import Hardware
from coldstream.placement.hardware_file import describe_rates
from coldstream.planning import machine
from coldstream.planning.machine import (
    LateRates,
    compiling_for_rates,
    hardware_of,
    hardware_with,
    is_time_to_measure_again,
    measured_hardware,
    rates_are_known,
    reconsider_rates,
    why_not_kept,
    why_unusable,
    with_rates,
)


@pytest.mark.sharded(of="plans")
def test_a_machine_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    first = measured_hardware(None, path=path)
    assert first.read_bytes_per_s is not None
    assert first.read_bytes_per_s > 1e8
    assert measured_hardware(None, path=path).read_bytes_per_s == first.read_bytes_per_s
    document = json.loads(path.read_text())
    document["cpu"]["rates"]["read_bytes_per_s"] = 1234567.0
    path.write_text(json.dumps(document))
    assert measured_hardware(None, path=path).read_bytes_per_s == 1234567.0
    path.write_text("{")
    again = measured_hardware(None, path=path)
    assert again.read_bytes_per_s not in (None, 1234567.0)
    assert again.cpu_name == Hardware.measure().cpu_name


@pytest.mark.sharded(of="plans")
def test_rates_are_added_without_another_look_at_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose files of the kernel may take a while to read."""
    path = tmp_path / "hardware.json"
    first = measured_hardware(None, path=path)
    here = replace(first, read_bytes_per_s=None, ram_available_bytes=123, measured_at=None)
    monkeypatch.delattr(Hardware, "measure")
    assert with_rates(here, path=path) == replace(first, ram_available_bytes=123)


@pytest.mark.sharded(of="plans")
def test_what_is_not_measured_again_is_known_before(tmp_path: Path) -> None:
    path, here = tmp_path / "hardware.json", Hardware.measure()
    assert not rates_are_known(here, path)
    with_rates(here, path=path)
    assert rates_are_known(here, path)
    assert not rates_are_known(hardware_with(GPU), path), "of the CPU alone"


def test_the_kernel_of_a_measurement_is_compiled_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the end of what goes on beside it."""
    asked: list[tuple[object, str]] = []
    ends: list[str] = []

    class Loading:
        def __init__(self, kernels: Iterable[tuple[object, str]]) -> None:
            asked.extend(kernels)

        def close(self) -> None:
            ends.append("closed")

    monkeypatch.setattr(kernel_loading, "KernelLoading", Loading)
    monkeypatch.setattr(gpu_rates, "needed_kernels", lambda: NEEDED)
    with compiling_for_rates(Hardware.measure()):
        assert not asked
    with compiling_for_rates(hardware_with(GPU)):
        assert asked == [(link.PRODUCTS, "multiply_fragments"), *NEEDED]
        assert not ends
    assert ends == ["closed"]


def test_late_rates_are_measured_once_if_a_plan_asked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    here = hardware_with(GPU)
    late = LateRates(here, path)
    late.measure()
    assert not path.exists()
    assert (late.find(), measured.num_measured) == (here, 0)
    tasks: list[str] = []
    late.measure(lambda what, done, total: tasks.append(what))
    assert set(tasks) == {"measuring this machine"}
    assert with_rates(here, path=path) == late.find() != here
    late.measure()
    LateRates(here, path).measure()
    assert measured.num_measured == 1


def test_late_rates_that_cannot_be_measured_stay_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here = tmp_path / "hardware.json", hardware_with(GPU)
    MeasuredGpu(monkeypatch)

    def refuse(*arguments: object) -> None:
        raise OutOfMemoryError("no memory")

    late = LateRates(here, path)
    late.find()
    with monkeypatch.context() as patch:
        patch.setattr(link, "measure_link", refuse)
        late.measure()
    assert not rates_are_known(here, path)
    late.measure()
    assert rates_are_known(here, path)


@pytest.mark.sharded(of="plans")
def test_where_nothing_can_be_kept_it_is_measured_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert measured_hardware(None, path=tmp_path / "file" / "hardware.json").read_bytes_per_s is not None


def keep(path: Path, rate: float) -> None:
    """A file of this machine that says `rate`."""
    document = json.loads(path.read_text())
    document["cpu"]["rates"]["read_bytes_per_s"] = rate
    path.write_text(json.dumps(document))


@pytest.mark.sharded(of="plans")
def test_a_machine_is_measured_again_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    first = measured_hardware(None, path=path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", first.measured_at or "")
    keep(path, 1234567.0)
    kept = measured_hardware(None, path=path)
    assert (kept.read_bytes_per_s, kept.measured_at) == (1234567.0, first.measured_at)
    again = measured_hardware(None, path=path, again=True)
    assert again.read_bytes_per_s not in (None, 1234567.0)
    assert measured_hardware(None, path=path).read_bytes_per_s == again.read_bytes_per_s


def of_ram(run_bytes_per_s: float) -> Callable[[Hardware], float]:
    """How many times as fast a run was that read RAM at this rate."""
    return lambda hardware: run_bytes_per_s / (hardware.read_bytes_per_s or math.nan)


def test_a_run_far_faster_than_the_kept_rate_has_the_machine_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hardware.json"
    here = Hardware.measure()
    assert not reconsider_rates(here, of_ram(1e12), path)  # nothing is kept that could be wrong
    monkeypatch.setattr(machine, "read_windows", lambda threads, memory: [1e10])
    measured_hardware(None, path=path)
    keep(path, 1e9)
    assert not reconsider_rates(here, of_ram(1.4e9), path)
    assert reconsider_rates(here, of_ram(5e10), path)
    assert measured_hardware(None, path=path).read_bytes_per_s == 1e10
    assert not reconsider_rates(here, of_ram(6e10), path)  # from a cache: memory was not found to be faster
    assert reconsider_rates(here, of_ram(8e10), path)
    monkeypatch.setattr(machine, "read_windows", lambda threads, memory: [1e9])
    assert reconsider_rates(here, of_ram(2e11), path)
    assert measured_hardware(None, path=path).read_bytes_per_s == 1e10  # the better of both


class MeasuredGpu:
    """A GPU whose rates are what this object says when it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copy, self.products, self.link = 1e12, 2e14, LinkRates(2.5e10, 2e10, 3e10)
        self.windows = [5e10] * 3
        self.handshakes = itertools.repeat(7e-6)
        self.expert_rates = tuple(rate * 1e9 for rate in range(8, 1, -1))
        self.product_rates = tuple((4e9, 5e9, 6e9) for _ in QuantType)
        self.row_rate, self.mixers = 4e10, MixerRates(4e-6, 4e-5, 1e10, 2e10, 3e10, 4e10, 5e10)
        self.steps = StepRates(2e-6, 5e11, 2e10, 1.5e10, 1.6e10, 4e-6, 3e10, 2.5e10, 2e-5, 1e14)
        self.num_measured = self.num_steps_measured = 0
        monkeypatch.setattr(machine, "measure_product_rates", lambda threads: self.product_rates)
        row = SimpleNamespace(bytes_per_s=lambda: self.row_rate, run=lambda: None)
        monkeypatch.setattr(machine, "RowProduct", lambda threads, codes: row)
        monkeypatch.setattr(machine, "measure_mixer_rates", lambda threads, read_weights, codes: self.mixers)
        monkeypatch.setattr(machine, "read_windows", lambda threads, memory: [*self.windows])
        monkeypatch.setattr(machine, "measure_copy_bandwidth", self.measure_copy)
        monkeypatch.setattr(link, "measure_products", lambda: self.products)
        monkeypatch.setattr(link, "measure_link", self.measure_link)
        monkeypatch.setattr(link, "measure_handshake", lambda threads: next(self.handshakes))
        monkeypatch.setattr(cpu_rates, "measure_expert_rates", lambda threads, codes: self.expert_rates)
        monkeypatch.setattr(gpu_rates, "measure_step_rates", self.measure_steps)

    def measure_link(self, threads: int, memory: object) -> LinkRates:
        return replace(self.link, windows=tuple(self.windows))

    def measure_steps(self, threads: int, codes: object) -> StepRates:
        self.num_steps_measured += 1
        return self.steps

    def measure_copy(self) -> float:
        self.num_measured += 1
        return self.copy


NEEDED = [("a program", "an instance")]
GPU = Gpu("a GPU", (9, 0), 100, 2**35, 2**34)


def of_vram(run_bytes_per_s: float) -> Callable[[Hardware], float]:
    def times_as_fast(hardware: Hardware) -> float:
        assert hardware.gpu is not None
        return run_bytes_per_s / (hardware.gpu.copy_bytes_per_s or math.nan)

    return times_as_fast


def test_the_gpu_is_measured_once_however_often_the_cpu_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    measured.handshakes = iter([9e-6, 6e-6, 8e-6])
    first = measured_hardware(GPU, path=path)
    assert first.gpu is not None
    assert (first.gpu.handshake_s, first.gpu.link_beside_read) == (6e-6, 2e10), "the best of several"
    assert first.gpu.expert_bytes_per_s == measured.expert_rates
    measured_hardware(None, path=path, again=True)
    again = measured_hardware(GPU, path=path)
    assert (again.gpu, again.read_bytes_per_s) == (first.gpu, 5e10)
    assert measured.num_measured == 1
    measured.handshakes = itertools.repeat(7e-6)
    measured_hardware(GPU, path=path, again=True)
    assert measured.num_measured == 2


def test_a_run_on_a_gpu_far_faster_than_its_rates_has_it_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    here = hardware_with(GPU)
    assert not reconsider_rates(here, of_vram(1e15), path)
    measured_hardware(GPU, path=path)
    assert not reconsider_rates(here, of_vram(1.4e12), path)
    # Another program is gone that took the memory's bandwidth, and one came that takes the bus.
    measured.copy, measured.products, measured.link = 3e12, 1e14, LinkRates(1e10, 1.5e10, 4e10)
    measured.handshakes = itertools.repeat(8e-6)
    measured.expert_rates = (9e9, 6e9, *measured.expert_rates[2:])
    measured.product_rates, measured.row_rate = ((5e9, 4e9, 7e9), *measured.product_rates[1:]), 3e10
    measured.mixers = MixerRates(3e-6, 3e-5, 9e9, 3e10, 2e10, 5e10, 4e10)
    assert reconsider_rates(here, of_vram(4e12), path)
    better = measured_hardware(GPU, path=path)
    assert better.product_values_per_s == ((5e9, 5e9, 7e9), *measured.product_rates[1:])
    assert better.row_bytes_per_s == 4e10
    assert better.mixers == MixerRates(3e-6, 3e-5, 1e10, 3e10, 3e10, 5e10, 5e10)
    gpu = better.gpu
    assert gpu is not None
    assert (gpu.copy_bytes_per_s, gpu.product_ops_per_s, gpu.link_bytes_per_s) == (3e12, 2e14, 2.5e10)
    assert (gpu.link_beside_read, gpu.read_beside_link) == (1.5e10, 4e10), "both of one measurement"
    assert gpu.handshake_s == 7e-6
    assert gpu.expert_bytes_per_s == (9e9, 7e9, 6e9, 5e9, 4e9, 3e9, 2e9), "the better of each number of rows"
    assert not reconsider_rates(here, of_vram(5e12), path), "once for runs of this speed"
    assert measured.num_measured == 2
    measured.link = LinkRates(3e10, 1e10, 1e10)
    assert reconsider_rates(here, of_vram(7e12), path)
    gpu = measured_hardware(GPU, path=path).gpu
    assert gpu is not None
    assert (gpu.link_bytes_per_s, gpu.link_beside_read, gpu.read_beside_link) == (3e10, 1.5e10, 4e10)


def test_a_gpu_that_cannot_be_measured_again_keeps_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    first = measured_hardware(GPU, path=path)

    def refuse() -> float:
        raise OutOfMemoryError("another program took the memory")

    monkeypatch.setattr(machine, "measure_copy_bandwidth", refuse)
    assert not reconsider_rates(hardware_with(GPU), of_vram(9e12), path)
    assert measured_hardware(GPU, path=path).gpu == first.gpu
    assert measured.num_measured == 1


LOADED = Conditions(2, 1.5)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Conditions]:
    """Has the conditions of all measurements, and of looks at the machine."""
    found = [LOADED]

    class Watch:
        def __init__(self, cpu_ids: Sequence[int]) -> None:
            pass

        def conditions(self, samples: Sequence[float] = ()) -> Conditions:
            return found[0]

    monkeypatch.setattr(machine, "LoadWatch", Watch)
    monkeypatch.setattr(machine, "is_idle", lambda cpu_ids: not found[0].problems)
    return found


QUIET = Conditions(2, 0.0)


@pytest.mark.parametrize("gpu", [None, GPU])
def test_what_was_measured_under_load_is_a_start_and_measured_again_when_the_machine_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[Conditions], gpu: Gpu | None
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    measured.windows = [1e9] * 3
    first = measured_hardware(gpu, path=path)
    assert first.is_disturbed
    assert first.has_doubtful_rates
    assert hardware_of(gpu).has_doubtful_rates, "they are not measured"
    measured_hardware(gpu, path=path)
    assert measured.num_measured == (gpu is not None), "others are still busy"
    assert not is_time_to_measure_again(hardware_of(gpu), path)
    watched[:] = [QUIET]
    measured.windows = [9e8] * 3
    assert is_time_to_measure_again(hardware_of(gpu), path)
    second = measured_hardware(gpu, path=path)
    assert (second.read_bytes_per_s, second.is_disturbed) == (9e8, False), "a slower one counts as well"
    assert not second.has_doubtful_rates
    measured.windows = [7e8] * 3
    assert measured_hardware(gpu, path=path).read_bytes_per_s == 9e8, "which stays"


@pytest.mark.parametrize("gpu", [None, GPU])
def test_a_machine_where_something_disturbs_all_measurements_is_measured_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[Conditions], gpu: Gpu | None
) -> None:
    """And the best of what was found is kept."""
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    found = []
    monkeypatch.setattr(machine, "is_idle", lambda cpu_ids: True)
    for window in (1e9, 3e9, 2e9, 1e9, 9e9, 9e9):
        measured.windows = [window] * 3
        found.append(measured_hardware(gpu, path=path))
    assert [each.read_bytes_per_s for each in found] == [1e9, 3e9, 3e9, 3e9, 3e9, 3e9]
    assert not found[-1].is_disturbed
    assert found[-1].has_doubtful_rates
    assert found[-1].conditions is not None
    assert found[-1].conditions.problems, "it is known why the rates are what they are"
    (entry, *_) = describe_rates(found[-1], path).entries
    assert entry.problems == LOADED.problems
    asked = measured_hardware(gpu, path=path, again=True)
    assert asked.read_bytes_per_s == 9e9, "as often as it is asked for"


def test_a_load_that_comes_later_spoils_no_good_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[Conditions]
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    watched[:] = [QUIET]
    first = measured_hardware(GPU, path=path)
    watched[:] = [LOADED]
    measured.windows, measured.link = [1e9] * 3, LinkRates(1e9, 1e9, 1e9)
    again = measured_hardware(GPU, path=path, again=True)
    assert first.gpu is not None
    assert again.gpu is not None
    assert again.read_bytes_per_s == first.read_bytes_per_s
    assert again.gpu.link_bytes_per_s == first.gpu.link_bytes_per_s


def test_late_rates_are_measured_again_behind_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[Conditions]
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    here = hardware_with(GPU)
    first = with_rates(here, path=path)
    late = LateRates(here, path)
    assert (late.find(), late.are_assumed) == (first, False)
    late.measure()
    assert measured.num_measured == 1, "others are busy"
    watched[:] = [QUIET]
    late.measure()
    late.measure()
    assert measured.num_measured == 2
    late = LateRates(here, path)
    assert not late.find().is_disturbed
    late.measure()
    assert measured.num_measured == 2


def test_a_file_that_is_of_no_use_is_named_in_a_sentence(tmp_path: Path) -> None:
    path, here = tmp_path / "hardware.json", Hardware.measure()
    assert why_unusable(here, path) == ()
    with_rates(here, path=path)
    assert why_unusable(here, path) == ()
    assert why_unusable(hardware_with(GPU), path) == (), "of the CPU alone"
    other = replace(here, cpu_name="another")
    (sentence,) = why_unusable(other, path)
    assert (
        sentence
        == f"the kept rates in {path} are of another machine: a plan that needs rates measures them again"
    )
    path.write_text("{")
    assert "are damaged" in why_unusable(here, path)[0]
    keep_absurd = with_rates(here, path=path)
    assert keep_absurd.read_bytes_per_s is not None
    keep(path, 1e300)
    assert "are damaged" in why_unusable(here, path)[0]
    assert "read_bytes_per_s is not from 1e+06 to 1e+14" in why_unusable(here, path)[0]
    assert with_rates(here, path=path).read_bytes_per_s != 1e300


def test_rates_that_cannot_be_kept_are_a_sentence_with_the_next_step(tmp_path: Path) -> None:
    path, here = tmp_path / "hardware.json", Hardware.measure()
    os.mkfifo(path)
    assert with_rates(here, path=path).read_bytes_per_s
    (sentence,) = why_unusable(here, path)
    assert sentence == f"{path} is no file, so no rates of this machine are kept: remove it"
    assert why_not_kept(here, path) == ()
    nowhere = Path("/dev/null/hardware.json")
    assert with_rates(here, path=nowhere).read_bytes_per_s
    (sentence,) = why_not_kept(here, nowhere)
    assert sentence.startswith(f"rates could not be kept in {nowhere}, so each plan measures this machine")
    path.unlink()
    with_rates(here, path=path)
    assert why_not_kept(here, path) == ()


def without_steps(path: Path) -> None:
    """As a version wrote it that measured none."""
    document = json.loads(path.read_text())
    document["gpu"].pop("steps")
    path.write_text(json.dumps(document))


def test_a_file_without_rates_of_steps_is_accepted_and_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    here = hardware_with(GPU)
    first = with_rates(here, path=path)
    assert first.gpu is not None
    assert first.gpu.steps == measured.steps
    without_steps(path)
    assert not rates_are_known(here, path)
    assert describe_rates(here, path).state == "current"
    late = LateRates(here, path)
    assert late.find().gpu == replace(first.gpu, steps=None), "a plan does not wait for them"
    assert not late.are_assumed
    late.measure()
    late.measure()
    assert rates_are_known(here, path)
    without_steps(path)
    assert with_rates(here, path=path) == first
    assert with_rates(here, path=path) == first
    assert (measured.num_measured, measured.num_steps_measured) == (1, 3), "and nothing else again"


@pytest.mark.parametrize("gives_up", [False, True])
def test_rates_of_steps_that_no_machine_has_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)

    def refuse(*arguments: object) -> None:
        raise OutOfMemoryError("no memory")

    if gives_up:
        monkeypatch.setattr(gpu_rates, "measure_step_rates", refuse)
    measured.steps = replace(measured.steps, launch_s=-1e-6)
    for _ in range(2):
        found = with_rates(hardware_with(GPU), path=path)
        assert found.gpu is not None
        assert found.gpu.steps is None
        assert found.gpu.copy_bytes_per_s == measured.copy, "the others are kept"
    assert measured.num_measured == 1


def test_steps_that_were_measured_under_load_are_measured_again_with_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[Conditions]
) -> None:
    path, measured = tmp_path / "hardware.json", MeasuredGpu(monkeypatch)
    here = hardware_with(GPU)
    watched[:] = [QUIET]
    with_rates(here, path=path)
    without_steps(path)
    watched[:] = [LOADED]
    good, measured.steps = measured.steps, replace(measured.steps, misses_beside=1e8)
    assert with_rates(here, path=path).is_disturbed
    watched[:] = [QUIET]
    measured.steps = good
    again = measured_hardware(GPU, path=path)
    assert again.gpu is not None
    assert (again.gpu.steps, again.is_disturbed) == (good, False)


def test_the_better_steps_of_two_measurements_count() -> None:
    one = StepRates(2e-6, 5e11, 2e10, 1.5e10, 1.6e10, 4e-6, 3e10, 2.5e10, 2e-5, 1e14)
    other = StepRates(3e-6, 6e11, 1e10, 1.7e10, 1.5e10, 3e-6, 4e10, 1.5e10, 3e-5, 9e13)
    assert (
        one.better(other)
        == other.better(one)
        == StepRates(2e-6, 6e11, 2e10, 1.5e10, 1.6e10, 3e-6, 4e10, 2.5e10, 2e-5, 1e14)
    )
    unknown = replace(other, launch_s=None, row_bytes_per_s=None)
    better = unknown.better(one)
    assert (better.launch_s, better.row_bytes_per_s, better.misses_alone) == (2e-6, 5e11, 4e10)
    assert unknown.better(unknown) == unknown
