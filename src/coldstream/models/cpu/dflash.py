"""A DFlash drafter on the CPU: the context of a sequence, and drafts of whole blocks after it.

A committed row is the residual streams of the target after its auxiliary layers. It becomes one vector, of
which every layer keeps keys and values. A draft computes a block of noise rows at the positions behind: the
anchor, which is the newest token, and mask tokens. They attend to the context and to each other. The target's
head turns each row into the candidates at its position. Keys and values of noise rows are forgotten with the
draft.

Matrices stay as they are in the file and are multiplied by the engine's products; the rest is NumPy over the
rows of a block. A target accepts only what it would have said itself, so nothing here changes a token.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from coldstream.errors import host_memory_errors
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import Array, Weight
from coldstream.models.dflash.context import CommittedRows, ContextRows, new_contexts
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import (
    DflashSpec,
    DraftLattice,
    is_matrix,
    tensor_shapes,
    visible_rows,
)
from coldstream.models.dflash.weights import DflashLayerWeights, DflashWeights, DynamicConvolution

MOST_WAITING: Final = 16  # rows that wait for a draft, so that those between drafts are computed together
Rotations = tuple[Array, Array]  # cosines and sines [n, 1, head_dim / 2]


def weight_bytes(file: DflashFile) -> int:
    """Memory of the weights: matrices as they are in the file, the rest as float32."""
    return sum(
        file.tensor(name).num_bytes if is_matrix(name, shape) else 4 * prod(shape)
        for name, shape in tensor_shapes(file.spec).items()
    )


class CpuDflash:
    """The weights of a drafter, and the embedding and head of its target."""

    def __init__(
        self,
        file: DflashFile,
        ops: CpuOps,
        token_embd: Weight,
        output: Weight,
        *,
        embedding_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        """ops: `CpuOps.beside` those that the target, whose matrices these are, was loaded with.

        embedding_scale, logit_softcap: the target's, as `ModelSpec` has them.

        The file may be closed afterwards. Raises UnsupportedError for a type that no kernel multiplies, and
        ModelChangedError if the file shrank.
        """
        self.spec, self.ops = file.spec, ops
        self._token_embd, self._output = token_embd, output
        self._embedding_scale, self._logit_softcap = embedding_scale, logit_softcap
        self.weights = DflashWeights.load(file, ops)

    def new_sequence(self) -> "CpuDflashSequence":
        """An empty sequence. It takes no memory before its first row."""
        return CpuDflashSequence(self)

    def product(self, x: Array, weight: Weight, bias: Array = None) -> Array:
        """Rows [n, out] of rows x [n, in], plus a bias [out] if there is one."""
        return self._biased(self.ops.linear(x, (weight,))[0], bias)

    def _biased(self, rows: Array, bias: Array) -> Array:
        """Rows [n, out] plus a bias [out], or as they are if it is None."""
        return rows if bias is None else self.ops.add_bias(rows, bias)

    def norm(self, x: Array, weight: Array) -> Array:
        """RMS norm over the last dimension."""
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        return self.ops.rms_norm(rows, weight, self.spec.rms_norm_eps).reshape(x.shape)

    def rotations(self, positions: Array) -> Rotations:
        """For heads of rows at positions [n]."""
        cos, sin = self.spec.rope.cos_sin(positions, self.spec.head_dim)
        return cos[:, None], sin[:, None]

    def context(self, features: Array) -> Array:
        """The vectors [n, E] of committed rows, of which every layer keeps keys and values."""
        weights, spec = self.weights, self.spec
        if weights.aux_norms is not None:
            of_layers = weights.aux_norms.ravel()
            features = self.ops.norm_streams(features, of_layers, spec.rms_norm_eps, len(spec.aux_layers))
        return self.norm(self.product(features, weights.fc), weights.hidden_norm)

    def keys_values(self, x: Array, layer: DflashLayerWeights, rotations: Rotations) -> tuple[Array, Array]:
        """Keys and values [n, num_kv_heads, head_dim] of rows [n, E]."""
        shape = (len(x), self.spec.num_kv_heads, self.spec.head_dim)
        keys, values = self.ops.linear(x, (layer.attn_k, layer.attn_v))
        keys, values = self._biased(keys, layer.k_bias), self._biased(values, layer.v_bias)
        keys = self.norm(keys.reshape(shape), layer.attn_k_norm)
        return _rotated(keys, rotations), values.reshape(shape)

    def embed(self, token_ids: Sequence[int]) -> Array:
        """Rows of the target's embedding, scaled as the target scales them."""
        rows = self._gathered(self._token_embd, np.array(token_ids, np.int32))
        scale = self._embedding_scale
        return rows if scale == 1 else np.asarray(self.ops.scale(rows, scale))

    def _gathered(self, table: Weight, row_ids: Array) -> Array:
        """Rows of a table for int32 numbers of any shape: float32 [..., width]."""
        rows: Array = self.ops.embed(table, row_ids.reshape(-1))
        return rows.reshape(*row_ids.shape, -1)

    def lattice(self, hidden: Array, anchor: int, num_candidates: int) -> DraftLattice:
        """The candidates of rows [L, E] behind an anchor."""
        logits = self.product(hidden, self._output)
        if self._logit_softcap:
            logits = self.ops.softcap(logits, self._logit_softcap)
        if self.spec.second is None or self.weights.selector is None:
            token_ids, log_probs = self.ops.top_log_probs(logits, num_candidates)
            return DraftLattice(token_ids.astype(np.int64), log_probs.astype(np.float64))
        selector = self.weights.selector
        # Relative to all of the vocabulary, which the softmax over the candidates takes out again.
        token_ids, own = self.ops.top_log_probs(logits, self.spec.second.selector_top_k)
        before = np.concatenate((np.full_like(token_ids[:1], anchor), token_ids[:-1]))
        projected = self.product(hidden, selector.hidden)[:, None]
        predecessors = self._gathered(selector.predecessor, before)
        successors = self._gathered(selector.successor, token_ids)
        pairs = (predecessors * projected) @ successors.transpose(0, 2, 1)
        scores = own[:, None].astype(np.float64) + pairs
        scores -= scores.max(axis=-1, keepdims=True)
        log_probs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        return DraftLattice(token_ids.astype(np.int64), log_probs)

    def convolved(self, x: Array, dynamic: Array, conv: DynamicConvolution, side: int) -> Array:
        """Rows [B, E], of which each is a weighted sum of rows of x [B, E] up to its own."""
        num_rows, _, kernel, groups = dynamic.shape
        grouped = x.reshape(num_rows, groups, -1)
        base = conv.base[side].reshape(kernel, groups, -1)
        weights = base + dynamic[:, side, :, :, None]  # [B, kernel, groups, group]
        result = weights[:, 0] * grouped
        for distance in range(1, min(num_rows, kernel)):
            result[distance:] += weights[distance:, distance] * grouped[:-distance]
        return result.reshape(x.shape)

    def dynamic(self, x: Array, conv: DynamicConvolution) -> Array:
        """The weights of normed rows x [B, E] by side and distance: [B, 2, kernel, groups]."""
        return self.product(x, conv.proj).reshape(len(x), *conv.base.shape[:2], -1)


