"""Routed experts by Triton kernels equal the exact reference, bit for bit, however tokens choose them."""

from dataclasses import dataclass

import pytest
import torch
from guarded import DEVICE, Guarded
from random_blocks import activations, random_weight
from triton_interpreter import assert_same_bits, device_activations, on_device

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import QuantActivations
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.triton import ExpertMatrices, experts_down, experts_gate_up
from coldstream.kernels.experts.triton_groups import (
    PairGroups,
    choose_tile_pairs,
    experts_down_grouped,
    experts_gate_up_grouped,
    group_pairs,
    max_tiles,
)
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.triton import quantize
from coldstream.kernels.swiglu.reference import swiglu_exact

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100)
TYPES = [
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K, 256, 256),
    (QuantType.Q5_K, QuantType.Q4_K, QuantType.Q5_0, 256, 96),
    (QuantType.Q8_0, QuantType.Q4_0, QuantType.Q8_0, 96, 160),
]
EVERY_TYPES = pytest.mark.parametrize(
    "types", TYPES, ids=lambda types: "-".join(part.name for part in types[:3])
)


@dataclass(frozen=True)
class Layer:
    """Stacks of experts, and the same behind addresses of separate copies on the device."""

    stacks: tuple[QuantTensor, QuantTensor, QuantTensor]
    copies: list[list[QuantTensor]]

    @classmethod
    def random(cls, types: tuple[QuantType, QuantType, QuantType, int, int], num_experts: int) -> "Layer":
        gate, up, down, hidden, ffn = types
        shapes = ((num_experts, ffn, hidden), (num_experts, ffn, hidden), (num_experts, hidden, ffn))
        stacks = tuple(
            random_weight(quant_type, shape, seed)
            for seed, (quant_type, shape) in enumerate(zip((gate, up, down), shapes, strict=True))
        )
        copies = [[on_device(stack[expert]) for expert in range(num_experts)] for stack in stacks]
        return cls(stacks, copies)  # type: ignore[arg-type]

    def matrices(self) -> list[ExpertMatrices]:
        return [
            ExpertMatrices(
                torch.tensor([copy.blocks.data_ptr() for copy in copies], device=DEVICE),
                stack.quant_type,
                stack.shape[1],
                stack.shape[2],
            )
            for stack, copies in zip(self.stacks, self.copies, strict=True)
        ]


