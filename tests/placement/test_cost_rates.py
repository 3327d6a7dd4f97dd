"""Which of a machine's rates decides over which figure of the cost model, and what one costs by itself."""

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import H200, Q4_BYTES, rates

from bench.full_size_forecast import FULL_SIZES
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.placement.cost import (
    DISK_WAIT_S,
    JOIN_LAUNCHES,
    decode_seconds,
    decode_seconds_on_cpu,
    split_misses,
)
from coldstream.placement.prompt_cost import (
    expected_rows,
    expected_touched,
    prefill_seconds,
    prefill_seconds_on_cpu,
)
from coldstream.placement.rates import Rates

NAMES = [field.name for field in fields(Rates) if field.type in (float, int)]
RESIDENT = np.arange(40 * 256).reshape(40, 256) % 2 == 0
NOTHING, ALL = np.zeros_like(RESIDENT), np.ones_like(RESIDENT)

SLOW_CORES = replace(H200, cpu_bytes_per_s=5e10)
SLOW_LINK = replace(H200, link_bytes_per_s=1e8, link_beside_read=1e8)
SLOW_MEMORY = replace(H200, read_bytes_per_s=2e10, read_beside_link=1.5e10)

VRAM = "vram_bytes_per_s"
CORES = "num_cores"  # of which attention is assumed where it was not measured
READ = "read_bytes_per_s"
BOTH_WAYS = {READ, "read_beside_link", "link_bytes_per_s", "link_beside_read", "handshake_s"}


def decode(hit_rate: float) -> Callable[[Rates], float]:
    return lambda rates: decode_seconds(FULL_SIZES, rates, (hit_rate,) * 40, context=4096)


def on_cpu(hit_rate: float) -> Callable[[Rates], float]:
    return lambda rates: decode_seconds_on_cpu(FULL_SIZES, rates, (hit_rate,) * 40, context=4096)


def prefill(resident: np.ndarray, length: int) -> Callable[[Rates], float]:
    return lambda rates: prefill_seconds(FULL_SIZES, rates, resident, None, length, 8192)


def prefill_on_cpu(resident: np.ndarray, length: int) -> Callable[[Rates], float]:
    return lambda rates: prefill_seconds_on_cpu(FULL_SIZES, rates, resident, None, length, 512)


def misses(count: int) -> Callable[[Rates], float]:
    return lambda rates: split_misses(count, Q4_BYTES, rates).seconds


def influences(seconds: Callable[[Rates], float], machine: Rates) -> dict[str, float]:
    """By the name of a rate, by what share seconds grow where it falls by a millionth; those that matter."""
    found = {}
    for name in NAMES:
        slower = replace(machine, **{name: getattr(machine, name) * (1 - 1e-6)})
        change = (seconds(slower) / seconds(machine) - 1) * 1e6
        if abs(change) > 1e-4:
            found[name] = change
    return found


