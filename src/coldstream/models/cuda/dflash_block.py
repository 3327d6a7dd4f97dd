"""The steps of a DFlash drafter on a GPU: rows of a context, and a block of rows with its candidates.

It computes what `models/cpu/dflash.py` computes, in bfloat16. Products are PyTorch's, the embedding and the
head are the target's, and kernels of `kernels/draft_block` do the rest. All of it is queued without the host,
over memory that captured graphs know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, tau
from typing import Any, Final, Self

import torch
from torch.nn import functional

from coldstream.kernels.cuda.program import Noted
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.draft_block import MAX_CANDIDATES
from coldstream.kernels.draft_block.cuda import (
    ATTEND,
    ATTENTION,
    CONTEXT_TYPE,
    MERGE,
    ROWS,
    HeadShape,
    attend_cuda,
    convolve_cuda,
    norm_cuda,
    num_splits,
    parts_size,
    place_committed_rows_cuda,
    place_draft_rows_cuda,
    swiglu_cuda,
)
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.top_log_probs.cuda import PROGRAM as TOP
from coldstream.kernels.top_log_probs.cuda import top_log_probs_cuda, workspace_bytes
from coldstream.models.cuda.features import FEATURE_TYPE
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.mtp_block import MAX_DRAFT_IDS, first_rows
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import DflashLayer, DflashSpec

MOST_PARTS: Final = 2**23  # float32 values of parts of attention, unless one split has more


def kernels_of(spec: DflashSpec) -> Noted:
    """The kernels that the drafter's steps launch, beside the target's."""
    rows = {(ROWS, instance) for instance in ROWS.instances}
    attention = {(ATTENTION, kernel.format(spec.head_dim)) for kernel in (ATTEND, MERGE)}
    return rows | attention | {(TOP, instance) for instance in TOP.instances}


@dataclass(frozen=True)
class Convolution:
    """See `models/cpu/dflash.py`."""

    base: torch.Tensor  # [2, kernel, E]
    proj: torch.Tensor  # [2 · kernel · groups, E]

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """The weights of normed rows x [B, E] by side and distance: [B, 2, kernel, groups]."""
        return functional.linear(x, self.proj).view(len(x), 2, self.base.shape[1], -1)


@dataclass(frozen=True)
class Selector:
    """See `models/cpu/dflash.py`."""

    predecessor: torch.Tensor  # [V, rank]
    successor: torch.Tensor  # [V, rank]
    hidden: torch.Tensor  # [rank, E]


@dataclass(frozen=True)
class LayerMatrices:
    """The weights of a layer: matrices [out, in], one for all that read the same rows; norms float32."""

    layer: DflashLayer
    qkv: torch.Tensor  # queries, keys, values
    gate_up: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor]  # of queries and keys
    output: torch.Tensor
    down: torch.Tensor
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attn_conv: Convolution | None
    ffn_conv: Convolution | None


@dataclass(frozen=True)
class DflashMatrices:
    """All weights of a drafter. They take as many bytes as the file's tensors in these types."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    output_norm: torch.Tensor
    context_kv: torch.Tensor  # [layers, 2 · kv_dim, E], a view of those of the layers
    key_norms: torch.Tensor  # float32 [layers, head_dim]
    layers: tuple[LayerMatrices, ...]
    selector: Selector | None

    @classmethod
    def read(cls, file: DflashFile, ops: CudaOps, device: torch.device) -> Self:
        """Copies them. Raises ModelChangedError if the file shrank, torch.OutOfMemoryError."""
        return cls(**_MatrixReader(file, ops, device).all())