class CpuDflashSequence(CommittedRows[ContextRows]):
    """The context of one sequence. Raises OutOfMemoryError."""

    def __init__(self, model: CpuDflash) -> None:
        super().__init__(new_contexts(model.spec), MOST_WAITING)
        self._model = model

    @property
    def spec(self) -> DflashSpec:
        return self._model.spec

    @host_memory_errors()
    def append(self, features: Any) -> None:
        """See `CommittedRows`."""
        super().append(features)

    def _copied(self, features: Any) -> Array:
        return np.array(features, np.float32)

    def _joined(self, parts: list[Array]) -> Array:
        return np.concatenate(parts)

    def _compute(self, parts: list[Array], positions: Array) -> None:
        model = self._model
        context = model.context(self._joined(parts))
        rotations = model.rotations(positions)
        for layer, rows in zip(model.weights.layers, self._contexts, strict=True):
            x = model.norm(context, layer.attn_norm) if self.spec.is_laguna else context
            rows.append(*model.keys_values(x, layer, rotations), positions)

    @host_memory_errors()
    def draft(self, anchor: int, num_rows: int, num_candidates: int) -> DraftLattice:
        """Drafts num_rows − 1 positions after the token `anchor`, which follows the committed rows.

        num_rows: 2 … spec.block_size. A longer block also changes the tokens of a shorter one.
        num_candidates: of every position, for a drafter of the first kind. The second kind has its own
        number. Raises OutOfMemoryError, and ModelChangedError of the target.
        """
        assert 2 <= num_rows <= self.spec.block_size, "a block has an anchor and masks"
        return self._model.lattice(self.hidden(anchor, num_rows)[1:], anchor, num_candidates)

    def hidden(self, anchor: int, num_rows: int) -> Array:
        """What the head reads of every row of the block, [num_rows, E]; see `draft`."""
        self._compute_waiting()
        model = self._model
        x = model.embed([anchor, *[self.spec.mask_id] * (num_rows - 1)])
        positions = np.arange(self.length, self.length + num_rows)
        rotations = model.rotations(positions)
        for layer, rows in zip(model.weights.layers, self._contexts, strict=True):
            x = x + self._attention(x, layer, rows, positions, rotations)
            x = x + self._feed_forward(x, layer)
        return model.norm(x, model.weights.output_norm)

    def _attention(
        self, x: Array, layer: DflashLayerWeights, rows: ContextRows, positions: Array, rotations: Rotations
    ) -> Array:
        """What attention adds to the residual stream x [B, E]."""
        model, spec, count = self._model, self.spec, len(x)
        x = model.norm(x, layer.attn_norm)
        conv = layer.attn_conv
        dynamic = None if conv is None else model.dynamic(x, conv)
        if conv is not None and dynamic is not None:
            x = model.convolved(x, dynamic, conv, 0)
        queries = model.product(x, layer.attn_q, layer.q_bias)
        queries = queries.reshape(count, spec.num_heads, spec.head_dim)
        queries = _rotated(model.norm(queries, layer.attn_q_norm), rotations)
        window = layer.layer.window
        first = 0 if window is None else int(positions[0]) - window + 1
        keys, values, seen = rows.with_block(first, *model.keys_values(x, layer, rotations), positions)
        mixed = _attend(queries, keys, values, visible_rows(layer.layer, positions, seen))
        if layer.attn_gate is not None:
            gates = np.logaddexp(model.product(x, layer.attn_gate), np.float32(0))  # the softplus
            mixed = (mixed.reshape(*gates.shape, -1) * gates[:, :, None]).reshape(mixed.shape)
        result = model.product(mixed, layer.attn_output, layer.output_bias)
        return result if conv is None or dynamic is None else model.convolved(result, dynamic, conv, 1)

    def _feed_forward(self, x: Array, layer: DflashLayerWeights) -> Array:
        """What the FFN adds to the residual stream x [B, E]."""
        model = self._model
        x = model.norm(x, layer.ffn_norm)
        conv = layer.ffn_conv
        dynamic = None if conv is None else model.dynamic(x, conv)
        if conv is not None and dynamic is not None:
            x = model.convolved(x, dynamic, conv, 0)
        gate, up = model.ops.linear(x, (layer.ffn_gate, layer.ffn_up))
        result = model.product(model.ops.glu(gate, up), layer.ffn_down)
        return result if conv is None or dynamic is None else model.convolved(result, dynamic, conv, 1)


def _rotated(heads: Array, rotations: Rotations) -> Array:
    """Heads [n, heads, head_dim], whose halves are rotated against each other."""
    cos, sin = rotations
    low, high = np.split(heads, 2, axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def _attend(queries: Array, keys: Array, values: Array, mask: Array | None) -> Array:
    """Attention of queries [B, heads, d] to keys and values [L, kv_heads, d]: [B, heads · d].

    mask: bool [B, L], true where a key is seen; None: all are.
    """
    count, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    grouped = queries.reshape(count, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    scores = grouped.reshape(num_kv_heads, group * count, head_dim) @ keys.transpose(1, 2, 0)
    scores *= np.float32(head_dim**-0.5)
    if mask is not None:
        scores.reshape(num_kv_heads, group, count, -1)[:, :, ~mask] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = (scores @ values.transpose(1, 0, 2)).reshape(num_kv_heads, group, count, head_dim)
    return np.ascontiguousarray(mixed.transpose(2, 0, 1, 3)).reshape(count, num_heads * head_dim)
