"""Routed and shared experts for up to eight tokens on the GPU against the exact reference, bit for bit."""

import pytest
import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import activations, random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.cuda.skinny_shapes import SKINNY_TYPES
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows, experts_gemv_cuda
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact

pytestmark = pytest.mark.gpu

NUM_EXPERTS = 7
Types = tuple[QuantType, QuantType, QuantType]


class Layer:
    """Random experts on the CPU and on the GPU; each expert has memory of its own, at an odd address."""

    def __init__(
        self, types: Types, size: int, cols: int, shared_types: Types | None, shared_size: int = 0
    ) -> None:
        shapes = [(size, cols), (size, cols), (cols, size)]
        self.stacks = [
            random_weight(kind, (NUM_EXPERTS, *shape), seed=i)
            for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
        ]
        self.shared: list[QuantTensor] = []
        if shared_types is not None:
            shared_shapes = [(shared_size, cols), (shared_size, cols), (cols, shared_size)]
            self.shared = [
                random_weight(kind, shape, seed=10 + i)
                for i, (kind, shape) in enumerate(zip(shared_types, shared_shapes, strict=True))
            ]
        self.parts = [
            [on_gpu(stack[e], self.offset(stack, e)) for e in range(NUM_EXPERTS)] for stack in self.stacks
        ]
        tables = [
            ExpertTable(
                torch.tensor([part.blocks.data_ptr() for part in parts], device="cuda"),
                stack.quant_type,
                *stack.shape[1:],
            )
            for stack, parts in zip(self.stacks, self.parts, strict=True)
        ]
        on_device = tuple(on_gpu(weight) for weight in self.shared)
        self.weights = ExpertMatrices(*tables, on_device or None)

    @staticmethod
    def offset(stack: QuantTensor, expert: int) -> int:
        return expert * stack.quant_type.alignment

    def run(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, ranks = ids.shape
        size, cols = self.stacks[0].shape[1:]
        hidden = PairRows(
            torch.full((tokens, ranks, size), torch.nan, device="cuda"),
            torch.full((tokens, self.shared[0].shape[0]), torch.nan, device="cuda") if self.shared else None,
        )
        routed = Guarded(tokens, ranks, cols)
        shared = Guarded(tokens, cols)
        x = x.cuda()
        quantized = None
        if cols % 32 == 0:
            quantized = empty_activations(tokens, cols, torch.device("cuda"))
            quantize_cuda(x, quantized)
        outs = PairRows(routed.tensor, shared.tensor if self.shared else None)
        experts_gemv_cuda(self.weights, ids.cuda(), hidden, outs, activations=quantized, x=x)
        return routed.checked(), shared.checked() if self.shared else None

    def check(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        routed, shared = self.run(x, ids)
        assert_same(routed, routed_experts(x, ids, *self.stacks, linear_exact, swiglu_exact))
        if shared is not None:
            gate, up, down = self.shared
            hidden = swiglu_exact(linear_exact(x, gate), linear_exact(x, up))
            assert_same(shared, linear_exact(hidden, down))


def random_ids(tokens: int, ranks: int) -> torch.Tensor:
    scores = torch.rand(tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(tokens))
    return scores.argsort(dim=-1)[:, :ranks].int().contiguous()


Q4K, Q5K, Q6K, Q8 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0
MIXES = {
    "Q4_K_M": ((Q4K, Q4K, Q6K), 256, 512, (Q8, Q8, Q8), 256),
    "wide": ((Q4K, Q4K, Q4K), 512, 2048, (Q6K, Q6K, Q6K), 512),
    "several passes": ((Q5K, Q5K, Q5K), 256, 2304, (Q4K, Q4K, Q4K), 256),
    "small": ((QuantType.Q5_0, QuantType.Q5_0, QuantType.Q5_0), 160, 384, (Q8, Q8, Q4K), 256),
    "mixed": ((Q4K, Q8, QuantType.F16), 100, 256, (QuantType.F32, QuantType.F16, QuantType.Q4_0), 32),
    "floats": ((QuantType.F32, QuantType.BF16, QuantType.F32), 40, 56, None, 0),
}


@pytest.mark.parametrize("name", MIXES)
def test_kn01_every_number_of_tokens(name: str) -> None:
    types, size, cols, shared_types, shared_size = MIXES[name]
    layer = Layer(types, size, cols, shared_types, shared_size)
    for tokens in range(1, 9):
        layer.check(activations(tokens, tokens, cols), random_ids(tokens, 3))


@pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)
def test_every_type(quant_type: QuantType) -> None:
    layer = Layer((quant_type,) * 3, 256, 512, (quant_type,) * 3, 512)
    layer.check(activations(1, 5, 512), random_ids(5, NUM_EXPERTS))


def test_all_tokens_on_one_expert() -> None:
    layer = Layer((Q4K, Q4K, Q4K), 256, 256, None)
    layer.check(activations(2, 8, 256), torch.full((8, 2), 4, dtype=torch.int32))


def test_pairs_whose_expert_is_not_there_are_left_alone() -> None:
    layer = Layer((Q4K, Q4K, Q6K), 256, 512, (Q4K, Q4K, Q4K), 256)
    x, ids = activations(3, 4, 512), random_ids(4, 3)
    expected, _ = layer.run(x, ids)
    for table in (layer.weights.gate, layer.weights.up, layer.weights.down):
        table.addresses[ids[0, 1]] = 0
    actual, shared = layer.run(x, ids)
    gone = ids == ids[0, 1]
    assert actual[gone].isnan().all()
    assert_same(actual[~gone], expected[~gone])
    assert shared is not None
    assert shared.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer((Q4K, Q4K, Q4K), 256, 512, None)
    ids = random_ids(2, 3).cuda()
    rows = PairRows(torch.full((2, 3, 256), torch.nan, device="cuda"), None)
    outs = PairRows(torch.full((2, 3, 512), torch.nan, device="cuda"), None)
    with pytest.raises(ValueError, match="of the other kind"):
        experts_gemv_cuda(layer.weights, ids, rows, outs, x=torch.zeros(2, 512, device="cuda"))
    with pytest.raises(ValueError, match="do not fit"):
        experts_gemv_cuda(layer.weights, ids, outs, outs)
    with pytest.raises(ValueError, match="int32"):
        experts_gemv_cuda(layer.weights, ids.long(), rows, outs)