class _MatrixReader:
    def __init__(self, file: DflashFile, ops: CudaOps, device: torch.device) -> None:
        self._file, self._ops, self._device, self._spec = file, ops, device, file.spec

    def all(self) -> dict[str, Any]:
        """The fields of `DflashMatrices`."""
        spec = self._spec
        qkv = self._empty(spec.num_layers, spec.query_dim + 2 * spec.kv_dim, spec.hidden_size)
        gate_up = self._empty(spec.num_layers, 2 * spec.ffn_size, spec.hidden_size)
        key_norms = self._empty(spec.num_layers, spec.head_dim, dtype=torch.float32)
        layers = zip(qkv, gate_up, key_norms, strict=True)
        selector = None
        if spec.second is not None:
            names = ("predecessor", "successor", "hidden")
            selector = Selector(*(self._read(f"selector_{name}.weight") for name in names))
        return {
            "fc": self._read("fc.weight"),
            "hidden_norm": self._read("enc.output_norm.weight"),
            "output_norm": self._read("output_norm.weight"),
            "context_kv": qkv[:, spec.query_dim :],
            "key_norms": key_norms,
            "layers": tuple(self._layer(index, *parts) for index, parts in enumerate(layers)),
            "selector": selector,
        }

    def _layer(
        self, index: int, qkv: torch.Tensor, gate_up: torch.Tensor, key_norm: torch.Tensor
    ) -> LayerMatrices:
        prefix = f"blk.{index}."
        self._fill(qkv, [f"{prefix}{name}.weight" for name in ("attn_q", "attn_k", "attn_v")])
        self._fill(gate_up, [f"{prefix}{name}.weight" for name in ("ffn_gate", "ffn_up")])
        key_norm.copy_(self._values(f"{prefix}attn_k_norm.weight"))
        return LayerMatrices(
            layer=self._spec.layers[index],
            qkv=qkv,
            gate_up=gate_up,
            head_norms=(self._read(f"{prefix}attn_q_norm.weight"), key_norm),
            output=self._read(f"{prefix}attn_output.weight"),
            down=self._read(f"{prefix}ffn_down.weight"),
            attn_norm=self._read(f"{prefix}attn_norm.weight"),
            ffn_norm=self._read(f"{prefix}ffn_norm.weight"),
            attn_conv=self._convolution(f"{prefix}attn_conv"),
            ffn_conv=self._convolution(f"{prefix}ffn_conv"),
        )

    def _convolution(self, name: str) -> Convolution | None:
        if self._spec.second is None:
            return None
        return Convolution(self._read(f"{name}_base"), self._read(f"{name}_proj.weight"))

    def _fill(self, joined: torch.Tensor, names: Sequence[str]) -> None:
        """Tensors of the file one behind the other."""
        at = 0
        for name in names:
            part = self._values(name)
            joined[at : at + len(part)].copy_(part)
            at += len(part)

    def _read(self, name: str) -> torch.Tensor:
        values = self._values(name)
        kept = torch.float32 if name.endswith("norm.weight") else FEATURE_TYPE
        return self._empty(*values.shape, dtype=kept).copy_(values)

    def _values(self, name: str) -> torch.Tensor:
        """A tensor of the file as float32, on the CPU."""
        return torch.from_numpy(self._ops.read_values(self._file.gguf, self._file.tensor(name)))

    def _empty(self, *shape: int, dtype: torch.dtype = FEATURE_TYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class DflashBlock:
    """The drafter of a loaded model, whose embedding, head and workspace it uses.

    Rows of a block: the token `root`, at the position that `length` says, and mask tokens behind it.
    """

    def __init__(self, loaded: Loaded, matrices: DflashMatrices, spec: DflashSpec) -> None:
        self.spec, self.matrices = spec, matrices
        self._ops, self._memory = loaded.ops, loaded.memory
        self._token_embd, self._head = loaded.model.token_embd, first_rows(loaded.model.output, MAX_DRAFT_IDS)
        self._device = matrices.fc.device
        turns = torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim) / tau)
        magnitude = spec.rope.magnitude
        self.heads = HeadShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.rms_norm_eps,
            turns.to(self._device),
            magnitude,
        )
        self._make_memory()

    def _make_memory(self) -> None:
        spec, rows = self.spec, self.spec.block_size
        self.contexts = torch.zeros(
            spec.num_layers * CONTEXT_TYPE.itemsize, dtype=torch.uint8, device=self._device
        )
        self._ids = torch.full((rows,), spec.mask_id, dtype=torch.int32, device=self._device)
        self._x, self._normed, self._mixed = (self._rows(spec.hidden_size) for _ in range(3))
        self._qkv, self._attended = self._rows(self.heads.row_size), self._rows(spec.query_dim)
        self._gate_up, self._gated = self._rows(2 * spec.ffn_size), self._rows(spec.ffn_size)
        # Without a window a context may be of any length.
        windows = [layer.window for layer in spec.layers]
        longest = None if None in windows else max(window for window in windows if window) + rows
        most_splits = max(1, MOST_PARTS // parts_size(rows, self.heads, 1))
        self._splits = min(most_splits, num_splits(longest or 2**30, spec.head_dim))
        size = parts_size(rows, self.heads, self._splits)
        self._parts = torch.empty(size, dtype=torch.float32, device=self._device)
        ranks = MAX_CANDIDATES if spec.second is None else spec.second.selector_top_k
        self.num_ranks = min(ranks, self._head.shape[0])
        shape = (rows - 1, self.num_ranks)
        scores = shape if spec.second is None else (*shape, self.num_ranks)
        # Ids, and log-probabilities as their bits, in one piece that the host reads.
        self.found = torch.zeros(prod(shape) + prod(scores), dtype=torch.int32, device=self._device)
        self._own_log_probs = torch.empty(shape, dtype=torch.float32, device=self._device)
        size = workspace_bytes(rows - 1, self._head.shape[0], self.num_ranks)
        self._best = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._arrivals = torch.zeros(rows - 1, dtype=torch.int32, device=self._device)
        self.candidate_ids = self.found[: prod(shape)].view(shape)
        self.log_probs = self.found[prod(shape) :].view(torch.float32).view(scores)

    def _rows(self, width: int) -> torch.Tensor:
        return torch.empty((self.spec.block_size, width), dtype=FEATURE_TYPE, device=self._device)

    def append(
        self, features: torch.Tensor, contexts: torch.Tensor, first: torch.Tensor | int,
        count: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Puts committed rows, features [n, feature_size], into contexts; see `place_committed_rows_cuda`."""
        matrices = self.matrices
        x = functional.linear(features, matrices.fc)
        normed = torch.empty_like(x)
        norm_cuda(x, matrices.hidden_norm, self.spec.rms_norm_eps, normed)
        kv = torch.bmm(
            normed.expand(self.spec.num_layers, *normed.shape), matrices.context_kv.transpose(1, 2)
        )
        place_committed_rows_cuda(kv, self.heads, matrices.key_norms, contexts, first, count)

    def draft(self, num_rows: int, root: torch.Tensor, length: torch.Tensor) -> None:
        """The candidates of num_rows − 1 positions after `root`, behind the rows of `contexts`.

        root, length: int32 [1] on the device. Writes the first positions of `candidate_ids` and `log_probs`.
        """
        self._memory.start_step()
        self._ids[:1].copy_(root)
        x = self._x[:num_rows]
        x.copy_(self._ops.embed(self._token_embd, self._ids[:num_rows]))
        for index, layer in enumerate(self.matrices.layers):
            self._attention(index, layer, x, length)
            self._feed_forward(layer, x)
        self._norm(x, self.matrices.output_norm)
        hidden = self._normed[1:num_rows]
        states = self._ops.activations(*hidden.shape)
        states.values.copy_(hidden)
        self._ops.launch(quantize_cuda, states.values, states.quantised)
        (logits,) = self._ops.linear(states, (self._head,))
        self._find_candidates(hidden, logits, root)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = self._normed[: len(x)]
        norm_cuda(x, weight, self.spec.rms_norm_eps, normed)
        return normed

    def _attention(self, index: int, layer: LayerMatrices, x: torch.Tensor, length: torch.Tensor) -> None:
        """Adds what attention says to the residual stream x [B, E]."""
        count, seen = len(x), layer.layer
        qkv, attended = self._qkv[:count], self._attended[:count]
        normed, dynamic = self._convolved(self._norm(x, layer.attn_norm), layer.attn_conv)
        torch.mm(normed, layer.qkv.T, out=qkv)
        place_draft_rows_cuda(qkv, self.heads, layer.head_norms, length)
        attend_cuda(
            qkv, self.heads, self.contexts, index, length, seen.window, seen.is_causal, self._splits,
            self._parts, attended,
        )  # fmt: skip
        self._add(attended, layer.output, layer.attn_conv, dynamic, x)

    def _feed_forward(self, layer: LayerMatrices, x: torch.Tensor) -> None:
        """Adds what the FFN says to the residual stream x [B, E]."""
        gate_up, gated = self._gate_up[: len(x)], self._gated[: len(x)]
        normed, dynamic = self._convolved(self._norm(x, layer.ffn_norm), layer.ffn_conv)
        torch.mm(normed, layer.gate_up.T, out=gate_up)
        swiglu_cuda(gate_up, gated)
        self._add(gated, layer.down, layer.ffn_conv, dynamic, x)

    def _convolved(
        self, normed: torch.Tensor, conv: Convolution | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows before a sublayer, and the weights of both of its convolutions."""
        if conv is None:
            return normed, None
        dynamic, mixed = conv.dynamic(normed), self._mixed[: len(normed)]
        convolve_cuda(normed, conv.base[0], dynamic[:, 0], None, mixed)
        return mixed, dynamic

    def _add(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        conv: Convolution | None,
        dynamic: torch.Tensor | None,
        x: torch.Tensor,
    ) -> None:
        """Adds the product of a sublayer's last rows to x."""
        if conv is None or dynamic is None:
            torch.addmm(x, rows, weight.T, out=x)
            return
        result = self._normed[: len(rows)]
        torch.mm(rows, weight.T, out=result)
        convolve_cuda(result, conv.base[1], dynamic[:, 1], x, x)

    def _find_candidates(self, hidden: torch.Tensor, logits: torch.Tensor, root: torch.Tensor) -> None:
        count, selector, ids = len(hidden), self.matrices.selector, self.candidate_ids[: len(hidden)]
        own = (self.log_probs if selector is None else self._own_log_probs)[:count]
        self._ops.launch(top_log_probs_cuda, logits, self._best, self._arrivals, ids, own)
        if selector is None:
            return
        before = torch.cat((root.expand(1, self.num_ranks), ids[:-1]))
        projected = functional.linear(hidden, selector.hidden)[:, None]
        pairs = (selector.predecessor[before] * projected) @ selector.successor[ids].transpose(1, 2)
        self.log_probs[:count].copy_(functional.log_softmax(own[:, None] + pairs.float(), dim=-1))
