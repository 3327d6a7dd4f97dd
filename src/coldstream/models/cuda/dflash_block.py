"""The steps of a DFlash drafter on a GPU: rows of a context, and a block of rows with its candidates.

It computes what `models/cpu/dflash.py` computes, with the engine's products of matrices in the file's own
types. The embedding and the head are the target's. Kernels of `kernels/draft_block` do what is particular to
drafts, in float32; keys and values are bfloat16. All of it is queued without the host, over memory that is
counted before and that captured graphs know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, tau
from typing import Final, Self

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, RawArray, as_type
from coldstream.kernels.cuda.copy_values import copy_values_cuda
from coldstream.kernels.cuda.loader import CudaWeight
from coldstream.kernels.cuda.memory import Memory, MemoryPlan
from coldstream.kernels.cuda.program import Noted, note_kernels
from coldstream.kernels.cuda_ops import CudaOps
from coldstream.kernels.draft_block import MAX_CANDIDATES
from coldstream.kernels.draft_block.cuda import (
    CONTEXT_TYPE,
    MAX_COMMITTED_LAYERS,
    ROWS,
    CommittedRowsOfLayer,
    DraftRows,
    HeadShape,
    LayerView,
    attend_cuda,
    convolve_cuda,
    norm_features_cuda,
    num_splits,
    parts_shape,
    place_committed_rows_cuda,
    place_draft_rows_cuda,
    score_pairs_cuda,
)
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.quant_tensor import QuantTensor
from coldstream.kernels.quantize.cuda import quantize_cuda
from coldstream.kernels.top_log_probs.cuda import top_log_probs_cuda, workspace_bytes
from coldstream.models.cuda.features import FEATURE_TYPE
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.memory_plan import row_counts
from coldstream.models.cuda.mtp_block import first_rows
from coldstream.models.dflash.context import CHUNK_ROWS
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import DflashSpec
from coldstream.models.dflash.weights import (
    DflashLayerWeights,
    DflashWeights,
    DynamicConvolution,
    SelectorWeights,
)
from coldstream.models.mtp.model import MAX_DRAFT_IDS

MOST_PARTS: Final = 2**23  # float32 values of parts of attention, unless one split has more
# Rows that wait for a draft, so that those between drafts are computed together: their products read the
# weights once.
LENGTH, ROOT, FIRST, COUNT, NUM_PLACES = 0, 1, 2, 3, 4  # of what the host writes before a draft or rows
MOST_WAITING: Final = 64
MOST_APPENDED: Final = MOST_WAITING - 1 + CHUNK_ROWS


@dataclass(frozen=True)
class DraftTarget:
    """What drafts take of the model that they are for. Its operations are over its own workspace."""

    ops: CudaOps
    token_embd: CudaWeight
    head: QuantTensor  # of the first tokens
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0

    @classmethod
    def of(cls, loaded: Loaded) -> Self:
        model, spec = loaded.model, loaded.model.spec
        head = first_rows(model.output, MAX_DRAFT_IDS)
        return cls(loaded.ops, model.token_embd, head, spec.embedding_scale, spec.logit_softcap)

    def embed(self, token_ids: DeviceArray) -> DeviceArray:
        """Rows of the embedding, scaled as the model scales them."""
        rows, scale = self.ops.embed(self.token_embd, token_ids), self.embedding_scale
        return rows if scale == 1 else self.ops.scale(rows, scale)

    def logits(self, states: Activations) -> DeviceArray:
        """Logits of the first tokens."""
        (logits,) = self.ops.linear(states, (self.head,))
        return self.ops.softcap(logits, self.logit_softcap) if self.logit_softcap else logits

    @classmethod
    def planned(cls, spec: DflashSpec) -> Self:
        """Without memory, where the model is not known: drafts take as much beside any."""
        ops = CudaOps(MemoryPlan(), 1, spec.block_size)
        shape = (spec.vocab_size, spec.hidden_size)
        values = ops.memory.persistent(shape, "float32")
        table = QuantTensor.from_bytes(as_type(values, "uint8"), QuantType.F32, shape)
        return cls(ops, table, first_rows(table, MAX_DRAFT_IDS))

    def without_memory(self) -> "DraftTarget":
        """The same weights with operations that are only noted."""
        ops = CudaOps(MemoryPlan(), 1, 1, notes_kernels=True)
        return replace(self, ops=ops)


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a drafter's weights and of all that is alive between its steps, and of one step."""

    persistent: int
    workspace: int

    @property
    def total(self) -> int:
        return self.persistent + self.workspace

    @classmethod
    def of(cls, file: DflashFile) -> Self:
        """Beside any model."""
        memory = MemoryPlan()
        DflashBlock.load(file, memory, DraftTarget.planned(file.spec)).run_all()
        return cls(memory.persistent_bytes, memory.workspace_bytes)


