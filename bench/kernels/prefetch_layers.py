"""Layers of experts that no slot holds, for steps without a CPU: what `gpu_prefetch.py` runs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.random_blocks import random_blocks
from bench.random_model import Shape
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.table import ExpertTable
from coldstream.kernels.ops import ExpertWeights
from coldstream.kernels.quant_tensor import QuantTensor

NUM_LAYERS = 2


@dataclass(frozen=True)
class Layers:
    """The weights of a step, on one device but for the host's experts, which all layers share.

    host: uint8 [experts, bytes of one], of gate, up and down.
    """

    shape: Shape
    host: list[torch.Tensor]
    x: torch.Tensor  # float32 [1, E]
    norm: torch.Tensor  # [E]
    shared_gate: QuantTensor
    routers: list[QuantTensor]
    experts: list[ExpertWeights]


def matrices_of(shape: Shape) -> list[tuple[int, int]]:
    """Rows and columns of an expert's gate, up and down."""
    return [(shape.expert_ffn, shape.hidden)] * 2 + [(shape.hidden, shape.expert_ffn)]


def expert_bytes(shape: Shape) -> int:
    return sum(rows * QuantType.Q4_K.row_bytes(cols) for rows, cols in matrices_of(shape))


def float_matrix(values: torch.Tensor) -> QuantTensor:
    return QuantTensor.from_bytes(values.view(torch.uint8), QuantType.F32, values.shape)


def make_layers(shape: Shape, device: str, keep: Callable[[torch.Tensor], torch.Tensor]) -> Layers:
    """No expert has a slot. keep: makes the host's memory readable from the device."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def blocks(rows: int, cols: int) -> torch.Tensor:
        return torch.from_numpy(random_blocks(rng, QuantType.Q4_K, rows, cols))

    def normal(rows: int, deviation: float = 1.0) -> torch.Tensor:
        return deviation * torch.randn(rows, shape.hidden, generator=generator)

    host = [
        keep(blocks(shape.experts * rows, cols).view(shape.experts, -1)) for rows, cols in matrices_of(shape)
    ]
    router = normal(shape.experts, shape.hidden**-0.5)
    experts = []
    for _ in range(NUM_LAYERS):
        tables = [
            ExpertTable(
                torch.zeros(shape.experts, dtype=torch.int64, device=device),
                QuantType.Q4_K, rows, cols, True, None, data.data_ptr(), data.shape[1],
            )
            for data, (rows, cols) in zip(host, matrices_of(shape), strict=True)
        ]  # fmt: skip
        shared = [
            QuantTensor(blocks(rows, cols).to(device), QuantType.Q4_K, (rows, cols))
            for rows, cols in matrices_of(shape)
        ]
        experts.append(ExpertWeights(*tables, *shared))
    return Layers(
        shape,
        host,
        normal(1).to(device),
        torch.ones(shape.hidden, device=device),
        float_matrix(normal(1, shape.hidden**-0.5).to(device)),
        # Equal, but each in memory of its own as those of a model are.
        [float_matrix(router.to(device, copy=True)) for _ in range(NUM_LAYERS)],
        experts,
    )
