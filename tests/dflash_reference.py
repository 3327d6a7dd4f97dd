"""A DFlash drafter in PyTorch, which defines what the drafters of the package compute.

It is compared with the published implementation and with llama.cpp (test_dflash.py); `models/cpu/dflash.py`
and `models/cuda/` are compared with it. `models/cpu/dflash.py` says what a drafter does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.draft_block import reference
from coldstream.models.dflash.context import CommittedRows
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import (
    DflashLayer,
    DflashSpec,
    DraftLattice,
    tensor_shapes,
    visible_rows,
)

MOST_WAITING = 64  # rows that wait for a draft
Embed = Callable[[Sequence[int]], Any]  # token ids → float32 [n, E], an array or a tensor
Head = Callable[[Any], Any]  # a tensor of hidden states, float32 [n, E] → float32 logits [n, V]


@dataclass(frozen=True)
class Convolution:
    """A short causal convolution of noise rows, whose weights depend on the row.

    The same row gives the weights of both sides, before a sublayer and behind it.
    """

    base: torch.Tensor  # [2, kernel, E]
    proj: torch.Tensor  # [2 · kernel · groups, E]

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """The weights of normed rows x [B, E] by side and distance: [B, 2, kernel, groups]."""
        return functional.linear(x, self.proj).view(len(x), 2, self.base.shape[1], -1)

    def apply(self, x: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        """See `reference.convolve`; dynamic: as `dynamic` has it."""
        return reference.convolve(x, self.base[side], dynamic[:, side])


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer: matrices [out, in], vectors of norms float32."""

    layer: DflashLayer
    attn_norm: torch.Tensor
    attn_q: torch.Tensor
    attn_k: torch.Tensor
    attn_v: torch.Tensor
    attn_output: torch.Tensor
    attn_q_norm: torch.Tensor
    attn_k_norm: torch.Tensor
    ffn_norm: torch.Tensor
    ffn_gate: torch.Tensor
    ffn_up: torch.Tensor
    ffn_down: torch.Tensor
    attn_gate: torch.Tensor | None
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    attn_conv: Convolution | None
    ffn_conv: Convolution | None


@dataclass(frozen=True)
class Selector:
    """Scores of a candidate after the one before it."""

    predecessor: torch.Tensor  # [V, rank]
    successor: torch.Tensor  # [V, rank]
    hidden: torch.Tensor  # [rank, E]


@dataclass(frozen=True)
class _Block:
    """Where the rows of a draft are."""

    positions: NDArray[np.int64]  # [B]
    rotations: tuple[torch.Tensor, torch.Tensor]  # see `DflashModel.rotations`
    masks: dict[DflashLayer, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, layer: DflashLayer, keys: NDArray[np.int64]) -> torch.Tensor | None:
        """Which of the rows at positions `keys` [L] each row attends to: bool [B, L]; None for all.

        Layers that are alike keep the same rows, and share it.
        """
        if layer not in self.masks:
            visible = visible_rows(layer, self.positions, keys)
            self.masks[layer] = None if visible is None else torch.from_numpy(visible)
        return self.masks[layer]


