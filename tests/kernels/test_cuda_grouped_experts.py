"""Experts computed by groups of pairs on the GPU against the exact reference, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same
from grouped_cases import EVERY_TYPE, Q4K, Q6K, Q8, Layer, distinct_ids
from random_blocks import activations

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.cuda_grouped import MAX_GROUPED_ROWS, MAX_ITEM_ROWS, ChosenIds

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quant_type", EVERY_TYPE, ids=lambda t: t.name)
def test_every_type(quant_type: QuantType) -> None:
    layer = Layer.random((quant_type,) * 3, (9, 256, 512), (quant_type,) * 3, 256, "cuda")
    for tokens in (1, 7, 20):
        layer.check(activations(tokens, tokens, 512), distinct_ids(tokens, 4, 9, seed=tokens))


@pytest.mark.parametrize("item_rows", [1, 4, MAX_ITEM_ROWS])
def test_kn01_every_number_of_tokens(item_rows: int) -> None:
    layer = Layer.random((Q4K, Q4K, Q6K), (40, 256, 2048), (Q4K, Q8, Q6K), 512, "cuda")
    for tokens in range(1, MAX_GROUPED_ROWS + 1):
        layer.check(activations(tokens, tokens, 2048), distinct_ids(tokens, 8, 40, seed=tokens), item_rows)


def test_several_passes() -> None:
    layer = Layer.random((Q6K, Q4K, Q8), (5, 96, 4352), None, device="cuda")
    layer.check(activations(3, 11, 4352), distinct_ids(11, 3, 5, seed=3), MAX_ITEM_ROWS)


def test_pairs_whose_expert_is_not_there_are_left_alone() -> None:
    layer = Layer.random((Q4K, Q4K, Q8), (6, 32, 256), None, device="cuda")
    x, chosen = activations(4, 9, 256), ChosenIds(distinct_ids(9, 3, 6, seed=4), 6)
    expected, _ = layer.run(x, chosen, MAX_ITEM_ROWS)
    for table in (layer.weights.gate, layer.weights.up, layer.weights.down):
        table.addresses[2:4] = 0
    actual, _ = layer.run(x, chosen, MAX_ITEM_ROWS)
    is_gone = ((chosen.ids == 2) | (chosen.ids == 3)).to(actual.device)
    assert actual[is_gone].isnan().all()
    assert_same(actual[~is_gone], expected[~is_gone].cpu())


def test_ids_that_change_from_launch_to_launch() -> None:
    """Launches that begin before the ones around them have ended."""
    layer = Layer.random((Q4K, Q4K, Q6K), (40, 256, 2048), (Q4K, Q4K, Q6K), 512, "cuda")
    x = activations(1, 16, 2048)
    for seed in range(20):
        layer.check(x, distinct_ids(16, 8, 40, seed=seed))
    torch.cuda.synchronize()