CASES = {
    "decode, all resident": (decode(1.0), H200, {VRAM}),
    "decode, half resident": (decode(0.5), H200, {VRAM, *BOTH_WAYS}),
    "decode, slow cores": (
        decode(0.5),
        SLOW_CORES,
        {VRAM, *BOTH_WAYS, "cpu_bytes_per_s"} - {READ, "read_beside_link"},
    ),
    "decode on the CPU, all in RAM": (on_cpu(1.0), H200, {READ, CORES}),
    "decode on the CPU, slow cores": (on_cpu(1.0), SLOW_CORES, {"cpu_bytes_per_s", READ, CORES}),
    "decode on the CPU, nothing in RAM": (on_cpu(0.0), H200, {READ, "disk_bytes_per_s", CORES}),
    "misses, slow link": (misses(8), SLOW_LINK, {READ, "handshake_s"}),
    "misses, slow cores": (misses(8), replace(H200, cpu_bytes_per_s=1e8), {"link_bytes_per_s"}),
    "misses, slow memory": (misses(8), SLOW_MEMORY, {"link_bytes_per_s"}),
    "misses, both": (misses(8), H200, BOTH_WAYS),
    "a prompt, all resident": (prefill(ALL, 2048), H200, {VRAM, "product_ops_per_s"}),
    "a prompt, nothing resident, no memory": (
        prefill(NOTHING, 2048),
        replace(H200, read_beside_link=1e3),
        {"link_bytes_per_s"},
    ),
    "a prompt, nothing resident, no link": (
        prefill(NOTHING, 2048),
        replace(H200, link_bytes_per_s=1e9, cpu_bytes_per_s=1e18),
        {"read_beside_link", "link_bytes_per_s", VRAM, "product_ops_per_s"},
    ),
    "a prompt, nothing resident, slow cores": (
        prefill(NOTHING, 2048),
        replace(H200, link_bytes_per_s=1e9, cpu_bytes_per_s=1e10),
        {"cpu_bytes_per_s", "link_bytes_per_s", VRAM, "product_ops_per_s"},
    ),
    "a short prompt, nothing resident, slow cores": (
        prefill(NOTHING, MAX_SHARED_ROWS),
        replace(H200, cpu_bytes_per_s=1.0),
        {"link_bytes_per_s", VRAM, "product_ops_per_s"},
    ),
    "a short prompt, nothing resident, by both": (
        prefill(NOTHING, 512),
        H200,
        {"read_beside_link", "cpu_bytes_per_s", "link_bytes_per_s", "handshake_s", VRAM, "product_ops_per_s"},
    ),
    "a shorter prompt, nothing resident, by both": (
        prefill(NOTHING, MAX_SHARED_ROWS),
        H200,
        {"link_bytes_per_s", VRAM, "product_ops_per_s"},
    ),
    "a long prompt, nothing resident": (prefill(NOTHING, 8192), H200, {"link_bytes_per_s"}),
    "a long prompt, nothing resident, a small ring": (
        lambda rates: prefill_seconds(FULL_SIZES, rates, NOTHING, None, 8192, 8192, ring_bytes=2**28),
        H200,
        {"link_bytes_per_s", VRAM, "product_ops_per_s"},
    ),
    "a prompt on the CPU": (prefill_on_cpu(ALL, 512), H200, {"cpu_ops_per_s", CORES}),
    "a prompt on the CPU, slow memory": (
        prefill_on_cpu(ALL, 64),
        replace(H200, read_bytes_per_s=1e9),
        {READ},
    ),
    "a prompt on the CPU, from the disk": (prefill_on_cpu(RESIDENT, 512), H200, {"disk_bytes_per_s"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_figure_follows_the_rates_that_decide_it_and_no_others(name: str) -> None:
    seconds, machine, expected = CASES[name]
    assert set(influences(seconds, machine)) == expected


@pytest.mark.parametrize("hit_rate", [1 - 1e-12, 0.5])
def test_a_layer_that_may_miss_is_joined_and_one_that_cannot_is_not(hit_rate: float) -> None:
    """Where the bus takes no time, joining is all that missing costs."""
    no_time = replace(H200, link_bytes_per_s=1e18, vram_bytes_per_s=1e18)
    whole, some = (decode_seconds(FULL_SIZES, no_time, (rate,) * 40) for rate in (1.0, hit_rate))
    assert some - whole == pytest.approx(40 * JOIN_LAUNCHES * H200.shares.launch_s, rel=1e-4)
    mixed = decode_seconds(FULL_SIZES, no_time, (1.0,) * 30 + (hit_rate,) * 10)
    assert mixed - whole == pytest.approx(10 * JOIN_LAUNCHES * H200.shares.launch_s, rel=1e-4)


@given(st.integers(1, 12), st.integers(10**5, 10**7), rates)
def test_shared_misses_run_side_by_side_and_then_alone(count: int, size: int, machine: Rates) -> None:
    machine = replace(machine, cpu_bytes_per_s=1e18)  # memory bounds the CPU
    split = split_misses(count, size, machine)
    if not split.num_cpu:
        assert split.seconds == pytest.approx(count * size / (machine.shares.bus * machine.link_bytes_per_s))
        return
    cpu_alone = split.num_cpu * size / (machine.shares.misses * machine.read_bytes_per_s)
    cpu_beside = split.num_cpu * size / (machine.shares.misses_beside * machine.read_beside_link)
    bus_alone = split.num_bus * size / (machine.shares.bus * machine.link_bytes_per_s) - machine.handshake_s
    share_left = max(0.0, bus_alone) * machine.shares.bus * machine.link_bytes_per_s / size
    bus_beside = share_left * size / (machine.shares.bus_beside * machine.link_beside_read)
    if cpu_beside <= bus_beside:
        rest = (1 - cpu_beside / bus_beside) * bus_alone
        expected = cpu_beside + rest
    else:
        expected = bus_beside + (1 - bus_beside / cpu_beside) * cpu_alone
    assert split.seconds == pytest.approx(machine.handshake_s + expected)


@given(st.integers(0, 2**32), st.floats(0, 50), st.sampled_from([1, 7, 512]))
def test_no_expert_is_expected_to_get_more_rows_than_there_are(seed: int, skew: float, count: int) -> None:
    uses = np.random.default_rng(seed).random((40, 256)) ** skew
    rows = expected_rows(FULL_SIZES, uses, count)
    assert (rows <= count).all()
    touched = expected_touched(rows, count)
    assert ((touched >= 0) & (touched <= 1)).all()
    assert (touched[rows == count] == 1).all()


def test_an_expert_that_every_token_wants_gets_every_row() -> None:
    uses = np.ones((40, 256))
    uses[:, 3] = 1e6
    assert (expected_rows(FULL_SIZES, uses, 100)[:, 3] == 100).all()


def test_what_is_missed_on_the_cpu_is_read_and_then_computed() -> None:
    read_s = FULL_SIZES.num_experts_per_tok * sum(FULL_SIZES.expert_bytes) / H200.disk_bytes_per_s
    assert on_cpu(0.0)(H200) - on_cpu(1.0)(H200) == pytest.approx(read_s + 40 * DISK_WAIT_S)
