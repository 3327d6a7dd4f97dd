"""The cost model: it keeps to what it was fitted to, and never says that more memory or speed is slower."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.full_size_forecast import FULL_SIZES
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement import cost
from coldstream.placement.cost import (
    decode_seconds,
    decode_seconds_on_cpu,
    miss_times,
    miss_times_of,
    prefetch_gain,
    split_misses,
    staged_per_s,
)
from coldstream.placement.forecast import NEXT_BYTES, Known, forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.hit_rates import PUBLISHED, HitCurve
from coldstream.placement.plan import FixedPart, Tier, plan_placement
from coldstream.placement.prompt_cost import prefill_seconds
from coldstream.placement.rates import Rates

GIB = 2**30
Q4_BYTES = 1769472

# Qwen3.6-35B-A3B in Q4_K_M and an H200, as docs/results/gpu has them.
H200 = Rates(
    read_bytes_per_s=1.5e11,
    link_bytes_per_s=5.2e10,
    read_beside_link=1.1e11,
    link_beside_read=4.5e10,
    vram_bytes_per_s=4.28e12,
    product_ops_per_s=8.3e14,
    num_cores=16,
    cpu_ops_per_s=16 * 4.4e11,
    cpu_bytes_per_s=16 * 2e10,
    handshake_s=6e-6,
    disk_bytes_per_s=2e9,
)
MIXERS = MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 2e10)
FIXED = FixedPart(16384, "f16", 8192, FULL_SIZES.dense_bytes, GIB // 2, GIB)
MEASURED_PREFILL = {168: 8179, 512: 16036, 2048: 25690, 8192: 27719}  # streaming_shared.json


def test_all_resident_is_as_fast_as_it_was_measured() -> None:
    plan = plan_placement(FULL_SIZES, FIXED, 30 * GIB)
    expected = forecast(plan, Known(FULL_SIZES, H200, PUBLISHED))
    assert expected.hit_rate == 1.0
    assert expected.decode == pytest.approx(569, rel=0.03)
    for length, measured in MEASURED_PREFILL.items():
        assert expected.prefill[length] == pytest.approx(measured, rel=0.08)


def test_each_gib_makes_it_faster() -> None:
    known = Known(FULL_SIZES, H200, PUBLISHED)
    plan = plan_placement(FULL_SIZES, FIXED, FIXED.total + GIB // 4)
    before = forecast(plan, known)
    while not plan.is_all_resident:
        plan = plan_placement(FULL_SIZES, FIXED, plan.budget_bytes + NEXT_BYTES)
        after = forecast(plan, known)
        assert after.decode > before.decode
        assert after.hit_rate > before.hit_rate
        assert after.cold_token_bytes < before.cold_token_bytes
        for length, speed in after.prefill.items():
            # A ring with one more buffer has smaller ones, so that a step has more groups to launch.
            assert speed >= 0.99 * before.prefill[length]
        before = after


rates = st.builds(
    lambda read, link, share, slowed, handshake: replace(
        H200,
        read_bytes_per_s=read,
        link_bytes_per_s=link,
        read_beside_link=read * share,
        link_beside_read=link * slowed,
        handshake_s=handshake,
    ),
    st.floats(1e10, 5e11),
    st.floats(5e9, 1e11),
    st.floats(0.1, 1.0),
    st.floats(0.1, 1.0),
    st.floats(1e-6, 1e-4),
)


@given(st.integers(0, 12), st.integers(10**5, 10**7), rates)
def test_misses_are_split_no_worse_than_by_one_side_alone(misses: int, size: int, machine: Rates) -> None:
    split = split_misses(misses, size, machine)
    assert split.num_cpu + split.num_bus == misses
    by_bus = misses * size / (0.85 * machine.link_bytes_per_s)
    assert 0 <= split.seconds <= by_bus * (1 + 1e-2)
    assert split_misses(misses + 1, size, machine).seconds >= split.seconds * (1 - 1e-2)


def test_a_slow_link_leaves_all_to_the_cpu_and_a_slow_cpu_to_the_link() -> None:
    slow_link = replace(H200, link_bytes_per_s=1e8, link_beside_read=1e8)
    assert split_misses(8, Q4_BYTES, slow_link).num_bus == 0
    slow_cpu = replace(H200, cpu_bytes_per_s=1e8)
    assert split_misses(8, Q4_BYTES, slow_cpu).num_cpu == 0
    both = split_misses(8, Q4_BYTES, H200)
    assert min(both.num_cpu, both.num_bus) > 0
    assert split_misses(0, Q4_BYTES, H200).seconds == 0.0
    table = miss_times(Q4_BYTES, H200).by_misses(8)
    assert table == tuple(split_misses(misses, Q4_BYTES, H200).num_bus for misses in range(9))


def test_several_rows_take_the_cpu_longer_where_it_is_bound_by_products() -> None:
    times = miss_times(Q4_BYTES, H200)
    assert list(times.cpu) == sorted(times.cpu)
    assert times.cpu[0] == times.cpu[7] < times.cpu[-1], "eight rows wait for memory, 64 do not"
    assert times.bus == pytest.approx(1e9 * Q4_BYTES / staged_per_s(H200), rel=1e-3)
    row_bus = H200.shares.bus_beside * H200.link_beside_read
    assert times.row_bus == pytest.approx(staged_per_s(H200) / row_bus * times.bus, rel=1e-3)
    slow = miss_times(Q4_BYTES, replace(H200, cpu_bytes_per_s=2 * 8.5e9))
    assert slow.cpu[1] == pytest.approx(1.4 * slow.cpu[0], rel=1e-3)


def test_what_the_cores_were_measured_to_multiply_decides_and_not_what_is_assumed() -> None:
    rates = tuple(1e9 * rate for rate in (110.0, 110.0, 76.0, 39.0, 40.0, 20.0, 10.0))
    measured = replace(H200, expert_bytes_per_s=rates, cpu_bytes_per_s=1.0)
    times = miss_times(Q4_BYTES, measured)
    assert times.cpu[0] == miss_times(Q4_BYTES, H200).cpu[0], "one row waits for memory"
    at = {rows: times.cpu[rows - 1] for rows in (8, 12, 16, 24, 32, 64)}
    assert at[8] == at[12] == at[16] == pytest.approx(1e9 * Q4_BYTES / 39e9, rel=1e-3), (
        "more rows never take less"
    )
    assert at[32] == pytest.approx(1e9 * Q4_BYTES / 20e9, rel=1e-3)
    between = (Q4_BYTES / 40e9 + Q4_BYTES / 20e9) / 2
    assert at[24] == pytest.approx(1e9 * between, rel=1e-3)
    slow = replace(measured, expert_bytes_per_s=(1e8,) * 7)
    assert split_misses(8, Q4_BYTES, slow).num_cpu == 0
    layer, by_assumed = (
        miss_times(Q4_BYTES, each, is_layer=True) for each in (replace(H200, expert_bytes_per_s=rates), H200)
    )
    assert layer == by_assumed, "all cores share a layer's network, which was not measured"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2), rates)
def test_a_higher_hit_rate_is_never_slower(hit_rates: list[float], machine: Rates) -> None:
    worse, better = sorted(hit_rates)
    for seconds in (decode_seconds, decode_seconds_on_cpu):
        slow, fast = (seconds(FULL_SIZES, machine, (rate,) * 40) for rate in (worse, better))
        assert fast <= slow * (1 + 1e-9)


def test_equal_layers_add_up_like_unequal_ones() -> None:
    """Layers that differ by the last digit are none the same, and take as long."""
    equal = (0.7,) * 40
    unequal = tuple(0.7 * (1 + 1e-12 * layer) for layer in range(40))
    assert decode_seconds(FULL_SIZES, H200, equal) == pytest.approx(decode_seconds(FULL_SIZES, H200, unequal))
    assert prefetch_gain(FULL_SIZES, H200, equal) == pytest.approx(prefetch_gain(FULL_SIZES, H200, unequal))


def test_prefetching_pays_where_the_bus_has_time_for_it_and_enough_is_missing() -> None:
    def gain(hit_rate: float, machine: Rates = H200) -> float:
        return prefetch_gain(FULL_SIZES, machine, (hit_rate,) * 40)

    for pays, hit_rates in ((True, (0.0, 0.4, 0.7, 0.9, 0.94, 0.97)), (False, (0.995,))):
        for hit_rate in hit_rates:
            assert (gain(hit_rate) > 0) == pays, hit_rate
    assert gain(1.0) == 0.0
    slow_link = replace(H200, link_bytes_per_s=5e9, link_beside_read=5e9)
    assert all(gain(hit_rate, slow_link) < 0 for hit_rate in (0.4, 0.9, 0.97))


@given(st.floats(0, 1), rates)
def test_prefetching_gains_less_than_more_memory(hit_rate: float, machine: Rates) -> None:
    before = decode_seconds(FULL_SIZES, machine, (hit_rate,) * 40)
    whole = decode_seconds(FULL_SIZES, machine, (1.0,) * 40)
    assert prefetch_gain(FULL_SIZES, machine, (hit_rate,) * 40) <= (before - whole) * (1 + 1e-9)


@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 0.9])
def test_what_a_guess_saves_is_as_likely_as_the_guess_is_right(
    hit_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one expert that comes ahead, whatever the number of those that are missing."""
    monkeypatch.setattr(cost, "_fetches", lambda chosen, *_: (0, *(1,) * chosen))

    def gain(recall: float) -> float:
        monkeypatch.setattr(cost, "GUESSED", recall)
        return prefetch_gain(FULL_SIZES, H200, (hit_rate,) * 40)

    never, always = gain(0.0), gain(1.0)
    assert always > never
    for recall in (0.2, 0.45, 0.74):
        assert gain(recall) == pytest.approx(recall * always + (1 - recall) * never)