class DflashModel:
    """The weights of a drafter in the CPU's memory, and the embedding and head of its target."""

    def __init__(self, spec: DflashSpec, tensors: dict[str, torch.Tensor], embed: Embed, head: Head) -> None:
        """tensors: those of `tensor_shapes`, float32."""
        self.spec, self.embed, self.head = spec, embed, head
        self.fc, self.hidden_norm = tensors["fc.weight"], tensors["enc.output_norm.weight"]
        self.aux_norms = tensors.get("enc.aux_norm.weight")
        self.output_norm = tensors["output_norm.weight"]
        self.layers = tuple(
            _layer_weights(layer, tensors, f"blk.{index}.") for index, layer in enumerate(spec.layers)
        )
        self.selector = None
        if spec.second is not None:
            names = ("predecessor", "successor", "hidden")
            self.selector = Selector(*(tensors[f"selector_{name}.weight"] for name in names))

    @classmethod
    def load(cls, file: DflashFile, embed: Embed, head: Head) -> Self:
        """Copies the weights, as float32. embed, head: of the target."""
        tensors = {name: torch.from_numpy(values) for name, values in read_tensors(file).items()}
        return cls(file.spec, tensors, embed, head)

    def new_sequence(self) -> "DflashSequence":
        """An empty sequence. It takes no memory before its first row."""
        return DflashSequence(self)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """The vectors [n, E] of committed rows, of which every layer keeps keys and values."""
        if self.aux_norms is not None:
            features = reference.norm_features(features, self.aux_norms, self.spec.rms_norm_eps)
        return self.norm(functional.linear(features, self.fc), self.hidden_norm)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, computed in float32."""
        return reference.norm(x, weight, self.spec.rms_norm_eps)

    def rotations(self, positions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for heads of rows at positions [n]: both [n, 1, head_dim / 2], float32."""
        cos, sin = self.spec.rope.cos_sin(positions, self.spec.head_dim)
        return torch.from_numpy(cos)[:, None], torch.from_numpy(sin)[:, None]

    def keys_values(
        self, x: torch.Tensor, weights: LayerWeights, rotations: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, num_kv_heads, head_dim] of rows [n, E]."""
        shape = (len(x), self.spec.num_kv_heads, self.spec.head_dim)
        keys = functional.linear(x, weights.attn_k, weights.k_bias).view(shape)
        values = functional.linear(x, weights.attn_v, weights.v_bias).view(shape)
        return reference.rotate(self.norm(keys, weights.attn_k_norm), rotations), values


class LayerRows:
    """Keys and values of committed rows of a layer, the last `window` or all, with their positions."""

    num_bytes = 0  # of no interest here

    def __init__(self, num_kv_heads: int, head_dim: int, window: int | None) -> None:
        self._first = 0 if window is None else -window  # that is kept
        self.keys, self.values = (torch.empty((0, num_kv_heads, head_dim)) for _ in range(2))
        self.positions = np.empty(0, np.int64)

    @property
    def last_position(self) -> int:
        return int(self.positions[-1]) if len(self.positions) else -1

    def append(self, keys: torch.Tensor, values: torch.Tensor, positions: NDArray[np.int64]) -> None:
        kept = slice(self._first, None)
        self.keys = torch.cat((self.keys, keys))[kept]
        self.values = torch.cat((self.values, values))[kept]
        self.positions = np.concatenate((self.positions, positions))[kept]

    def truncate(self, length: int) -> None:
        count = int(np.searchsorted(self.positions, length))
        self.keys, self.values = self.keys[:count], self.values[:count]
        self.positions = self.positions[:count]


class DflashSequence(CommittedRows[LayerRows]):
    """The context of one sequence."""

    def __init__(self, model: DflashModel) -> None:
        sizes = model.spec.num_kv_heads, model.spec.head_dim
        super().__init__([LayerRows(*sizes, layer.window) for layer in model.spec.layers], MOST_WAITING)
        self._model = model

    @property
    def spec(self) -> DflashSpec:
        return self._model.spec

    @torch.inference_mode()
    def _copied(self, features: Any) -> torch.Tensor:
        return torch.as_tensor(features).to(torch.float32, copy=True)

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def _compute(self, parts: list[torch.Tensor], positions: NDArray[np.int64]) -> None:
        model = self._model
        context = model.context(self._joined(parts))
        rotations = model.rotations(positions)
        for weights, rows in zip(model.layers, self._contexts, strict=True):
            x = model.norm(context, weights.attn_norm) if self.spec.is_laguna else context
            rows.append(*model.keys_values(x, weights, rotations), positions)

    @torch.inference_mode()
    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        """See `CpuDflashSequence.draft`."""
        assert 2 <= num_rows <= self.spec.block_size, "a block has an anchor and masks"
        hidden = self.hidden(anchor, num_rows)[1:]
        logits = torch.as_tensor(self._model.head(hidden))
        if self._model.selector is None:
            return _marginals(logits, num_candidates)
        return self._selected(self._model.selector, hidden, logits, anchor)

    @torch.inference_mode()
    def hidden(self, anchor: int, num_rows: int) -> torch.Tensor:
        """What the head reads of every row of the block, [num_rows, E]; see `draft`."""
        self._compute_waiting()
        model, spec = self._model, self.spec
        token_ids = [anchor, *[spec.mask_id] * (num_rows - 1)]
        x = torch.as_tensor(model.embed(token_ids))
        positions = np.arange(self.length, self.length + num_rows)
        block = _Block(positions, model.rotations(positions))
        for weights, rows in zip(model.layers, self._contexts, strict=True):
            x = x + self._attention(x, weights, rows, block)
            x = x + self._feed_forward(x, weights)
        return model.norm(x, model.output_norm)

    def _attention(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        rows: LayerRows,
        block: _Block,
    ) -> torch.Tensor:
        """What attention adds to the residual stream x [B, E]."""
        model, spec, count = self._model, self.spec, len(x)
        x = model.norm(x, weights.attn_norm)
        conv, dynamic = weights.attn_conv, None
        if conv is not None:
            dynamic = conv.dynamic(x)
            x = conv.apply(x, dynamic, 0)
        queries = functional.linear(x, weights.attn_q, weights.q_bias)
        queries = queries.view(count, spec.num_heads, spec.head_dim)
        queries = reference.rotate(model.norm(queries, weights.attn_q_norm), block.rotations)
        keys, values = model.keys_values(x, weights, block.rotations)
        keys, values = torch.cat((rows.keys, keys)), torch.cat((rows.values, values))
        positions = np.concatenate((rows.positions, block.positions))
        mixed = reference.attend(queries, keys, values, block.mask(weights.layer, positions))
        if weights.attn_gate is not None:
            mixed = reference.gated(mixed, functional.linear(x, weights.attn_gate))
        result = functional.linear(mixed, weights.attn_output, weights.output_bias)
        return result if conv is None or dynamic is None else conv.apply(result, dynamic, 1)

    def _feed_forward(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """What the FFN adds to the residual stream x [B, E]."""
        x = self._model.norm(x, weights.ffn_norm)
        conv, dynamic = weights.ffn_conv, None
        if conv is not None:
            dynamic = conv.dynamic(x)
            x = conv.apply(x, dynamic, 0)
        gated = functional.silu(functional.linear(x, weights.ffn_gate)) * functional.linear(x, weights.ffn_up)
        result = functional.linear(gated, weights.ffn_down)
        return result if conv is None or dynamic is None else conv.apply(result, dynamic, 1)

    def _selected(
        self, selector: Selector, hidden: torch.Tensor, logits: torch.Tensor, anchor: int
    ) -> DraftLattice:
        """The lattice of a drafter of the second kind: scores are over the candidates of the head alone."""
        assert self.spec.second is not None
        own, token_ids = logits.topk(self.spec.second.selector_top_k, dim=-1)  # both [L, K]
        before = torch.cat((torch.full_like(token_ids[:1], anchor), token_ids[:-1]))
        projected = functional.linear(hidden, selector.hidden)[:, None]  # [L, 1, rank]
        pairs = (selector.predecessor[before] * projected) @ selector.successor[token_ids].transpose(1, 2)
        log_probs = functional.log_softmax(own[:, None].double() + pairs.double(), dim=-1)
        return DraftLattice(token_ids.cpu().numpy(), log_probs.cpu().numpy())


def _layer_weights(layer: DflashLayer, tensors: dict[str, torch.Tensor], prefix: str) -> LayerWeights:
    def conv(name: str) -> Convolution | None:
        base = tensors.get(f"{prefix}{name}_base")
        return None if base is None else Convolution(base, tensors[f"{prefix}{name}_proj.weight"])

    names = (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm",
        "ffn_gate", "ffn_up", "ffn_down",
    )  # fmt: skip
    plain = {name: tensors[f"{prefix}{name}.weight"] for name in names}
    return LayerWeights(
        layer=layer,
        **plain,
        attn_gate=tensors.get(f"{prefix}attn_gate.weight"),
        **{f"{name}_bias": tensors.get(f"{prefix}attn_{name}.bias") for name in ("q", "k", "v", "output")},
        attn_conv=conv("attn_conv"),
        ffn_conv=conv("ffn_conv"),
    )


def _marginals(logits: torch.Tensor, num_candidates: int) -> DraftLattice:
    """The likeliest tokens of every row of logits [L, V], whatever the token before."""
    best, token_ids = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
    log_probs = best.double() - logits.double().logsumexp(dim=-1, keepdim=True)
    return DraftLattice(token_ids.cpu().numpy(), log_probs.cpu().numpy())


def read_tensors(file: DflashFile) -> dict[str, np.ndarray]:
    """All tensors of a drafter by the names of `tensor_shapes`, as float32."""
    ops = CpuOps(1)
    return {name: ops.read_values(file.gguf, file.tensor(name)) for name in tensor_shapes(file.spec)}
