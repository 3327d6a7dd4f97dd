"""Experts of one row as models have them: the GPU's kernels on the host, bit for bit as defined."""

import pytest
import torch
from glu_cases import CLAMPED, EXACT, GEGLU, on_host, random_experts, random_ids, tables_of
from gpu_cases import assert_same
from random_blocks import activations

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.ops import SWIGLU, Activation, Routing
from host_device import HostMemory

pytestmark = pytest.mark.usefixtures("host")


@pytest.mark.sharded(4)
@pytest.mark.parametrize(
    ("kind", "activation", "has_biases"),
    [
        (QuantType.MXFP4, CLAMPED, True),
        (QuantType.MXFP4, SWIGLU, False),
        (QuantType.IQ4_NL, GEGLU, True),
        (QuantType.Q8_0, SWIGLU, False),
        (QuantType.Q5_1, CLAMPED, False),
        (QuantType.Q4_K, SWIGLU, False),
        (QuantType.Q6_K, CLAMPED, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("ranks", "cols"), [(2, 2304), (3, 2304), (3, 512), (2, 5120)])
def test_one_row(kind: QuantType, activation: Activation, has_biases: bool, ranks: int, cols: int) -> None:
    """With whole and with divided rows, more units than teams of warps, and a rank whose expert is elsewhere.

    Rows of 5,120 have more chunks and groups than are asked for at once. With three ranks and 512 columns
    blocks have eight warps.
    """
    size = 768 if kind.block_elements == 256 else 192
    weights = random_experts((kind, kind, kind), (5, cols, size), activation, has_biases=has_biases)
    ids = random_ids(1, ranks, 5, seed=ranks)
    ops, (tables, _kept) = CudaOps(HostMemory(), 16, 512), tables_of(weights)
    tables.down.addresses[int(ids[0, 1])] = 0
    x = activations(3, 1, cols)
    routed, _ = MoeKernels(ops).outputs(on_host(ops, x), ids, tables)
    expected = EXACT.experts(x, Routing(ids, torch.ones(1, ranks), None), weights).routed
    there = [rank for rank in range(ranks) if rank != 1]
    assert_same(torch.as_tensor(routed.numpy())[:, there].contiguous(), expected[:, there].contiguous())