def quantized(x: torch.Tensor) -> QuantActivations:
    rows, groups = x.shape[0], -(-x.shape[1] // 256)
    q = torch.empty(rows, groups * 256, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(rows, groups, device=DEVICE)
    sums = torch.empty(rows, groups * 16, dtype=torch.int16, device=DEVICE)
    out = QuantActivations(q, scales, sums)
    quantize(x, out)
    return out


def by_pairs(x: torch.Tensor, ids: torch.Tensor, matrices: list[ExpertMatrices]) -> torch.Tensor:
    """down(swiglu(gate x, up x)) by the kernels that take a pair at a time: [T, K, E]."""
    gate, up, down = matrices
    hidden = Guarded(ids.numel(), gate.num_rows)
    out = Guarded(*ids.shape, down.num_rows)
    experts_gate_up(device_activations(x), ids.to(DEVICE), gate, up, hidden.tensor)
    experts_down(quantized(hidden.tensor), ids.to(DEVICE), down, out.tensor)
    hidden.checked()
    return out.checked()


def by_groups(x: torch.Tensor, ids: torch.Tensor, matrices: list[ExpertMatrices]) -> torch.Tensor:
    """The same by the kernels that take the pairs of an expert together."""
    gate, up, down = matrices
    num_pairs, num_experts = ids.numel(), len(gate.addresses)
    sizes = ((num_experts,), (num_pairs,), (max_tiles(num_pairs, num_experts), 3), (1,))
    parts = [Guarded(*size, dtype=torch.int32) for size in sizes]
    groups = PairGroups(choose_tile_pairs(num_pairs, num_experts), *(part.tensor for part in parts))
    hidden, out = Guarded(num_pairs, gate.num_rows), Guarded(*ids.shape, down.num_rows)
    group_pairs(ids.to(DEVICE), gate, up, down, groups)
    experts_gate_up_grouped(device_activations(x), ids.shape[1], gate, up, groups, hidden.tensor)
    experts_down_grouped(quantized(hidden.tensor), down, groups, out.tensor)
    for part in (*parts, hidden):
        part.checked()
    return out.checked()


def expected(x: torch.Tensor, ids: torch.Tensor, layer: Layer) -> torch.Tensor:
    return routed_experts(x, ids, *layer.stacks, linear_exact, swiglu_exact)


def choices(num_tokens: int, num_ranks: int, num_experts: int) -> torch.Tensor:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return scores.argsort(dim=1)[:, :num_ranks].int().contiguous()


@EVERY_TYPES
def test_pairs(types: tuple[QuantType, QuantType, QuantType, int, int]) -> None:
    layer = Layer.random(types, 4)
    x, ids = activations(1, 1, types[3]), choices(1, 2, 4)
    assert_same_bits(by_pairs(x, ids, layer.matrices()), expected(x, ids, layer))


@EVERY_TYPES
def test_groups(types: tuple[QuantType, QuantType, QuantType, int, int]) -> None:
    layer = Layer.random(types, 4)
    x, ids = activations(1, 9, types[3]), choices(9, 2, 4)
    assert_same_bits(by_groups(x, ids, layer.matrices()), expected(x, ids, layer))


@pytest.mark.parametrize("name", ["all on one", "each its own", "most empty"])
def test_lopsided_routing(name: str) -> None:
    types = TYPES[2]
    layer = Layer.random(types, 12)
    x = activations(2, 12, types[3])
    ids = {
        "all on one": torch.full((12, 1), 11, dtype=torch.int32),
        "each its own": torch.arange(12, dtype=torch.int32).reshape(12, 1),
        "most empty": torch.tensor([0, 11], dtype=torch.int32).repeat(12, 1),
    }[name]
    assert_same_bits(by_groups(x, ids, layer.matrices()), expected(x, ids, layer))


@pytest.mark.parametrize("run", [by_pairs, by_groups])
def test_absent_experts_are_left_out(run: object) -> None:
    types = TYPES[2]
    layer = Layer.random(types, 4)
    x, ids = activations(3, 3, types[3]), choices(3, 2, 4)
    matrices = layer.matrices()
    for part in matrices:
        part.addresses[2] = 0
    out = run(x, ids, matrices)  # type: ignore[operator]
    absent = ids == 2
    assert_same_bits(out[~absent], expected(x, ids, layer)[~absent])
    assert out[absent].isnan().all()


def test_experts_of_floats() -> None:
    types = (QuantType.F16, QuantType.BF16, QuantType.F32, 40, 24)
    layer = Layer.random(types, 3)
    x, ids = activations(4, 3, 40), choices(3, 2, 3)
    gate, up, down = layer.matrices()
    hidden, out = Guarded(6, 24), Guarded(3, 2, 40)
    experts_gate_up(x.to(DEVICE), ids.to(DEVICE), gate, up, hidden.tensor)
    experts_down(hidden.tensor, ids.to(DEVICE), down, out.tensor)
    assert_same_bits(out.checked(), expected(x, ids, layer))


@pytest.mark.gpu
@EVERY_TYPES
def test_every_size(types: tuple[QuantType, QuantType, QuantType, int, int]) -> None:
    layer = Layer.random(types, 16)
    x, ids = activations(5, 100, types[3]), choices(100, 4, 16)
    want = expected(x, ids, layer)
    for size in SIZES:
        assert_same_bits(by_groups(x[:size], ids[:size], layer.matrices()), want[:size])
        assert_same_bits(by_pairs(x[:size], ids[:size], layer.matrices()), want[:size])
