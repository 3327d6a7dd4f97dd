"""Shares of rates that kernels reach: measured where steps were, estimated elsewhere, and what follows."""

from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import H200, Q4_BYTES

from bench.full_size_forecast import FULL_SIZES, hardware_of
from bench.report.tables import load
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.placement.cost import decode_seconds, miss_times, split_misses
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.kernel_shares import PROMPT_OF_PRODUCT, QUEUED_OF_MEASURED, KernelShares
from coldstream.placement.prompt_cost import prefill_seconds
from coldstream.placement.rates import Rates

STEPS = StepRates(2e-6, 7e11, 2e10, 1.5e10, 1.6e10, 4e-6, 3e10, 2e10, 3e-5, 1e14)
GPU = GpuHardware(
    *("a GPU", "580.1", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 4e10, 7e-6), (3e10,) * 7, steps=STEPS
)
MACHINE = Hardware("a CPU", ("avx2",), 8, 4, 2**36, 2**35, 6e10, GPU)
NONE = np.zeros((40, 256), np.bool_)
NAMES = [each.name for each in fields(KernelShares) if each.name != "estimated"]


def machine_with(**steps: float | None) -> Hardware:
    return replace(MACHINE, gpu=replace(GPU, steps=replace(STEPS, **steps)))


def decode(machine: Hardware, hit_rate: float = 1.0) -> float:
    return decode_seconds(FULL_SIZES, Rates.of(machine), (hit_rate,) * 40)


def prompt(machine: Hardware, ring_bytes: int | None = None, rows: int = 2048) -> float:
    return prefill_seconds(FULL_SIZES, Rates.of(machine), NONE, None, rows, 2048, ring_bytes=ring_bytes)


def test_a_machine_without_measured_steps_has_the_estimates_and_names_them() -> None:
    for gpu in (None, replace(GPU, steps=None)):
        shares = Rates.of(replace(MACHINE, gpu=gpu)).shares
        assert shares == KernelShares()
        assert set(shares.estimated) == set(NAMES)
        assert shares.measured == ()
    assert H200.shares == KernelShares(), "as of rates that are given"
    said = KernelShares().describe_estimated(["launch_s", "vram"])
    assert said == "a launch 3 µs, kernels read GPU memory at 70 % of a copy's rate"


def test_what_was_measured_is_no_estimate() -> None:
    shares = KernelShares.of(MACHINE)
    assert shares.estimated == ()
    assert set(shares.measured) == set(NAMES)
    assert shares.describe_estimated(NAMES) == ""
    some = KernelShares.of(machine_with(launch_s=None, row_bytes_per_s=None))
    assert some.estimated == ("launch_s", "vram")
    assert (some.launch_s, some.vram) == (KernelShares().launch_s, KernelShares().vram)
    assert some.bus == shares.bus


def test_a_share_is_of_the_rate_that_it_is_multiplied_with() -> None:
    """A rate that was measured too high, with the same steps, changes no forecast but of what it bounds."""
    higher = replace(MACHINE, gpu=replace(GPU, copy_bytes_per_s=2e12, link_bytes_per_s=5e10))
    assert decode(higher) == pytest.approx(decode(MACHINE))
    assert decode(higher, 0.5) == pytest.approx(decode(MACHINE, 0.5))


@given(st.floats(1.1, 10.0))
def test_a_card_whose_launches_take_longer_is_slower(times: float) -> None:
    slower = machine_with(launch_s=times * 2e-6)
    further = decode(slower) - decode(MACHINE)
    assert further > 0
    assert decode(machine_with(launch_s=2 * times * 2e-6)) - decode(MACHINE) > further
    assert decode(slower, 0.5) > decode(MACHINE, 0.5)


@given(st.sampled_from([each.name for each in fields(StepRates)]), st.floats(1.05, 5.0), st.floats(0.0, 1.0))
def test_faster_kernels_make_nothing_slower(name: str, times: float, hit_rate: float) -> None:
    value = getattr(STEPS, name)
    better = machine_with(
        **{name: value / times if name.endswith("_s") and "_per_" not in name else value * times}
    )
    assert decode(better, hit_rate) <= decode(MACHINE, hit_rate) * (1 + 1e-2)
    for ring in (None, 2**26):
        assert prompt(better, ring) <= prompt(MACHINE, ring) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("launch_s", decode),
        ("row_bytes_per_s", decode),
        ("row_bus_alone", lambda machine: split_misses(1, Q4_BYTES, _without_cpu(machine)).seconds),
        ("row_bus_beside", lambda machine: miss_times(Q4_BYTES, Rates.of(machine)).row_bus),
        ("request_s", lambda machine: miss_times(Q4_BYTES, Rates.of(machine)).answer),
        ("staged_beside", lambda machine: miss_times(Q4_BYTES, Rates.of(machine)).bus),
        ("misses_alone", lambda machine: split_misses(8, Q4_BYTES, Rates.of(machine), streams=False).seconds),
        ("misses_beside", lambda machine: miss_times(Q4_BYTES, Rates.of(machine)).cpu[0]),
        ("queue_s", lambda machine: prompt(machine, ring_bytes=2**23)),
        (
            "prompt_ops_per_s",
            lambda machine: prefill_seconds(FULL_SIZES, Rates.of(machine), ~NONE, None, 2048, 2048),
        ),
    ],
)
def test_each_measured_figure_decides_over_a_forecast(name: str, seconds: object) -> None:
    assert callable(seconds)
    worse = 2.0 if name in ("launch_s", "queue_s", "request_s") else 0.5
    assert seconds(machine_with(**{name: worse * getattr(STEPS, name)})) > 1.05 * seconds(MACHINE)


def _without_cpu(machine: Hardware) -> Rates:
    return replace(Rates.of(machine), expert_bytes_per_s=(1e6,) * 7)


def test_what_is_measured_is_taken_as_it_is() -> None:
    """But for a prompt: its dense product and a launch are measured, and no other part of it."""
    result = load("gpu/hybrid_ahead")
    machine = hardware_of(result)
    assert machine.gpu is not None
    assert machine.gpu.steps is not None
    gpu, steps, found = machine.gpu, machine.gpu.steps, KernelShares.of(machine)
    assert (found.launch_s, found.request_s) == (steps.launch_s, steps.request_s)
    assert found.vram * gpu.copy_bytes_per_s == pytest.approx(steps.row_bytes_per_s)
    assert found.bus * gpu.link_bytes_per_s == pytest.approx(steps.row_bus_alone)
    assert found.staged * gpu.link_bytes_per_s == pytest.approx(steps.staged_beside)
    assert found.misses * machine.read_bytes_per_s == pytest.approx(steps.misses_alone)
    assert found.misses_beside * gpu.read_beside_link == pytest.approx(steps.misses_beside)
    assert found.queue_s == QUEUED_OF_MEASURED * steps.queue_s
    assert found.products * gpu.product_ops_per_s == pytest.approx(PROMPT_OF_PRODUCT * steps.prompt_ops_per_s)


@given(st.floats(1e-6, 1e-4))
def test_a_request_takes_its_fixed_part_for_each_layer_that_misses(seconds: float) -> None:
    slow = machine_with(request_s=STEPS.request_s + seconds, row_bus_alone=1e6, row_bus_beside=1e6)
    fast = machine_with(row_bus_alone=1e6, row_bus_beside=1e6)
    more = decode(slow, 0.0) - decode(fast, 0.0)
    assert more == pytest.approx(40 * seconds, rel=0.01)


def test_steps_come_back_from_json() -> None:
    assert StepRates.parsed(asdict(STEPS)) == STEPS
