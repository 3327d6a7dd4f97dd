"""Experts computed by groups of pairs: the GPU's kernels on the host against the reference, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same
from grouped_cases import EVERY_TYPE, Q4K, Q5K, Q6K, Q8, Layer, Types, distinct_ids
from random_blocks import activations

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.experts.cuda import gate_up_of
from coldstream.kernels.experts.cuda_grouped import MAX_GROUPED_ROWS, MAX_ITEM_ROWS, ChosenIds, plan_groups
from host_device import LIMITS, TURING_LIMITS

pytestmark = pytest.mark.usefixtures("host")


@pytest.mark.sharded(9)
@pytest.mark.parametrize("quant_type", EVERY_TYPE, ids=lambda t: t.name)
def test_every_type(quant_type: QuantType) -> None:
    layer = Layer.random((quant_type,) * 3, (5, 256, 512), (quant_type,) * 3, 256)
    layer.check(activations(1, 6, 512), distinct_ids(6, 3, 5, seed=1))


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize(
    ("types", "shared_types"),
    [((Q4K, Q4K, Q6K), (Q4K, Q4K, Q4K)), ((Q4K, Q8, Q5K), (Q8, Q6K, QuantType.Q5_0))],
    ids=str,
)
def test_types_of_either_kind_of_scales(types: Types, shared_types: Types) -> None:
    layer = Layer.random(types, (4, 256, 512), shared_types, 512)
    layer.check(activations(2, 5, 512), distinct_ids(5, 2, 4, seed=2))


@pytest.mark.sharded(6)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 17, MAX_GROUPED_ROWS])
def test_every_number_of_rows_of_an_expert(tokens: int) -> None:
    """One expert that all tokens have, others that some have, and one that none has."""
    layer = Layer.random((Q4K, Q4K, Q8), (7, 32, 256), (Q8, Q8, Q8), 32)
    ids = distinct_ids(tokens, 3, 5, seed=tokens) + 1
    ids[:, 1] = 0
    for item_rows in (1, 3, MAX_ITEM_ROWS):
        layer.check(activations(tokens, tokens, 256), ids, item_rows)
    layer.check(activations(tokens, tokens, 256), ids[:, 1:2].contiguous(), MAX_ITEM_ROWS)


@pytest.mark.sharded(6)
@pytest.mark.parametrize(("size", "cols"), [(36, 2304), (100, 416), (288, 4352)])
@pytest.mark.parametrize("types", [(Q5K, Q5K, Q8), (Q6K, Q4K, Q8), (Q8, Q8, Q8)], ids=str)
def test_several_passes_and_sizes_that_units_do_not_divide(types: Types, size: int, cols: int) -> None:
    if cols % 256:
        types = (Q8, Q8, Q8)
    size = -(-size // 32) * 32
    layer = Layer.random(types, (3, size, cols), None)
    layer.check(activations(3, 5, cols), distinct_ids(5, 2, 3, seed=3), MAX_ITEM_ROWS)


@pytest.mark.sharded(of="kernels")
def test_pairs_whose_expert_is_not_there_are_left_alone() -> None:
    layer = Layer.random((Q4K, Q4K, Q8), (6, 32, 256), (Q4K, Q4K, Q4K), 256)
    x, chosen = activations(4, 9, 256), ChosenIds(distinct_ids(9, 3, 6, seed=4), 6)
    expected, shared = layer.run(x, chosen, MAX_ITEM_ROWS)
    for table in (layer.weights.gate, layer.weights.up, layer.weights.down):
        table.addresses[2:4] = 0
    actual, still_shared = layer.run(x, chosen, MAX_ITEM_ROWS)
    is_gone = (chosen.ids == 2) | (chosen.ids == 3)
    assert is_gone.any()
    assert actual[is_gone].isnan().all()
    assert_same(actual[~is_gone], expected[~is_gone])
    assert shared is not None
    assert still_shared is not None
    assert_same(still_shared, shared)


def test_more_pairs_than_threads() -> None:
    """In a group's list, and in the sums over all lists."""
    layer = Layer.random((Q8, Q8, Q8), (70, 32, 32), None)
    layer.check(activations(6, MAX_GROUPED_ROWS, 32), distinct_ids(MAX_GROUPED_ROWS, 13, 70, seed=6))


def test_more_tokens_and_floats_are_for_other_kernels() -> None:
    layer = Layer.random((Q4K, Q4K, Q8), (3, 32, 256), None)
    with pytest.raises(ValueError, match="not computed by groups"):
        layer.run(activations(1, 33, 256), ChosenIds(distinct_ids(33, 1, 3, 1), 3), 8)
    floats = Layer.random((QuantType.F32,) * 3, (3, 32, 256), None)
    with pytest.raises(ValueError, match="not computed by groups"):
        floats.run(activations(1, 2, 256), ChosenIds(distinct_ids(2, 1, 3, 1), 3), 8)


@pytest.mark.parametrize(
    "limits",
    [TURING_LIMITS, LIMITS, DeviceLimits(132, 227 << 10, 228 << 10)],
    ids=["Turing", "99 KiB", "Hopper"],
)
def test_a_block_s_memory_holds_what_is_planned_for_it(limits: DeviceLimits) -> None:
    layer = Layer.random((Q4K, Q4K, Q8), (3, 32, 256), None)
    shapes = [shape for matrix in gate_up_of(layer.weights).matrix for shape in matrix.shape]
    for cols, item_rows in ((2048, 8), (4096, 8), (8192, 4)):
        chosen = ChosenIds(torch.zeros(32, 8, dtype=torch.int32), 256)
        plan, shared_bytes, blocks = plan_groups(limits, shapes, cols // 256 * 276, chosen, item_rows)
        assert shared_bytes <= limits.shared_per_block
        assert blocks * (shared_bytes + 1024) <= limits.shared_per_processor
        places = [
            getattr(plan, name)
            for name in ("rows_at", "accumulators_at", "sums_at", "members_at", "items_at")
        ]
        assert places == sorted(places)
        assert plan.rows_at >= 4 * (256 + 3 * 256)
