"""Layers of experts whose pairs are computed by groups, for tests on the host and on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpu_cases import assert_same, on_gpu
from guarded import Guarded
from random_blocks import random_weight

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.experts.cuda import ExpertMatrices, PairRows
from coldstream.kernels.experts.cuda_grouped import ITEM_ROWS, ChosenIds, experts_grouped_cuda
from coldstream.kernels.experts.reference import routed_experts
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear_exact
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.swiglu.reference import swiglu_exact

Types = tuple[QuantType, QuantType, QuantType]


def distinct_ids(tokens: int, ranks: int, num_experts: int, seed: int) -> torch.Tensor:
    """int32 [tokens, ranks], every expert at most once in a row; low numbers are chosen most often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator) * torch.linspace(1, 2, num_experts)
    return scores.argsort(dim=-1)[:, :ranks].int().contiguous()


@dataclass
class Layer:
    """Random experts as the reference reads them, and as a kernel on `device` does."""

    stacks: Sequence[QuantTensor]
    shared: Sequence[QuantTensor]
    weights: ExpertMatrices
    device: torch.device
    memory: object

    @classmethod
    def random(
        cls,
        types: Types,
        sizes: tuple[int, int, int],
        shared_types: Types | None,
        shared_size: int = 0,
        device: str = "cpu",
        seed: int = 0,
    ) -> "Layer":
        """sizes: experts, FFN size, columns."""
        num_experts, size, cols = sizes
        shapes = [(size, cols), (size, cols), (cols, size)]
        stacks = [
            random_weight(kind, (num_experts, *shape), seed + i)
            for i, (kind, shape) in enumerate(zip(types, shapes, strict=True))
        ]
        shared_shapes = [(shared_size, cols), (shared_size, cols), (cols, shared_size)]
        shared = [
            random_weight(kind, shape, 10 + i)
            for i, (kind, shape) in enumerate(zip(shared_types or (), shared_shapes, strict=False))
        ]
        placed = [
            [on_gpu(stack[e], cls._offset(stack, e), device) for e in range(num_experts)] for stack in stacks
        ]
        tables = [
            ExpertTable(torch.tensor([each.blocks.data_ptr() for each in parts], device=device), kind, *shape)
            for parts, kind, shape in zip(placed, types, shapes, strict=True)
        ]
        there = tuple(on_gpu(weight, device=device) for weight in shared)
        weights = ExpertMatrices(tables[0], tables[1], tables[2], there or None)  # type: ignore[arg-type]
        return cls(stacks, shared, weights, torch.device(device), placed)

    @staticmethod
    def _offset(stack: QuantTensor, expert: int) -> int:
        return expert * stack.quant_type.alignment

    def run(
        self, x: torch.Tensor, chosen: ChosenIds, item_rows: int, weights: ExpertMatrices | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs of the routed experts, NaN where nothing was written, and of the shared one."""
        weights = weights or self.weights
        (tokens, ranks), (size, cols) = chosen.ids.shape, self.stacks[0].shape[1:]
        routed = Guarded(tokens, ranks, cols, device=self.device)
        outs = Guarded(tokens, cols, device=self.device)
        shared_size = self.shared[0].shape[0] if self.shared else 0
        hidden = [
            torch.full(shape, torch.nan, device=self.device)
            for shape in ((tokens, ranks, size), (tokens, shared_size))
        ]
        there = x.to(self.device)
        codes = empty_activations(tokens, cols, self.device)
        quantize_cuda(there, codes)
        experts_grouped_cuda(
            weights,
            ChosenIds(chosen.ids.to(self.device), chosen.num_experts),
            PairRows(hidden[0], hidden[1] if self.shared else None),
            PairRows(routed.tensor, outs.tensor if self.shared else None),
            activations=codes,
            x=there,
            item_rows=item_rows,
        )
        return routed.checked(), outs.checked() if self.shared else None

    def check(self, x: torch.Tensor, ids: torch.Tensor, item_rows: int = ITEM_ROWS) -> None:
        """The bits of the reference for every pair and, with a shared expert, for every token."""
        routed, shared = self.run(x, ChosenIds(ids, self.stacks[0].shape[0]), item_rows)
        assert_same(routed, routed_experts(x, ids, *self.stacks, linear_exact, swiglu_exact))
        if shared is not None:
            gate, up, down = self.shared
            assert_same(shared, linear_exact(swiglu_exact(linear_exact(x, gate), linear_exact(x, up)), down))


Q4K, Q5K, Q6K, Q8 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0
EVERY_TYPE = sorted(INTEGER_TYPES)
