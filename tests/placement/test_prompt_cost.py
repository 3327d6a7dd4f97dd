"""Prompts on a GPU: tiles of experts, tokens that choose alike, and the three ways of missing experts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import H200, rates

from bench.full_size_forecast import FULL_SIZES
from bench.report.tables import load
from coldstream.kernels.experts.shapes import MAX_SHARED_ROWS
from coldstream.models.cuda.limits import MAX_GRAPH_ROWS
from coldstream.placement.prompt_cost import (
    COPIES_LAUNCHES,
    COPY_LAUNCHES,
    GROUP_LAUNCHES,
    MAX_CPU_ROWS,
    MAX_RECORDED_ROWS,
    MOST_CPU_ROWS,
    PROMPT_LAUNCHES,
    RECORDED_GROUP_LAUNCHES,
    RECORDED_LAUNCHES,
    TILE_ROWS,
    UNPACK_SHARE,
    expected_rows,
    expected_touched,
    prefill_seconds,
    rows_with_cpu,
)
from coldstream.placement.rates import Rates
from coldstream.placement.sizes import BUFFER_BYTES, ModelSizes

SHAPE = (FULL_SIZES.num_layers, FULL_SIZES.num_experts)
NOTHING, ALL = np.zeros(SHAPE, bool), np.ones(SHAPE, bool)
SLOW_CPU = replace(H200, cpu_bytes_per_s=1e3)
ONLY_PRODUCTS = replace(H200, vram_bytes_per_s=1e30)


def seconds(count: int, machine: Rates, resident: np.ndarray = ALL, model: ModelSizes = FULL_SIZES) -> float:
    return prefill_seconds(model, machine, resident, None, count, 16384)


def test_neighbouring_tokens_touch_as_many_experts_as_was_counted() -> None:
    result = load("gpu/streaming_shared")
    found = 0
    for row in result["rows"]:
        if row["experts_gib"] == 0:
            count = row["tokens"]
            touched = expected_touched(expected_rows(FULL_SIZES, None, count), count).sum()
            assert touched == pytest.approx(row["wanted"], rel=0.06)
            found += 1
    assert found == 6


@given(st.integers(1, 20000))
def test_tokens_that_choose_alike_touch_no_more_than_independent_ones(count: int) -> None:
    rows = expected_rows(FULL_SIZES, None, count)
    touched, further = (
        expected_touched(rows, count),
        expected_touched(rows / count * (count + 1), count + 1),
    )
    assert (touched <= 1 - (1 - rows / count) ** count + 1e-12).all()
    assert (touched <= further + 1e-12).all()
    assert (touched >= rows / count - 1e-12).all()


def test_unpacking_an_expert_costs_the_same_for_one_row_and_for_a_tile() -> None:
    """Of one expert that every token chooses."""
    one = replace(FULL_SIZES, num_experts=1, num_experts_per_tok=1, dense_products=(), head=None)
    one = replace(one, token_parameters=one.num_layers * one.expert_parameters, attention_width=0)
    resident = np.ones((one.num_layers, 1), bool)
    nothing = replace(ONLY_PRODUCTS, product_ops_per_s=1e30)
    row, tile, tiles = (
        seconds(count, ONLY_PRODUCTS, resident, one) - seconds(count, nothing, resident, one)
        for count in (1, TILE_ROWS // 2, 64 * TILE_ROWS)
    )
    whole = tiles / (64 + UNPACK_SHARE / 2)  # half a tile more is unpacked, as the last one is not full
    assert UNPACK_SHARE * whole <= row <= tile <= whole
    assert tile - row == pytest.approx((1 - UNPACK_SHARE) * (TILE_ROWS / 2 - 1) / TILE_ROWS * whole)


@given(st.integers(1, 20000), st.integers(1, 2000), rates)
def test_a_longer_prompt_is_never_sooner_over(count: int, more: int, machine: Rates) -> None:
    assert seconds(count, machine) <= seconds(count + more, machine)


@given(st.sampled_from([168, MAX_SHARED_ROWS, MAX_CPU_ROWS, 16384]), rates)
def test_missing_experts_never_make_a_prompt_faster_and_no_link_never_helps(
    count: int, machine: Rates
) -> None:
    whole, none = seconds(count, machine), seconds(count, machine, NOTHING)
    assert whole <= none * (1 + 1e-9)
    slow = replace(
        machine, link_bytes_per_s=machine.link_bytes_per_s / 2, link_beside_read=machine.link_beside_read / 2
    )
    assert none <= seconds(count, slow, NOTHING) * (1 + 1e-3)  # up to one expert of the CPU's


def test_the_cpu_has_a_part_only_in_steps_that_it_can_take() -> None:
    slow = replace(H200, cpu_bytes_per_s=H200.cpu_bytes_per_s / 1000)
    for count in (MAX_SHARED_ROWS, MAX_SHARED_ROWS + 1, MAX_CPU_ROWS):
        assert seconds(count, slow, NOTHING) > 1.05 * seconds(count, H200, NOTHING)
    assert seconds(MOST_CPU_ROWS + 1, slow, NOTHING) == seconds(MOST_CPU_ROWS + 1, H200, NOTHING)


@given(rates, st.sampled_from([256, 2048, 4096, 8192, 16384]), st.booleans())
def test_the_cpu_has_room_for_longer_steps_where_they_are_sooner_over_with_it(
    machine: Rates, chunk_size: int, has_all: bool
) -> None:
    resident = ALL if has_all else NOTHING
    rows = rows_with_cpu(FULL_SIZES, machine, resident, chunk_size)
    assert rows in {min(size, chunk_size) for size in (MAX_CPU_ROWS, 4096, MOST_CPU_ROWS)}
    idle = replace(machine, cpu_bytes_per_s=1e-3, expert_bytes_per_s=None)
    assert rows_with_cpu(FULL_SIZES, idle, resident, chunk_size) == min(MAX_CPU_ROWS, chunk_size)
    if rows > MAX_CPU_ROWS:
        with_cpu, without = (
            prefill_seconds(FULL_SIZES, each, resident, None, rows, rows) for each in (machine, idle)
        )
        assert with_cpu < 0.9 * without


def test_a_slow_bus_wants_the_cpu_in_long_steps_and_a_slow_gpu_does_not() -> None:
    slow_bus = replace(H200, link_bytes_per_s=7e9, link_beside_read=7e9)
    assert rows_with_cpu(FULL_SIZES, slow_bus, NOTHING, 16384) == MOST_CPU_ROWS
    slow_gpu = replace(slow_bus, product_ops_per_s=1e13)
    assert rows_with_cpu(FULL_SIZES, slow_gpu, NOTHING, 16384) == MAX_CPU_ROWS


@given(st.sampled_from([168, 512, 2048]), st.integers(2**23, 2**26), st.integers(0, 2**25), rates)
def test_a_larger_ring_never_makes_a_prompt_slower(count: int, ring: int, more: int, machine: Rates) -> None:
    """Up to where it gets more buffers instead of larger ones."""
    small, large = (
        prefill_seconds(FULL_SIZES, machine, NOTHING, None, count, 512, ring_bytes=num_bytes)
        for num_bytes in (ring, ring + more)
    )
    assert large <= small * (1 + 1e-3)  # up to one expert of the CPU's


def launching(count: int, experts_of_group: int, of_copies: float) -> float:
    """Seconds in which a thread launches a step without any experts, with those in groups of so many."""
    groups = expected_touched(expected_rows(FULL_SIZES, None, count), count).sum() / experts_of_group
    of_layer, of_group = PROMPT_LAUNCHES, GROUP_LAUNCHES
    if count <= MAX_RECORDED_ROWS:
        of_layer, of_group = RECORDED_LAUNCHES, RECORDED_GROUP_LAUNCHES
    launches = FULL_SIZES.num_layers * of_layer + groups * (of_group + of_copies)
    return float(H200.shares.queue_s * launches)


def test_steps_are_recorded_up_to_as_many_rows_as_a_runner_records() -> None:
    assert MAX_RECORDED_ROWS == MAX_GRAPH_ROWS
    assert launching(MAX_RECORDED_ROWS, 16, COPY_LAUNCHES) < launching(
        MAX_RECORDED_ROWS + 1, 16, COPY_LAUNCHES
    )


def test_a_ring_of_single_experts_is_bound_by_the_thread_that_launches() -> None:
    tiny = prefill_seconds(FULL_SIZES, SLOW_CPU, NOTHING, None, 256, 256, ring_bytes=7 * 2**20)
    assert tiny == pytest.approx(launching(256, 1, COPY_LAUNCHES), rel=0.02)


@pytest.mark.parametrize("count", [MAX_CPU_ROWS, MAX_CPU_ROWS + 1, 8192])
def test_a_long_step_takes_no_less_than_its_launches(count: int) -> None:
    """However fast the bus and the GPU are. Without a CPU that helps, each group has fewer copies."""
    fast = {"vram_bytes_per_s": 1e30, "product_ops_per_s": 1e30, "link_bytes_per_s": 1e30}
    machine = replace(SLOW_CPU, link_beside_read=1e30, **fast)
    found = prefill_seconds(FULL_SIZES, machine, NOTHING, None, count, count, ring_bytes=8 * BUFFER_BYTES)
    group = BUFFER_BYTES // max(FULL_SIZES.expert_bytes)
    least = launching(count, group, COPY_LAUNCHES)
    assert found == pytest.approx(least)
    assert found < launching(count, group, COPIES_LAUNCHES)


def test_steps_that_the_device_divides_wait_for_no_launches() -> None:
    machine = replace(H200, vram_bytes_per_s=1e30, product_ops_per_s=1e30, link_bytes_per_s=1e15)
    times = seconds(MAX_SHARED_ROWS, machine, NOTHING), seconds(MAX_SHARED_ROWS + 1, machine, NOTHING)
    assert times[0] < launching(MAX_SHARED_ROWS, 256, COPY_LAUNCHES) < times[1]


def test_only_the_last_row_meets_the_head() -> None:
    none = replace(ONLY_PRODUCTS, product_ops_per_s=1e30)
    without = replace(FULL_SIZES, head=None)
    times = [seconds(2048, ONLY_PRODUCTS, model=model) for model in (FULL_SIZES, without)]
    head = FULL_SIZES.head
    assert head is not None
    assert times[1] > 1.1 * times[0]
    assert seconds(2048, none) == pytest.approx(seconds(2048, none, model=without))


@pytest.mark.parametrize("ring", [2**26, 2**28])
def test_what_a_ring_does_not_hold_comes_behind_the_gpus_work(ring: int) -> None:
    """Of a layer, whose copies cannot go on while the GPU is busy and the ring is full."""
    count, copied = (
        2 * MOST_CPU_ROWS,
        sum(FULL_SIZES.expert_bytes) * FULL_SIZES.num_experts / H200.link_bytes_per_s,
    )
    compute, first = seconds(count, H200), copied / FULL_SIZES.num_layers
    held = FULL_SIZES.num_layers * ring / H200.link_bytes_per_s
    found = prefill_seconds(FULL_SIZES, H200, NOTHING, None, count, count, ring_bytes=ring)
    assert found == pytest.approx(compute + copied - held + first, rel=1e-4)
    whole = prefill_seconds(FULL_SIZES, H200, NOTHING, None, count, count)
    assert whole == pytest.approx(max(compute, copied) + first, rel=1e-4)
    assert whole < found


@pytest.mark.parametrize("count", [MAX_SHARED_ROWS + 1, MAX_CPU_ROWS])
def test_rows_go_to_the_cpu_and_come_back_over_the_bus(count: int) -> None:
    """Here of nearly all experts: the bus is slow, and the CPU takes no time for them."""
    slow = {"link_bytes_per_s": 1e9, "link_beside_read": 1e9}
    machine = replace(H200, cpu_bytes_per_s=1e30, read_beside_link=1e30, **slow)
    moved, unmoved = (
        seconds(count, machine, NOTHING, replace(FULL_SIZES, hidden_size=size))
        for size in (FULL_SIZES.hidden_size, 0)
    )
    rows = FULL_SIZES.num_layers * count * (1 + FULL_SIZES.num_experts_per_tok)
    assert 0.9 < (moved - unmoved) / (rows * FULL_SIZES.row_bytes / 1e9) <= 1.0
