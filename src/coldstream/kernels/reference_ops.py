"""The operations of `Ops` in plain PyTorch: the definition for every device."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.arithmetic import reference as exact_arithmetic
from coldstream.kernels.attention.exact import attention_exact
from coldstream.kernels.attention.reference import attention
from coldstream.kernels.composed_ops import ComposedOps
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.experts.reference import combine_experts, multiply_add, routed_experts
from coldstream.kernels.gated_delta_net.batch import gated_delta_net_batch
from coldstream.kernels.gated_delta_net.exact import gated_delta_net_exact
from coldstream.kernels.gated_delta_net.reference import gated_delta_net
from coldstream.kernels.hyper_connections import reference as hyper_connections
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.indexer.reference import choose_blocks, choose_blocks_exact
from coldstream.kernels.linear.reference import linear, linear_exact
from coldstream.kernels.ngram import reference as ngram
from coldstream.kernels.ops import (
    SWIGLU,
    Activation,
    AttentionHeads,
    AttentionInputs,
    Caches,
    CommittedPath,
    DeltaNetInputs,
    DeltaNetWeights,
    ExpertWeights,
    NgramHash,
    NgramState,
    RopeSpec,
    RouterWeights,
    Rows,
    Weight,
)
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.rms_norm.reference import rms_norm, rms_norm_exact
from coldstream.kernels.rope.reference import rope_angles
from coldstream.kernels.router.reference import choose_experts, choose_experts_exact
from coldstream.kernels.scalars import reference as scalars
from coldstream.kernels.swiglu.reference import glu, glu_exact

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class ReferenceOps(ComposedOps):
    """`Ops` on the CPU in float32, one PyTorch call after another.

    A weight is a float32 tensor with its values, or with `exact` the quantised blocks as they are. Without
    `exact` everything is differentiable and rounds as PyTorch does; with it, every operation is that of
    docs/arithmetic.md to the last bit. An empty batch gives empty results and changes no state.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._multiply = linear_exact if exact else linear
        self._rms_norm = rms_norm_exact if exact else rms_norm
        self._attention = attention_exact if exact else attention
        self._choose_blocks = choose_blocks_exact if exact else choose_blocks
        self._gated_delta_net = gated_delta_net_exact if exact else gated_delta_net
        self._choose_experts = choose_experts_exact if exact else choose_experts
        self._activate = glu_exact if exact else glu
        streams = hyper_connections
        self._inject = streams.inject_exact if exact else streams.inject
        self._norm_streams = streams.norm_streams_exact if exact else streams.norm_streams
        self._scaled_silu = streams.scaled_silu_exact if exact else streams.scaled_silu
        self._mix_streams = streams.mix_streams_exact if exact else streams.mix_streams
        self._ngram_gate = ngram.ngram_gate_exact if exact else ngram.ngram_gate
        self._ngram_conv = ngram.ngram_conv_exact if exact else ngram.ngram_conv
        self._softcap = scalars.softcap_exact if exact else scalars.softcap
        self._fma = exact_arithmetic.fma if exact else multiply_add
        self._sigmoid = exact_arithmetic.sigmoid if exact else torch.sigmoid

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype])

    def int_vector(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        tensor = read_tensor(file, info)
        return tensor if self.exact else dequantize(tensor)

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> Weight:
        tensor = read_tensor(file, info).take_rows(torch.tensor(row_ids))
        return tensor if self.exact else dequantize(tensor)

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        return self.load_weight(file, info)

    def load_float_weight(
        self, file: GGUFFile, info: TensorInfo, scales: np.ndarray[Any, Any] | None = None
    ) -> torch.Tensor:
        values = dequantize(read_tensor(file, info))
        return values if scales is None else values * torch.from_numpy(scales)

    def read_values(self, file: GGUFFile, info: TensorInfo) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = dequantize(read_tensor(file, info)).numpy()
        return values

    def float_array(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values)

    def split_rows(self, weight: Weight, sizes: Sequence[int]) -> tuple[Weight, ...]:
        if isinstance(weight, QuantTensor):
            return weight.split_rows(sizes)
        return tuple(torch.split(weight, list(sizes), dim=-2))

    def embed(self, table: Weight, token_ids: torch.Tensor) -> torch.Tensor:
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < table.shape[0]:
            raise ValueError(f"token ids must lie in 0 … {table.shape[0] - 1}")
        if isinstance(table, QuantTensor):
            return dequantize(table.take_rows(token_ids))
        return torch.nn.functional.embedding(token_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rms_norm(x, weight, eps)

    def rms_norm_pair(
        self, x: torch.Tensor, x_weight: torch.Tensor, y: torch.Tensor, y_weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return torch.cat((self._rms_norm(x, x_weight, eps), self._rms_norm(y, y_weight, eps)), dim=-1)

    def linear(self, x: torch.Tensor, weights: Sequence[Weight]) -> tuple[torch.Tensor, ...]:
        return tuple(self._multiply(x, weight) for weight in weights)

    def add_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * exact_arithmetic.constant(factor)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return self._softcap(x, cap)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def glu(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = SWIGLU) -> torch.Tensor:
        return self._activate(gate, up, activation)

    def inject(
        self,
        streams: torch.Tensor | None,
        update: torch.Tensor,
        injection: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = update.shape[-1]
        total = self._inject(streams, update, injection, weight.numel() // size)
        return total, self._norm_streams(total, weight, eps, size)

    def scaled_silu(self, x: torch.Tensor, divisor: int) -> torch.Tensor:
        return self._scaled_silu(x, divisor)

    def mix_streams(self, normed: torch.Tensor, gates: torch.Tensor, num_streams: int) -> torch.Tensor:
        return self._mix_streams(normed, gates, num_streams)

    def norm_streams(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, num_streams: int
    ) -> torch.Tensor:
        return self._norm_streams(x, weight, eps, x.shape[-1] // num_streams)

    def project_streams(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weight, num_streams: int
    ) -> torch.Tensor:
        normed = self._rms_norm(x, norm, eps).reshape(len(x) * num_streams, -1)
        return self._multiply(normed, weight).reshape(len(x), -1)

    def map_ngram_table(self, file: GGUFFile, info: TensorInfo, hashing: NgramHash) -> Weight:
        return self.load_weight(file, info)

    def ngram_ids(
        self, token_ids: torch.Tensor, hashing: NgramHash, table: Weight, state: NgramState, rows: Rows
    ) -> torch.Tensor:
        return ngram.ngram_ids(token_ids, hashing, state, rows)

    def ngram_rows(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(table, ids.flatten()).reshape(len(ids), -1)

    def ngram_gate(self, key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._ngram_gate(key, query, value)

    def ngram_conv(
        self,
        streams: torch.Tensor,
        gated: torch.Tensor,
        normed: torch.Tensor,
        taps: torch.Tensor,
        dilation: int,
        state: NgramState,
        rows: Rows,
    ) -> torch.Tensor:
        return self._ngram_conv(streams, gated, normed, taps, dilation, state, rows)

    def commit_ngram(self, state: NgramState, path: CommittedPath) -> None:
        ngram.commit_ngram(state, path)

    def rope_angles(self, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
        return rope_angles(positions, rope)

    def attention(
        self, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows
    ) -> torch.Tensor:
        return self._attention(inputs, heads, caches, rows)

    def choose_blocks(
        self, inputs: IndexerInputs, heads: IndexerHeads, cache: torch.Tensor, rows: Rows
    ) -> ChosenBlocks:
        return self._choose_blocks(inputs, heads, cache, rows)

    def gated_delta_net(
        self, inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        if inputs.rows.batch is None:
            return self._gated_delta_net(inputs, weights, conv_state, state)
        return gated_delta_net_batch(self._gated_delta_net, inputs, weights, conv_state, state)

    def choose_experts(self, x: torch.Tensor, weights: RouterWeights) -> tuple[torch.Tensor, torch.Tensor]:
        # The router multiplies floats, whatever its weight's type.
        gate = weights.gate
        values = dequantize(gate) if isinstance(gate, QuantTensor) else gate
        logits = exact_arithmetic.dot_lanes(x, values) if self.exact else linear(x, values)
        return self._choose_experts(logits, weights.num_experts_per_tok, weights.rule)

    def routed_experts(self, x: torch.Tensor, topk_ids: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        biases = None if weights.biases is None else (weights.biases.gate, weights.biases.up)
        activate = partial(self._activate, activation=weights.activation)
        stacks = weights.gate, weights.up, weights.down
        return routed_experts(x, topk_ids, *stacks, self._multiply, activate, biases)

    def combine_experts(
        self,
        routed: torch.Tensor,
        topk_weights: torch.Tensor,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
        bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        rows = None if bias is None else bias[0][bias[1].long()]
        return combine_experts(routed, topk_weights, shared, shared_gate, self._fma, self._sigmoid, rows)


def read_tensor(file: GGUFFile, info: TensorInfo) -> QuantTensor:
    """The bytes of a tensor of the file, copied."""
    return QuantTensor.from_bytes(torch.from_numpy(file.read(info)), info.quant_type, info.shape)