def kernels_of(file: DflashFile, target: DraftTarget) -> Noted:
    """The kernels that the drafter's steps launch, the target's among them."""
    with note_kernels() as noted:
        block = DflashBlock.load(file, MemoryPlan(), target.without_memory(), notes_kernels=True)
        block.run_all()
    return noted | {(ROWS, instance) for instance in ROWS.instances}


class DflashBlock:
    """The drafter beside a model.

    Rows of a block: the token `root`, at the position that `length` says, and mask tokens behind it.

    found: int32, the candidates' ids and their log-probabilities as bits, in one piece that the host reads.
    candidate_ids, log_probs: views of it, [block_size − 1, K] and that or, of the second kind, [.., K, K].
    waiting: `FEATURE_TYPE` [MOST_WAITING, feature_size], where features lie that a captured step appends.
    places: int32 [NUM_PLACES], for numbers that the host writes before a step.
    """

    def __init__(self, spec: DflashSpec, weights: DflashWeights, ops: CudaOps, target: DraftTarget) -> None:
        """ops: over the drafter's own memory."""
        self.spec, self.weights = spec, weights
        self._ops, self._target = ops, target
        turns = ops.float_array(spec.rope.inverse_frequencies(spec.head_dim) / tau)
        self.heads = HeadShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, turns, spec.rope.magnitude
        )
        self._num_splits = _num_splits(spec, self.heads)
        self.contexts = ops.zeros((spec.num_layers * CONTEXT_TYPE.itemsize,), "uint8")
        self._ids = ops.int_vector([spec.mask_id] * spec.block_size)
        ranks = MAX_CANDIDATES if spec.second is None else spec.second.selector_top_k
        self.num_ranks = min(ranks, target.head.shape[0])
        shape = (spec.block_size - 1, self.num_ranks)
        scores = shape if spec.second is None else (*shape, self.num_ranks)
        # Before the ids of the first position is the root in its place, as often as there are ranks.
        memory = ops.zeros((self.num_ranks + prod(shape) + prod(scores),), "int32")
        self._root, self.found = memory[: self.num_ranks], memory[self.num_ranks :]
        self._all_ids = memory[: self.num_ranks + prod(shape)]
        self.candidate_ids = self.found[: prod(shape)].reshape(*shape)
        self.log_probs = as_type(self.found[prod(shape) :], "float32").reshape(*scores)
        self._arrivals = ops.zeros((spec.block_size - 1,), "int32")
        self.waiting = ops.zeros((MOST_WAITING, spec.feature_size), FEATURE_TYPE)
        self.places = ops.zeros((NUM_PLACES,), "int32")

    @classmethod
    def load(
        cls, file: DflashFile, memory: Memory, target: DraftTarget, *, notes_kernels: bool = False
    ) -> Self:
        """Copies the weights into `memory`, as many bytes as they have in the file.

        Over a `MemoryPlan` only small tensors are read. Raises ModelChangedError if the file shrank.
        """
        ops = CudaOps(memory, 1, file.spec.block_size, notes_kernels=notes_kernels)
        weights = DflashWeights.load(file, ops)
        if not ops.planning:
            ops.finish_loading(None)
        return cls(file.spec, weights, ops, target)

    def run_all(self) -> None:
        """Every step of any number of rows: to count memory and find kernels."""
        spec, others = self.spec, MemoryPlan()  # what drafts are given
        length = others.persistent((1,), "int32")
        for num_rows in _counts(2, spec.block_size):
            self.draft(num_rows, length, length)
        for num_rows in _counts(1, MOST_APPENDED):
            features = others.persistent((num_rows, spec.feature_size), FEATURE_TYPE)
            self.append(features, self.contexts, length, length)

    def append(
        self, features: DeviceArray, contexts: DeviceArray, first: DeviceArray | int,
        count: DeviceArray | None = None,
    ) -> None:  # fmt: skip
        """Puts committed rows, features [n, feature_size], into contexts; see `place_committed_rows_cuda`."""
        ops, weights = self._ops, self.weights
        ops.memory.start_step()
        states, eps = ops.activations(*features.shape), self.spec.rms_norm_eps
        if weights.aux_norms is None:
            ops.launch(copy_values_cuda, features, states.values)
        else:
            ops.launch(norm_features_cuda, features, weights.aux_norms, eps, states.values)
        (hidden,) = ops.linear(self._quantised(states), (weights.fc,))
        normed = ops.rms_norm(hidden, weights.hidden_norm, eps)
        for index in range(0, self.spec.num_layers, MAX_COMMITTED_LAYERS):
            layers = weights.layers[index : index + MAX_COMMITTED_LAYERS]
            rows = self._committed(normed, layers)
            own = contexts[index * CONTEXT_TYPE.itemsize :]
            ops.launch(place_committed_rows_cuda, rows, self.heads, own, first, count)

    def _committed(
        self, normed: Activations, layers: Sequence[DflashLayerWeights]
    ) -> list[CommittedRowsOfLayer]:
        """Keys and values of committed rows in these layers, by one product unless each norms its input."""
        if self.spec.is_laguna:
            return [self._normed_and_committed(normed, layer) for layer in layers]
        matrices = [matrix for layer in layers for matrix in (layer.attn_k, layer.attn_v)]
        outs = iter(self._ops.linear(normed, matrices))
        return [_committed_rows(next(outs), next(outs), layer) for layer in layers]

    def _normed_and_committed(self, context: Activations, layer: DflashLayerWeights) -> CommittedRowsOfLayer:
        normed = self._ops.rms_norm(context.values, layer.attn_norm, self.spec.rms_norm_eps)
        keys, values = self._ops.linear(normed, (layer.attn_k, layer.attn_v))
        return _committed_rows(keys, values, layer)

    def draft(self, num_rows: int, root: DeviceArray, length: DeviceArray) -> None:
        """The candidates of num_rows − 1 positions after `root`, behind the rows of `contexts`.

        root, length: int32 [1] on the device. Writes the first positions of `candidate_ids` and `log_probs`.
        """
        states = self.states(num_rows, root, length)
        logits = self._target.logits(states)
        selector, count = self.weights.selector, num_rows - 1
        ids = self.candidate_ids[:count]
        own = self.log_probs[:count] if selector is None else self._ops.empty(*ids.shape)
        best = self._ops.empty(workspace_bytes(count, logits.shape[1], self.num_ranks), dtype="uint8")
        self._ops.launch(top_log_probs_cuda, logits, best, self._arrivals, ids, own)
        if selector is not None:
            repeated = RawArray(root.data_ptr(), (self.num_ranks, 1), "int32", root, (0, 1))
            self._ops.launch(copy_values_cuda, repeated, self._root.reshape(-1, 1))
            self._score_pairs(selector, states, own)

    def _score_pairs(self, selector: SelectorWeights, states: Activations, own: DeviceArray) -> None:
        """Writes `log_probs` of candidates that have `own` ones, after each candidate before."""
        ops, (count, ranks) = self._ops, own.shape
        (projected,) = ops.linear(states, (selector.hidden,))
        before = self._all_ids[: count * ranks]
        ids = self._all_ids[ranks : (count + 1) * ranks]
        predecessors = ops.embed(selector.predecessor, before).reshape(count, ranks, -1)
        successors = ops.embed(selector.successor, ids).reshape(count, ranks, -1)
        ops.launch(score_pairs_cuda, predecessors, projected, successors, own, self.log_probs[:count])

    def states(self, num_rows: int, root: DeviceArray, length: DeviceArray) -> Activations:
        """What the head reads of the rows behind the root, [num_rows − 1, E], until the next step."""
        ops, target, eps = self._ops, self._target, self.spec.rms_norm_eps
        ops.memory.start_step()
        target.ops.memory.start_step()
        ops.launch(copy_values_cuda, root.reshape(1, 1), self._ids[:1].reshape(1, 1))
        x = target.embed(self._ids[:num_rows])
        first, *others = self.weights.layers
        normed = ops.rms_norm(x, first.attn_norm, eps)
        for index, layer in enumerate(self.weights.layers):
            x, normed = ops.add_norm(x, self._attention(index, layer, normed, length), layer.ffn_norm, eps)
            update = self._feed_forward(layer, normed)
            if index < len(others):
                x, normed = ops.add_norm(x, update, others[index].attn_norm, eps)
        return ops.add_norm(x[1:], update[1:], self.weights.output_norm, eps)[1]

    def _attention(
        self, index: int, layer: DflashLayerWeights, normed: Activations, length: DeviceArray
    ) -> DeviceArray | BiasedOutput:
        """What attention adds to the residual stream, [B, E]."""
        ops, heads, seen, num_rows = self._ops, self.heads, layer.layer, normed.shape[0]
        x, dynamic = self._convolved(normed, layer.attn_conv)
        matrices = [layer.attn_q, layer.attn_k, layer.attn_v]
        if layer.attn_gate is not None:
            matrices.append(layer.attn_gate)
        queries, keys, values, *gates = ops.linear(x, matrices)
        rows = DraftRows(queries, ops.empty(num_rows, 2 * heads.kv_dim, dtype="bfloat16"))
        weights = (layer.attn_q_norm, layer.attn_k_norm)
        biases = None if layer.q_bias is None else (layer.q_bias, layer.k_bias, layer.v_bias)
        ops.launch(place_draft_rows_cuda, rows, keys, values, heads, weights, length, biases)
        parts = ops.empty(*parts_shape(num_rows, heads, self._num_splits))
        view, out = LayerView(index, seen.window, seen.is_causal), ops.activations(num_rows, heads.query_dim)
        ops.launch(attend_cuda, rows, heads, self.contexts, view, length, parts, out.values, *gates)
        (update,) = ops.linear(self._quantised(out), (layer.attn_output,))
        if layer.output_bias is None:
            return self._convolve(update, layer.attn_conv, dynamic)
        if layer.attn_conv is None:
            return BiasedOutput(update, layer.output_bias)
        return self._convolve(ops.add_bias(update, layer.output_bias), layer.attn_conv, dynamic)

    def _feed_forward(self, layer: DflashLayerWeights, normed: Activations) -> DeviceArray:
        """What the FFN adds to the residual stream, [B, E]."""
        x, dynamic = self._convolved(normed, layer.ffn_conv)
        gate, up = self._ops.linear(x, (layer.ffn_gate, layer.ffn_up))
        (update,) = self._ops.linear(self._ops.glu(gate, up), (layer.ffn_down,))
        return self._convolve(update, layer.ffn_conv, dynamic)

    def _convolved(
        self, normed: Activations, conv: DynamicConvolution | None
    ) -> tuple[Activations, DeviceArray | None]:
        """Rows before a sublayer, and the weights of both of its convolutions, [B, 2, kernel, groups]."""
        if conv is None:
            return normed, None
        (weights,) = self._ops.linear(normed, (conv.proj,))
        dynamic = weights.reshape(len(weights), *conv.base.shape[:2], -1)
        out = self._ops.activations(*normed.shape)
        self._ops.launch(convolve_cuda, normed.values, conv.base[0], dynamic[:, 0], out.values)
        return self._quantised(out), dynamic

    def _convolve(
        self, update: DeviceArray, conv: DynamicConvolution | None, dynamic: DeviceArray | None
    ) -> DeviceArray:
        """Rows behind a sublayer."""
        if conv is None or dynamic is None:
            return update
        out = self._ops.empty(*update.shape)
        self._ops.launch(convolve_cuda, update, conv.base[1], dynamic[:, 1], out)
        return out

    def _quantised(self, states: Activations) -> Activations:
        """The same, with codes of its values."""
        self._ops.launch(quantize_cuda, states.values, states.quantised)
        return states


def _committed_rows(
    keys: DeviceArray, values: DeviceArray, layer: DflashLayerWeights
) -> CommittedRowsOfLayer:
    biases = None if layer.k_bias is None else (layer.k_bias, layer.v_bias)
    return CommittedRowsOfLayer(keys, values, layer.attn_k_norm, biases)


def _counts(least: int, most: int) -> list[int]:
    """Of rows; see `row_counts`."""
    return [*(count for count in row_counts(most) if least <= count < most), most]


def _num_splits(spec: DflashSpec, heads: HeadShape) -> int:
    """Parts of attention. Without a window a context may be of any length."""
    windows = [layer.window for layer in spec.layers]
    longest = None if None in windows else max(window for window in windows if window) + spec.block_size
    most = max(1, MOST_PARTS // prod(parts_shape(spec.block_size, heads, 1)))
    return min(most, num_splits(longest or 2**30, spec.head_dim))
