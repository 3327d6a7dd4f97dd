"""The launches of a streamed group, as a forecast counts them, are those of the product."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.kernels.gpu_types import activations, weight_bytes
from coldstream.experts.prefill import PrefillExperts, StagedGroup
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.contents import write
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.experts.shapes import MATRICES
from coldstream.kernels.ops import ExpertWeights
from coldstream.placement.prompt_cost import GROUP_LAUNCHES
from host_device import HostDevice, HostMemory

EXPERTS, RANKS, FFN, HIDDEN, ROWS = 4, 2, 256, 512, 70
SHAPES = ((EXPERTS, FFN, HIDDEN), (EXPERTS, FFN, HIDDEN), (EXPERTS, HIDDEN, FFN))


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_groups_that_are_computed_together_share_all_but_their_addresses(
    host: HostDevice, num_groups: int
) -> None:
    ops = CudaOps(HostMemory(), 16, 512)
    kernels = MoeKernels(ops)
    weights = ExpertWeights(
        *(ops.stack(weight_bytes(ops, QuantType.Q4_K, *shape), QuantType.Q4_K, shape) for shape in SHAPES)
    )
    ids = ops.memory.persistent((ROWS, RANKS), "int32")
    write(ids, (torch.arange(ROWS * RANKS) % EXPERTS).int().reshape(ROWS, RANKS).numpy())
    pairs = kernels.pairs(activations(ops, ROWS, HIDDEN), ids, weights)
    tables = tuple(ops.empty(EXPERTS, dtype="int64") for _ in range(MATRICES))
    first = tuple(stack.first for stack in (weights.gate, weights.up, weights.down))
    sizes = tuple(stack.matrix_bytes for stack in (weights.gate, weights.up, weights.down))
    groups = [StagedGroup(range(begin, EXPERTS, num_groups), first, sizes) for begin in range(num_groups)]
    experts = PrefillExperts(kernels, None, None, ids)  # type: ignore[arg-type]
    before = host.launches
    gate, up, down = (
        replace(stack, addresses=table)
        for stack, table in zip((weights.gate, weights.up, weights.down), tables, strict=True)
    )
    products = partial(kernels.compute, pairs, replace(weights, gate=gate, up=up, down=down))
    experts._compute_groups(tables, products, groups, pairs.places)
    assert host.launches - before == GROUP_LAUNCHES + num_groups - 1