def test_a_layer_takes_as_long_whatever_is_behind_all_layers() -> None:
    assert FULL_SIZES.head is not None
    head = replace(FULL_SIZES.head, num_bytes=3 * FULL_SIZES.head.num_bytes)
    more = head.num_bytes - FULL_SIZES.head.num_bytes
    larger = replace(FULL_SIZES, head=head, dense_token_bytes=FULL_SIZES.dense_token_bytes + more)
    slow, fast = (decode_seconds(sizes, H200, (1.0,) * 40) for sizes in (larger, FULL_SIZES))
    assert slow > 1.1 * fast
    assert abs(miss_times_of(larger, H200).layer - miss_times_of(FULL_SIZES, H200).layer) <= 1


def test_a_forecast_counts_prefetching_where_it_pays_and_is_allowed() -> None:
    known = Known(FULL_SIZES, H200, PUBLISHED)
    for gib, pays in ((2, True), (10, True), (30, False)):
        plan = plan_placement(FULL_SIZES, FIXED, FIXED.total + gib * GIB)
        free, forbidden = forecast(plan, known), forecast(plan, replace(known, may_prefetch=False))
        assert free.prefetch_gain_s == forbidden.prefetch_gain_s
        gain = 1 / forbidden.decode - 1 / free.decode
        assert gain == pytest.approx(max(0.0, free.prefetch_gain_s), abs=1e-12)
        assert (gain > 1e-9) == pays


