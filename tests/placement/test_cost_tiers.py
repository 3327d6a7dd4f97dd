"""The cost of a GPU, RAM and a disk together: never less than without the disk, nor more for more memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import FIXED, GIB, H200

from bench.full_size_forecast import FULL_SIZES
from coldstream.placement.cost import DISK_WAIT_S, decode_seconds, disk_seconds, split_misses
from coldstream.placement.forecast import Known, decode_ceiling, forecast, rates_used
from coldstream.placement.hit_rates import PUBLISHED
from coldstream.placement.plan import plan_placement
from coldstream.placement.pool_plan import HostPart, PoolPlan, plan_pool
from coldstream.placement.prompt_cost import prefill_seconds

HOST = HostPart(GIB // 2, GIB // 4, GIB)
PLACEMENT = plan_placement(FULL_SIZES, FIXED, FIXED.total + 3 * GIB)
KNOWN = Known(FULL_SIZES, H200, PUBLISHED)


def pool(budget: int) -> PoolPlan:
    return plan_pool(PLACEMENT, FULL_SIZES.expert_bytes, HOST, budget)


@pytest.mark.parametrize("num_misses", [1, 4, 8])
def test_without_the_bus_the_cpu_computes_all_that_is_missed(num_misses: int) -> None:
    size = max(FULL_SIZES.expert_bytes)
    alone = split_misses(num_misses, size, H200, streams=False)
    assert (alone.num_cpu, alone.num_bus) == (num_misses, 0)
    assert alone.seconds >= split_misses(num_misses, size, H200).seconds
    no_link = replace(H200, link_bytes_per_s=1.0, link_beside_read=1.0)
    hit_rates = [0.5] * FULL_SIZES.num_layers
    expected = decode_seconds(FULL_SIZES, no_link, hit_rates)
    assert decode_seconds(FULL_SIZES, H200, hit_rates, streams=False) == pytest.approx(expected)
    assert decode_seconds(FULL_SIZES, H200, hit_rates) < expected


def test_what_a_token_waits_for_the_disk() -> None:
    none, all_of_it = [0.0] * FULL_SIZES.num_layers, [1.0] * FULL_SIZES.num_layers
    assert disk_seconds(FULL_SIZES, H200, none) == 0
    num_bytes = FULL_SIZES.num_experts_per_tok * sum(FULL_SIZES.expert_bytes)
    expected = num_bytes / H200.disk_bytes_per_s + FULL_SIZES.num_layers * DISK_WAIT_S
    assert disk_seconds(FULL_SIZES, H200, all_of_it) == pytest.approx(expected)


def test_a_prompt_reads_what_is_on_the_disk_while_all_else_goes_on() -> None:
    shape = (FULL_SIZES.num_layers, FULL_SIZES.num_experts)
    resident, on_disk = np.zeros(shape, bool), np.zeros(shape, bool)

    def seconds(disk_bytes_per_s: float) -> float:
        rates = replace(H200, disk_bytes_per_s=disk_bytes_per_s)
        return prefill_seconds(FULL_SIZES, rates, resident, None, 8192, 8192, on_disk)

    without = prefill_seconds(FULL_SIZES, H200, resident, None, 8192, 8192)
    assert seconds(1.0) == without
    on_disk[:, 100:] = True
    assert seconds(1e15) == without
    num_bytes = (FULL_SIZES.num_experts - 100) * sum(FULL_SIZES.expert_bytes)
    expected = num_bytes / 1e9 * (1 + 1 / FULL_SIZES.num_layers)  # the first layer's overlap with nothing
    assert seconds(1e9) == pytest.approx(expected, rel=0.02)


@pytest.mark.sharded(of="models on the CPU")
@given(st.floats(2, 12), st.floats(0, 4))
def test_more_ram_is_never_slower_and_no_forecast_beats_its_ceiling(gib: float, more: float) -> None:
    small, large = (forecast(PLACEMENT, KNOWN, pool=pool(int(size * GIB))) for size in (gib, gib + more))
    assert large.decode >= small.decode
    assert 0 <= large.disk_rate <= small.disk_rate <= 1 - small.hit_rate
    for each in (small, large):
        assert each.decode <= each.decode_ceiling
        for length, speed in each.prefill.items():
            assert speed <= each.prefill_ceiling[length]
    for length, speed in large.prefill.items():
        assert speed >= small.prefill[length]


def test_with_room_for_all_nothing_comes_from_the_disk() -> None:
    both = forecast(PLACEMENT, KNOWN, pool=pool(40 * GIB))
    assert both.disk_rate == 0
    mapped = forecast(PLACEMENT, KNOWN)
    assert both.prefill == mapped.prefill
    assert both.decode <= mapped.decode
    assert "disk_bytes_per_s" in rates_used(PLACEMENT, pool(3 * GIB))
    assert "disk_bytes_per_s" not in rates_used(PLACEMENT)


def test_a_plan_for_ram_is_measured_by_the_rates_that_it_uses() -> None:
    cold = replace(PLACEMENT, tier="ram")
    assert not cold.is_all_resident
    assert rates_used(cold) == ("read_bytes_per_s", "row_bytes_per_s", "mixers", "disk_bytes_per_s")
    whole = plan_placement(FULL_SIZES, FIXED, FIXED.total + 40 * GIB)
    assert whole.is_all_resident
    assert rates_used(replace(whole, tier="ram")) == ("read_bytes_per_s", "row_bytes_per_s", "mixers")
    assert set(rates_used(whole)) == {"vram_bytes_per_s", "product_ops_per_s"}
    assert set(rates_used(PLACEMENT)) - set(rates_used(whole)) == {
        "read_bytes_per_s",
        "link_bytes_per_s",
        "handshake_s",
    }


def test_in_ram_no_token_is_faster_than_all_its_bytes_are_read() -> None:
    """Those that come from the disk are read from RAM as well, however fast the disk is."""
    fast = replace(H200, disk_bytes_per_s=1e30)
    num_bytes = FULL_SIZES.dense_token_bytes + FULL_SIZES.num_experts_per_tok * sum(FULL_SIZES.expert_bytes)
    for rate in (0.0, 0.5, 1.0):
        found = decode_ceiling(FULL_SIZES, fast, [rate] * FULL_SIZES.num_layers, "ram")
        assert found == pytest.approx(fast.read_bytes_per_s / num_bytes)
    slow = decode_ceiling(
        FULL_SIZES, replace(H200, disk_bytes_per_s=1e6), [0.5] * FULL_SIZES.num_layers, "ram"
    )
    cold = FULL_SIZES.num_experts_per_tok * sum(FULL_SIZES.expert_bytes) / 2
    assert slow == pytest.approx(1e6 / cold)
