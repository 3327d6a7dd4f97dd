"""ReferenceOps as an implementation of Ops."""

import inspect

import pytest
import torch
from random_blocks import random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.ops import Ops, RouterWeights
from coldstream.kernels.reference_ops import ReferenceOps

METHODS = [name for name in vars(Ops) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_signatures_are_those_of_ops(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(owner, name)).parameters for owner in (ReferenceOps, Ops))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_products_of_several_weights(exact: bool) -> None:
    ops = ReferenceOps(exact=exact)
    blocks = [random_weight(QuantType.Q4_K, (rows, 256), seed=rows) for rows in (3, 5)]
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    outputs = ops.linear(x, blocks if exact else [dequantize(weight) for weight in blocks])
    for output, weight in zip(outputs, blocks, strict=True):
        if exact:
            assert torch.equal(output, linear_exact(x, weight))
        else:
            torch.testing.assert_close(output, x @ dequantize(weight).T)


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_embedding_takes_rows(exact: bool) -> None:
    table = random_weight(QuantType.Q6_K, (9, 256), seed=2)
    values = dequantize(table)
    ids = torch.tensor([8, 0, 8], dtype=torch.int32)
    assert torch.equal(ReferenceOps(exact=exact).embed(table if exact else values, ids), values[[8, 0, 8]])


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
@pytest.mark.parametrize("token_id", [-1, 9])
def test_embedding_refuses_other_ids(exact: bool, token_id: int) -> None:
    table = random_weight(QuantType.Q6_K, (9, 256), seed=2)
    with pytest.raises(ValueError, match="0 … 8"):
        ReferenceOps(exact=exact).embed(
            table if exact else dequantize(table), torch.tensor([1, token_id], dtype=torch.int32)
        )


def test_trap_48_no_rows_give_empty_results() -> None:
    ops = ReferenceOps()
    x, ids = torch.empty(0, 4), torch.empty(0, dtype=torch.int32)
    weight = torch.ones(3, 4)
    assert ops.embed(weight, ids).shape == (0, 4)
    assert ops.rms_norm(x, torch.ones(4), 1e-6).shape == (0, 4)
    assert ops.linear(x, [weight])[0].shape == (0, 3)
    assert ops.glu(x, x).shape == (0, 4)
    assert [part.shape[0] for part in ops.choose_experts(x, RouterWeights(weight, None, 2))] == [0, 0]