def test_trap_19_context_costs_what_the_cache_holds() -> None:
    at_start = decode_seconds(FULL_SIZES, H200, (1.0,) * 40)
    later = decode_seconds(FULL_SIZES, H200, (1.0,) * 40, context=16384)
    assert later - at_start == pytest.approx(16384 * 20480 / (0.45 * 4.28e12))
    assert later / at_start == pytest.approx(539 / 487, rel=0.03)


@given(st.integers(0, 2**32), st.sampled_from([16, 168, 2048]), rates)
def test_more_residents_never_slow_a_prompt_down(seed: int, length: int, machine: Rates) -> None:
    rng = np.random.default_rng(seed)
    resident = rng.random((40, 256)) < 0.3
    uses = rng.random((40, 256))
    more = resident | (rng.random((40, 256)) < 0.3)
    slow, fast = (prefill_seconds(FULL_SIZES, machine, mask, uses, length, 8192) for mask in (resident, more))
    assert fast <= slow * (1 + 1e-3)  # up to one expert more or less of the CPU's


@pytest.mark.sharded(of="plans")
@given(st.sampled_from(["vram", "ram"]), st.integers(0, 2**64), st.integers(0, 20 * GIB), rates)
def test_no_forecast_is_above_the_ceiling(tier: Tier, seed: int, more: int, machine: Rates) -> None:
    uses = np.random.default_rng(seed).exponential(size=(40, 256))
    budget = FIXED.total + GIB // 4 + more
    plan = plan_placement(FULL_SIZES, FIXED, budget, tier=tier, uses=uses)
    expected = forecast(plan, Known(FULL_SIZES, machine, PUBLISHED, uses))
    assert expected.decode <= expected.decode_ceiling * (1 + 1e-9)
    assert list(expected.prefill) == list(expected.prefill_ceiling)
    for length, speed in expected.prefill.items():
        assert speed <= expected.prefill_ceiling[length] * (1 + 1e-9)


