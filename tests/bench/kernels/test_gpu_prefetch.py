"""One layer's step with and without prefetching: its plan, which experts have slots, what a row says."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.gpu_prefetch import (
    NUM_LAYERS,
    STEPS,
    Layers,
    check_counts,
    expert_bytes,
    make_layers,
    matrices_of,
    plan_steps,
    row_of,
    slot_addresses,
)
from bench.random_model import Shape
from coldstream.experts.prefetch import Prefetching
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.skinny_shapes import instance_for

NOTHING = dict.fromkeys(("bus_pairs", "fetched", "used", "given_up"), 0)


def counts_of(missing: int, bus_pairs: int, fetched: int) -> dict[str, dict[str, int]]:
    """By way, of all steps; a guess that is not read on demand is used, one not fetched is given up."""
    total = missing * STEPS
    return {
        "resident": NOTHING,
        "on_demand": {**NOTHING, "bus_pairs": total},
        "prefetched": {
            "bus_pairs": bus_pairs,
            "fetched": fetched,
            "used": total - bus_pairs,
            "given_up": total - fetched,
        },
    }


@given(st.lists(st.integers(0, 39), min_size=1, max_size=16, unique=True), st.data())
def test_all_chosen_but_the_last_missing_ones_have_slots(chosen: list[int], data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, len(chosen)))
    addresses = slot_addresses(40, chosen, missing, 1024, 96)
    with_slots = chosen[: len(chosen) - missing]
    assert [addresses[expert] for expert in with_slots] == [1024 + 96 * i for i in range(len(with_slots))]
    assert sum(address != 0 for address in addresses) == len(with_slots)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return make_layers(Shape(experts=16, experts_per_token=4), "cpu", torch.clone)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(limits, "_limits_of", lambda index: DeviceLimits(132, 232448, 233472, True))


@pytest.mark.usefixtures("h200")
def test_a_step_that_prefetches_takes_one_kernel_more_and_the_rings_memory(layers: Layers) -> None:
    plain_memory, plain = plan_steps(layers, None)
    assert {instance for _, instance in plain} == {
        "rms_norm_rows<true>",
        "router_gemv<true, 1, false>",
        instance_for("coldstream::expert_gate_up", {QuantType.Q4_K}),
        instance_for("coldstream::expert_down", {QuantType.Q4_K}),
        "combine_rms_norm_rows<true, gated_shared>",
    }
    ring_bytes = []
    for missing in (1, 4):
        memory, noted = plan_steps(layers, Prefetching(1, missing))
        assert {instance for _, instance in noted - plain} == {"prefetch_experts"}
        assert plain <= noted
        ring_bytes.append(memory.persistent_bytes - plain_memory.persistent_bytes)
        assert memory.workspace_bytes >= plain_memory.workspace_bytes
    assert ring_bytes[0] > 2 * expert_bytes(layers.shape)
    assert ring_bytes[1] > 2 * 4 * expert_bytes(layers.shape)


def test_layers_are_alike_but_share_only_what_lies_on_the_host(layers: Layers) -> None:
    assert len(layers.experts) == len(layers.routers) == NUM_LAYERS
    first, last = layers.routers
    assert torch.equal(first.blocks, last.blocks)
    assert first.blocks.data_ptr() != last.blocks.data_ptr()
    steps = [rows * QuantType.Q4_K.row_bytes(cols) for rows, cols in matrices_of(layers.shape)]
    assert sum(steps) == expert_bytes(layers.shape)
    for weights in layers.experts:
        tables = (weights.gate, weights.up, weights.down)
        assert [table.step for table in tables] == steps
        assert [table.mapped for table in tables] == [data.data_ptr() for data in layers.host]
        assert all(table.is_partial and not table.addresses.any() for table in tables)
        assert [data.numel() for data in layers.host] == [len(tables[0].addresses) * step for step in steps]


def row(missing: int, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    samples = {"resident": [50, 52, 51], "on_demand": [90, 80, 91], "prefetched": [60, 61, 70]}
    return row_of(missing, 40, samples, counts, 2_000_000, 40e9)


def test_a_row_says_what_was_saved_and_what_moved() -> None:
    made = row(2, counts_of(2, bus_pairs=0, fetched=2 * STEPS))
    assert (made["resident_us"], made["prefetched_us"]) == (51, 61)
    assert (made["on_demand_us"], made["saved_us"]) == (90, 29)
    assert made["link_floor_us"] == pytest.approx(100)
    assert made["on_demand_bytes"] == made["prefetched_bytes"] == 4_000_000
    assert made["given_up_bytes_at_most"] == 0


def test_a_row_shows_copies_in_excess() -> None:
    late = row(2, counts_of(2, bus_pairs=3 * STEPS // 2, fetched=STEPS))
    assert (late["fetched"], late["used"], late["bus_pairs"], late["given_up"]) == (1.0, 0.5, 1.5, 1.0)
    assert late["prefetched_bytes"] == 5_000_000
    assert late["given_up_bytes_at_most"] == 2_000_000


@pytest.mark.parametrize(
    ("way", "name", "change"),
    [
        ("resident", "bus_pairs", 1),
        ("on_demand", "bus_pairs", -1),
        *(("prefetched", name, change) for name in NOTHING for change in (-5, 5)),
    ],
)
def test_trap_a_missing_expert_that_came_in_no_way_or_in_two_makes_no_figure(
    way: str, name: str, change: int
) -> None:
    counts = counts_of(4, bus_pairs=STEPS, fetched=3 * STEPS)
    counts[way] = {**counts[way], name: counts[way][name] + change}
    with pytest.raises(RuntimeError, match="4 missing experts in"):
        row(4, counts)


def test_sums_may_be_off_by_what_one_step_fetched() -> None:
    counts = counts_of(2, bus_pairs=0, fetched=2 * STEPS)
    for name in ("fetched", "used"):
        counts["prefetched"][name] -= 2
    check_counts(2, counts)
    counts["prefetched"]["used"] -= 1
    with pytest.raises(RuntimeError, match="2 missing experts"):
        check_counts(2, counts)
