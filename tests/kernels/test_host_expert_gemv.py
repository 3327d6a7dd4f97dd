"""Experts of up to eight tokens: the GPU's kernels on the host against the exact reference, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, experts_gemv_cuda
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact

pytestmark = pytest.mark.usefixtures("host")

CPU = torch.device("cpu")
NUM_EXPERTS = 4
Types = tuple[QuantType, QuantType, QuantType]
Q4K, Q6K, Q8, Q5, F16 = QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q5_0, QuantType.F16


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("types", "shared_types"),
    [
        ((Q4K, Q4K, Q6K), (Q4K, Q4K, Q4K)),
        ((Q8, Q8, Q5), (Q8, Q8, Q8)),
        ((Q4K, Q8, Q5), (Q5, Q6K, Q4K)),
        ((Q4K, Q4K, Q8), (F16, F16, Q8)),
        ((QuantType.IQ4_NL, Q5, QuantType.MXFP4), (QuantType.MXFP4, QuantType.IQ4_NL, Q8)),
        ((QuantType.IQ2_S, QuantType.IQ3_XXS, Q4K), (QuantType.IQ3_S, QuantType.IQ1_M, QuantType.IQ2_XS)),
        *(((kind, kind, kind), (kind, kind, kind)) for kind in sorted(INTEGER_TYPES)),
    ],
    ids=str,
)
def test_types_of_either_kind_of_scales(types: Types, shared_types: Types) -> None:
    size, cols, tokens = 256, 512, 3
    shapes = [(size, cols), (size, cols), (cols, size)]
    stacks = [
        random_weight(kind, (NUM_EXPERTS, *shape), i)
        for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
    ]
    shared = [
        random_weight(kind, shape, 5 + i)
        for i, (kind, shape) in enumerate(zip(shared_types, shapes, strict=True))
    ]
    x, ids = activations(1, tokens, cols), torch.tensor([[0, 3], [3, 1], [2, 0]], dtype=torch.int32)
    placed = [[on_gpu(stack[e], device="cpu") for e in range(NUM_EXPERTS)] for stack in stacks]
    tables = [
        ExpertTable(torch.tensor([each.blocks.data_ptr() for each in parts]), kind, *shape)
        for parts, kind, shape in zip(placed, types, shapes, strict=True)
    ]
    on_host = [on_gpu(weight, device="cpu") for weight in shared]
    weights = ExpertMatrices(tables[0], tables[1], tables[2], (on_host[0], on_host[1], on_host[2]))
    quantised = empty_activations(tokens, cols, CPU)
    quantize_cuda(x, quantised)
    routed, outs = Guarded(tokens, 2, cols, device=CPU), Guarded(tokens, cols, device=CPU)
    hidden = PairRows(torch.full((tokens, 2, size), torch.nan), torch.full((tokens, size), torch.nan))
    experts_gemv_cuda(weights, ids, hidden, PairRows(routed.tensor, outs.tensor), activations=quantised, x=x)
    assert_same(routed.checked(), routed_experts(x, ids, *stacks, linear_exact, swiglu_exact))
    gate, up, down = shared
    activated = swiglu_exact(linear_exact(x, gate), linear_exact(x, up))
    assert_same(outs.checked(), linear_exact(activated, down))