def test_the_ceilings_are_bytes_over_bandwidth() -> None:
    whole = forecast(plan_placement(FULL_SIZES, FIXED, 30 * GIB), Known(FULL_SIZES, H200, PUBLISHED))
    assert whole.decode_ceiling == pytest.approx(4.28e12 / (1368551000 + 8 * sum(FULL_SIZES.expert_bytes)))
    least = plan_placement(FULL_SIZES, FIXED, FIXED.total + GIB // 16)
    none = forecast(least, Known(FULL_SIZES, H200, HitCurve((0.0, 0.99, 1.0), (0.0, 0.0, 1.0), "never")))
    assert none.decode_ceiling == pytest.approx((1.1e11 + 4.5e10) / (8 * sum(FULL_SIZES.expert_bytes)))
    cold = FULL_SIZES.all_expert_bytes - least.resident_bytes
    assert none.prefill_ceiling[2048] == pytest.approx(2048 / (cold / (1.1e11 + 4.5e10)), rel=0.02)


def test_what_was_not_measured_is_named() -> None:
    bare = Hardware("a CPU", ("avx2",), 4, 4, 2**34, 2**33)
    guessed = Rates.of(bare)
    assert len(guessed.assumed) == 8
    assert guessed.describe_assumed(["link_bytes_per_s", "handshake_s"]) == "link 24 GB/s, handshake 10 µs"
    gpu = GpuHardware("a GPU", "1.0", 2**33, 2**33, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
    known = Rates.of(
        replace(bare, read_bytes_per_s=5e10, row_bytes_per_s=4e10, mixers=MIXERS, gpu=gpu),
        disk_bytes_per_s=3e9,
    )
    assert known.assumed == ()
    assert known.describe_assumed(["link_bytes_per_s"]) == ""
    names = ["row_bytes_per_s", "mixers", "read_bytes_per_s"]
    attention = f"attention of one row {MIXERS.cached_bytes_per_s / 1e9:.3g} GB/s"
    assert known.describe_measured(names) == f"RAM 50 GB/s, products of one row 40 GB/s, {attention}"
    assert (known.read_beside_link, known.link_beside_read, known.handshake_s) == (3e10, 2e10, 7e-6)
    assert known.cpu_ops_per_s == 4 * 6.8e10
    assert Rates.of(replace(bare, cpu_flags=())).cpu_bytes_per_s < known.cpu_bytes_per_s


DENSE_SIZES = replace(
    FULL_SIZES,
    num_experts=1,
    num_experts_per_tok=1,
    expert_bytes=(GIB // 6,) * FULL_SIZES.num_layers,
    is_dense=True,
)


@given(held=st.integers(0, DENSE_SIZES.num_layers - 1), machine=rates)
def test_a_further_layer_of_a_dense_model_on_the_gpu_makes_no_token_slower(held: int, machine: Rates) -> None:
    missing = [0.0] * DENSE_SIZES.num_layers
    seconds = [
        decode_seconds(DENSE_SIZES, machine, [1.0] * count + missing[count:]) for count in (held, held + 1)
    ]
    assert seconds[1] <= seconds[0] * 1.02


def test_missing_layers_of_a_dense_model_take_what_was_measured() -> None:
    """Of the 27B without 48 of 64 networks and without any of them, docs/results/gpu/27b/layers.json."""
    sizes = replace(
        DENSE_SIZES, expert_bytes=(161_894_400,) * 64, dense_token_bytes=5_400_000_000, state_bytes=0
    )
    machine = replace(H200, read_bytes_per_s=1.34e11, read_beside_link=1.106e11, link_bytes_per_s=5.18e10)
    for missing, measured_s in ((48, 0.0661), (64, 0.0864)):
        held = 64 - missing
        expected = decode_seconds(sizes, machine, [1.0] * held + [0.0] * missing)
        assert expected == pytest.approx(measured_s, rel=0.12), missing
    assert prefetch_gain(sizes, machine, [0.0] * 64) == 0.0


def test_a_dense_layer_is_shared_by_other_times_than_an_expert() -> None:
    """The copy engine brings it, and all cores share its products."""
    expert, layer = miss_times(Q4_BYTES, H200), miss_times(Q4_BYTES, H200, is_layer=True)
    assert layer.bus < expert.bus
    assert layer.cpu[0] == expert.cpu[0]
    assert layer.cpu[7] > expert.cpu[7]
