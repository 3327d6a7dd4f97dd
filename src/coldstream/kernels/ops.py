"""The operations a model is written in; every device implements this one interface.

`layers/` and `models/` call nothing else, so a model's forward pass is written once. `ReferenceOps` (plain PyTorch,
float32, differentiable) defines the meaning; `CpuOps` runs the C++ kernels and can capture a forward pass into a graph.

Shapes: T rows (tokens, of one or several sequences), E hidden size, H query heads, G key/value heads, D head size,
C convolution channels, NK / NV key / value heads of the gated DeltaNet, d their head size, K experts per token,
F an FFN size. Activations are float32 with unit stride along the last dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coldstream.gguf.reader import GGUFFile, TensorInfo

Weight = Any  # what `load_weight` of the same Ops returned: opaque to everybody else


@dataclass(frozen=True)
class Rows:
    """Which token of which sequence each row is. Rows of one sequence are adjacent and ascend by one position."""

    positions: torch.Tensor  # int32 [T], absolute
    slots: torch.Tensor  # int32 [T], index into the leading dimension of every cache tensor


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `num_dims` dimensions of a head; pairs are (i, i + num_dims / 2)."""

    num_dims: int
    theta: float


@dataclass(frozen=True)
class DeltaNetWeights:
    """Small tensors of a gated DeltaNet layer, float32. `key_head_ids[h]` is the key head that value head h reads."""

    conv_taps: torch.Tensor  # [C, taps]; the last tap multiplies the current token
    a: torch.Tensor  # [NV], −exp(A_log), all negative
    dt_bias: torch.Tensor  # [NV]
    norm: torch.Tensor  # [d]
    key_head_ids: torch.Tensor  # int32 [NV]
    num_key_heads: int
    eps: float


class Ops(Protocol):
    """See the module docstring. Every method returns new tensors and mutates only what it says."""

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        """A matrix [out, in], or a stack of them [experts, out, in], of any quantised or float type."""

    def load_vector(self, file: GGUFFile, info: TensorInfo) -> torch.Tensor:
        """A small tensor as float32, in its logical shape."""

    def split_rows(self, weight: Weight, sizes: Sequence[int]) -> tuple[Weight, ...]:
        """Views of `sizes` consecutive output rows each (of every matrix in a stack)."""

    def embed(self, table: Weight, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of `table` [vocab, E] by int32 `token_ids` [T], dequantised: [T, E]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension of [T, E]."""

    def linear(self, x: torch.Tensor, weights: Sequence[Weight]) -> tuple[torch.Tensor, ...]:
        """x [T, in] times each of `weights` [out, in]: one [T, out] per weight. x is quantised once for all."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + y."""

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up, both [T, F]."""

    def rope_angles(self, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
        """cos and sin of position · theta^(−2i/num_dims): [T, num_dims / 2, 2]. Computed in float64, then rounded."""

    def attention(
        self,
        query_gate: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        angles: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Gated causal attention: [T, H·D].

        query_gate [T, H·2·D] holds per head D query then D gate values; key, value [T, G·D]. Queries and keys are
        RMS-normed per head, then rotated by `angles`; keys and values are written into the caches [slots, positions,
        G, D] (float16 or float32) at `rows`; each row attends to positions 0 … its own of its slot, scale 1/sqrt(D);
        the result is multiplied by sigmoid(gate). Mutates k_cache and v_cache.
        """

    def gated_delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        weights: DeltaNetWeights,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Causal convolution, SiLU, the gated delta rule and the gated norm: [T, NV·d].

        qkv [T, C] with C = 2·NK·d + NV·d, z [T, NV·d], alpha and beta [T, NV]. conv_state [slots, taps − 1, C] holds
        the last raw qkv rows, state [slots, NV, d, d] (key dimension first) the recurrent state, both float32; both
        are advanced over `rows`. Formula: docs of `kernels/gated_delta_net/reference.py`.
        """

    def router(self, x: torch.Tensor, weight: Weight, num_experts_per_tok: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax over all experts, top-k (ties: lowest id), renormalised: int32 ids [T, K] and weights [T, K]."""

    def routed_experts(
        self, x: torch.Tensor, topk_ids: torch.Tensor, gate: Weight, up: Weight, down: Weight
    ) -> torch.Tensor:
        """down_e(silu(gate_e x) · up_e x) for each chosen expert, kept apart: [T, K, E]."""

    def combine_experts(
        self, routed: torch.Tensor, topk_weights: torch.Tensor, shared: torch.Tensor, shared_gate: torch.Tensor
    ) -> torch.Tensor:
        """Σ_k weight_k · routed_k in rank order + sigmoid(shared_gate) · shared: [T, E]; shared_gate is [T, 1]."""
