"""The operations a model is written in; every device implements this one interface.

`layers/` and `models/` call nothing else, so a model's forward pass is written once. `ReferenceOps` (plain
PyTorch, float32, differentiable) defines the meaning; `CpuOps` runs C++, also as a captured graph.

Shapes: T rows (tokens, of one or several sequences), E hidden size, H query heads, G key/value heads, D head
size, C convolution channels, NK / NV key / value heads of the gated DeltaNet, d their head size, K experts
per token, F an FFN size. Activations are float32 with unit stride along the last dimension.

An `Array` is numpy's under `CpuOps`, PyTorch's under `ReferenceOps`, and under `CudaOps` it is one of
`kernels/cuda/array.py`. Layers index, slice and reshape them. All arithmetic goes through `Ops`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import numpy as np

from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.indexer.records import ChosenBlocks, IndexerHeads, IndexerInputs
from coldstream.kernels.linear.records import BiasedOutput

Array = Any  # see the module docstring
Weight = Any  # result of `load_weight` of the same Ops, opaque to others
DeltaNetGate = Literal["silu", "sigmoid"]
Gating = Literal["softmax", "sigmoid", "softmax of the chosen", "square root of softplus"]
# By their numbers in files, which kernels use too.
GATINGS: Mapping[int, Gating] = MappingProxyType(
    {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen", 4: "square root of softplus"}
)

# What multiplies a head's result. query: the sigmoids of a vector that the query projection has behind each
# query. head, element: softplus of a projection of its own, with one number for a head or for an element.
OutputGate = Literal["none", "query", "head", "element"]

BLOCK_POSITIONS = 256  # in a block of keys and values, and in a chunk that attention sums separately
MAX_TREE_ROWS = 64
GatedUnit = Literal["swiglu", "clamped swiglu", "geglu"]
GATED_UNITS: tuple[GatedUnit, ...] = get_args(GatedUnit)  # by the number that kernels know them by
MAX_SHORT_CHAIN = 8  # rows; longer chains count as a prompt's
MIN_FORK_ROWS = 16  # of a chain, before its state may be left in a slot; no layer has more taps
SHORT_CONTEXT = 2048  # positions up to which a few dozen rows that share keys do not fill a GPU


@dataclass(frozen=True)
class KeptInputs:
    """Inputs of a gated DeltaNet for rows of draft trees, kept so that an accepted path can be replayed."""

    qkv: Array  # [R, C]
    alpha: Array  # [R, NV]
    beta: Array  # [R, NV]


@dataclass(frozen=True)
class BatchRows:
    """Chains and draft trees of several sequences, one segment each, over caches in blocks of positions.

    A chain's rows follow each other after the committed positions of its sequence, and advance its states.
    Where the state_ids of a chain change, after at least MIN_FORK_ROWS of its rows, the state after the
    last row of one id stays in that slot, and the rows of the next id go on from it; the chain begins with
    the state in the slot of its first id. A row of a tree, of at most MAX_TREE_ROWS, follows an earlier row
    of its segment or the last committed position, and changes no state: key and value of row i of the segment
    go to index committed + i of the sequence, its inputs to the gated DeltaNet to row kept[i] of `inputs`.
    The caches are [blocks, BLOCK_POSITIONS, G, row].
    """

    segments: Array  # int32 [T], row of `tables`; rows of a segment are adjacent
    tables: Array  # int32 [segments, blocks], the blocks of a sequence in order of position
    indices: Array  # int32 [T], index in its sequence of a row's key and value: a chain's at its position
    parents: Array  # int32 [T], row of the batch that it follows, −1: the last committed position
    kept: Array  # int32 [T], −1 for a row of a chain
    inputs: KeptInputs | None = None  # of the layer; None for attention
    # For launchers, before the arrays are known: whether there may be rows of trees, trees with a row that
    # does not follow the one before it, chains of more than MAX_SHORT_CHAIN rows, rows of several sequences,
    # and positions of SHORT_CONTEXT and beyond.
    has_trees: bool = True
    is_branching: bool = True
    has_prompts: bool = True
    has_several: bool = True
    is_deep: bool = True
    window_tables: Array = None  # as `tables`, of layers with windows that have blocks of their own


@dataclass(frozen=True)
class CommittedPath:
    """A path of a draft tree that its sequence keeps: int32 arrays, each row the parent of the next."""

    state_id: Array  # [1], of the sequence's recurrent states
    count: Array  # [1], rows of the path; 0: nothing is done
    first: Array  # [1], index in the sequence of the tree's first row: the committed positions
    sources: Array  # [MAX_TREE_ROWS], the path's rows in the tree, kept at index first + source
    kept: Array  # [MAX_TREE_ROWS], the rows of `KeptInputs`
    table: Array  # [blocks], the blocks of the sequence in order of position
    window_table: Array = None  # of layers with windows, where these are a group of their own


@dataclass(frozen=True)
class RecurrentLayer:
    """A gated DeltaNet as a commit reads and changes it; see `Ops.gated_delta_net` for the states."""

    weights: "DeltaNetWeights"
    conv_state: Array
    state: Array
    kept: KeptInputs


@dataclass(frozen=True)
class Rows:
    """The sequence and position of each row; rows of a sequence are adjacent and in order."""

    positions: Array  # int32 [T], absolute
    state_ids: (
        Array  # int32 [T], of the recurrent state; without a batch of the sequence's keys and values too
    )
    batch: BatchRows | None = None  # None: chains of consecutive positions, one for each state

    def keeping(self, inputs: KeptInputs | None) -> "Rows":
        """The same rows for a layer that keeps its inputs in `inputs`."""
        return self if self.batch is None else replace(self, batch=replace(self.batch, inputs=inputs))


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary embedding differs from a plain one; see `kernels/rope/scaling.py`."""

    frequency_factors: tuple[float, ...]  # [num_dims / 2], of the plain frequencies
    magnitude: float  # of cosines and sines


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `num_dims` dimensions of a head; pairs are (i, i + num_dims / 2)."""

    num_dims: int
    theta: float
    scaling: RopeScaling | None = None
    block_size: int = 1  # positions that turn by the angles of the first of them


@dataclass(frozen=True)
class AttentionInputs:
    """Projections of new rows: float32, unit stride along the last dimension; rows may be parts of others."""

    query_gate: Array  # [T, H·D]; with a gate of kind "query" [T, H·2·D]: per head its query, then its gate
    key: Array  # [T, G·D]
    value: Array  # [T, G·D]
    angles: Array  # [T, rope dimensions / 2, 2], contiguous; see `Ops.rope_angles`
    gate: Array = None  # [T, H] of kind "head", [T, H·D] of kind "element", else None
    chosen: ChosenBlocks | None = None  # None: rows see all positions up to their own
    indexer: IndexerInputs | None = None  # of what is to choose them


@dataclass(frozen=True)
class AttentionHeads:
    """What the heads of a layer have of their own. A new property of attention is a field here."""

    q_norm: Array  # [D]; None with k_norm: queries and keys are not normed
    k_norm: Array  # [D]
    eps: float
    output_gate: OutputGate = "query"
    window: int | None = None  # positions that a row attends to at most, its own included; None: all
    scale: float | None = None  # of scores; None: 1 / sqrt(D)
    v_norm: bool = False  # whether each head of the values is RMS-normed, without a weight
    q_bias: Array = None  # [H·D], added to queries before norms; None with the other two: no biases
    k_bias: Array = None  # [G·D]
    v_bias: Array = None  # [G·D]
    sinks: Array = None  # [H], a logit of each head in its softmax, to which no value belongs; None: none


@dataclass(frozen=True)
class Caches:
    """Keys and values of a layer in the layout of `CacheLayout`, with the same strides."""

    k: Array  # [sequences, positions, G, row], in a batch [blocks, BLOCK_POSITIONS, G, row]
    v: Array
    index: Array = None  # of the indexer, [sequences, positions, 1, d], float16 or float32; None without one


@dataclass(frozen=True)
class DeltaNetInputs:
    """Projections of new rows: float32, unit stride along the last dimension; rows may be parts of others."""

    qkv: Array  # [T, C], C = 2·NK·d + NV·d
    z: Array  # [T, NV·d], on a GPU with every row on 16 bytes
    alpha: Array  # [T, NV]
    beta: Array  # [T, NV]
    rows: Rows


@dataclass(frozen=True)
class DeltaNetWeights:
    """Small float32 tensors of a gated DeltaNet layer. Value head h reads key head `key_head_ids[h]`."""

    conv_taps: Array  # [C, taps]; the last tap multiplies the current token
    a: Array  # [NV], −exp(A_log), all negative
    dt_bias: Array  # [NV]
    norm: Array  # [d]
    key_head_ids: Array  # int32 [NV]
    num_key_heads: int
    eps: float
    output_gate: DeltaNetGate = "silu"  # of z, which the normed output is multiplied by


@dataclass(frozen=True)
class RouterSpec:
    """How a token chooses its experts: scores by `gating`, the best of them, weights of the chosen."""

    gating: Gating = "softmax"
    bias: bool = False  # of the logits
    selection_bias: bool = False  # added to the scores for choosing, and not to the weights
    normalised: bool = True  # the weights of the chosen are divided by their sum
    scale: float = 1.0  # of the weights, after that
    num_groups: int = 1  # of experts that follow each other; a group counts the sum of its two best
    num_used_groups: int = 1  # the best groups, from which experts are chosen
    expert_scale: bool = False  # the weight of an expert is also multiplied by a number of its own
    own_input: bool = False  # it reads a norm of the residual stream, and not what experts read


@dataclass(frozen=True)
class ChoiceRule:
    """How logits become experts and weights: the numbers of a spec, and the vectors that it asks for."""

    spec: RouterSpec = RouterSpec()
    bias: Array = None  # [experts]; None without one, as those below
    selection_bias: Array = None  # [experts]
    expert_scale: Array = None  # [experts]

    @property
    def is_plain(self) -> bool:
        """Whether weights are a softmax over all experts, renormalised."""
        vectors = self.bias, self.selection_bias, self.expert_scale
        return self.spec == RouterSpec() and all(vector is None for vector in vectors)


PLAIN_RULE = ChoiceRule()


@dataclass(frozen=True)
class NgramHash:
    """How the last tokens become rows of a table: for each length of n-grams, so many heads."""

    multipliers: tuple[int, ...]  # [longest n-gram], of a token, of the one before it, …
    sizes: tuple[int, ...]  # [heads], rows of each
    offsets: tuple[int, ...]  # [heads], the first row of each
    end_token: int  # what comes before it, or before a text, counts as it
    heads_per_order: int


@dataclass(frozen=True)
class NgramState:
    """What an n-gram embedding keeps of sequences; the last two of rows of draft trees, None without any."""

    tokens: Array  # int32 [states, longest n-gram − 1], the last ids plus 1, 0 for none
    conv: Array  # [states, rows back, C·E], the last normed rows
    kept_tokens: Array = None  # int32 [R]
    kept_rows: Array = None  # [R, C·E]


@dataclass(frozen=True)
class RouterWeights:
    """How a layer chooses experts. A new property of a router is a field here, or of its rule."""

    gate: Weight  # [experts, E]
    shared_gate: Weight  # [1, E]; None without a shared expert, or for one of weight 1
    num_experts_per_tok: int
    rule: ChoiceRule = PLAIN_RULE
    # [E], ones. With it the router reads the `rms_norm` of the residual stream, of which `gate` has the
    # weights; None: it reads what experts read.
    input_norm: Array = None
    eps: float = 0.0  # of that norm

    def __post_init__(self) -> None:
        has_own = self.input_norm is not None
        if has_own != self.rule.spec.own_input or (has_own and self.shared_gate is not None):
            raise ValueError("a router with an input of its own has a norm for it, and no gate beside it")


@dataclass(frozen=True)
class Routing:
    """The experts of each token. shared_gate: the logit of the shared expert's gate, before its sigmoid."""

    ids: Array  # int32 [T, K], the best first; without a selection bias in descending order of weight
    weights: Array  # [T, K]
    shared_gate: Array  # [T, 1]; None without a shared expert, or for one of weight 1
    places: Any = None  # where experts are computed, for `Ops` that share pairs out


@dataclass(frozen=True)
class Activation:
    """How a gate and a value become one number; `kernels/swiglu/reference.py` defines it."""

    kind: GatedUnit = "swiglu"
    limit: float = 0.0  # of the clamped one

    @property
    def number(self) -> int:
        """Of the kind, for kernels."""
        return GATED_UNITS.index(self.kind)


SWIGLU = Activation()


@dataclass(frozen=True)
class FfnWeights:
    """The feed-forward network of a dense layer."""

    gate: Weight  # [F, E]
    up: Weight  # [F, E]
    down: Weight  # [E, F]
    activation: Activation = SWIGLU


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of the routed experts of a layer."""

    gate: Array  # [experts, F]
    up: Array  # [experts, F]
    down: Array  # [experts, E]
    on_host: tuple[
        np.ndarray[Any, Any], np.ndarray[Any, Any]
    ]  # of gate and up, for experts on another device


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer: stacks of the routed ones, and the shared one with an FFN size of its own.

    All three matrices of the shared expert are None in a layer that has none.
    """

    gate: Weight  # [experts, F, E]
    up: Weight  # [experts, F, E]
    down: Weight  # [experts, E, F]
    shared_gate: Weight = None  # [F', E]
    shared_up: Weight = None  # [F', E]
    shared_down: Weight = None  # [E, F']
    activation: Activation = SWIGLU  # of all of them
    biases: ExpertBiases | None = None  # of the routed ones

    @property
    def shared(self) -> FfnWeights:
        """The shared expert, if there is one."""
        return FfnWeights(self.shared_gate, self.shared_up, self.shared_down, self.activation)

    @property
    def down_bias(self) -> Array:
        """[experts, E], or None."""
        return None if self.biases is None else self.biases.down


@dataclass(frozen=True)
class RowsElsewhere:
    """Outputs that another processor computes into its own memory."""

    ids: Array  # int32 [T, K], −1 for pairs that it does not compute
    rows: Array  # [T, K, E]
    done: Array  # uint32 [2]: nonzero once the rows are complete; the second: a wait for them timed out
    stamps: Any = None  # memory for the layer's times, for `Ops` that measure them
    is_marked: bool = False  # whether floats that are not written say so, and are marked again; see `Mailbox`


@dataclass(frozen=True)
class ExpertOutputs:
    """Outputs by rank, not yet summed, so that the sum does not depend on where each was computed."""

    routed: Array  # [T, K, E]
    shared: Array  # [T, E]; None without a shared expert
    routing: Routing
    elsewhere: RowsElsewhere | None = None  # rows that are undefined in `routed`
    bias: Array = None  # [experts, E], added to the output of each expert; None: there is none


@dataclass(frozen=True)
class PostNorms:
    """Norms of what a part of a block gives, before that is added to the residual stream."""

    weight: Array  # [E], of all of it
    routed: Array = None  # [E], of the sum of the routed experts; None with `shared`: neither has its own
    shared: Array = None  # [E], of the shared expert, or of what is computed in its place
    scale: Array = None  # [1], of the residual stream, after it was added; None: 1


class Ops(Protocol):
    """See the module docstring. Methods return new arrays and mutate only what their docstrings name."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Zeroed memory that outlives a capture; pages are taken on first use. dtype: a name of numpy's."""

    def int_vector(self, values: Sequence[int]) -> Array:
        """An int32 array [len(values)]."""

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        """A matrix [out, in] that every token multiplies, of any quantised or float type."""

    def load_ffn_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        """As `load_weight`, for a matrix of `FfnWeights`: only `ffn` can read where it lies."""

    def load_rows(self, file: GGUFFile, info: TensorInfo, row_ids: Sequence[int]) -> Weight:
        """The rows `row_ids` of a matrix, in that order, as a matrix [len(row_ids), in] of the same type.

        For files that interleave the rows of several matrices. Otherwise as `load_weight`.
        """

    def map_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        """A matrix, or a stack of them [experts, out, in], of which a token reads a part: left in place."""

    def load_float_weight(
        self, file: GGUFFile, info: TensorInfo, scales: np.ndarray[Any, Any] | None = None
    ) -> Weight:
        """A matrix [out, in] as float32 values, whatever its type: where products must not be quantised.

        scales: float32 [in], by which its columns are multiplied.
        """

    def read_values(self, file: GGUFFile, info: TensorInfo) -> np.ndarray[Any, Any]:
        """A small tensor of any type as float32, in its logical shape, in the host's memory."""

    def float_array(self, values: np.ndarray[Any, Any]) -> Array:
        """The result of `read_values` in memory that kernels read."""

    def split_rows(self, weight: Weight, sizes: Sequence[int]) -> tuple[Weight, ...]:
        """Views of `sizes` consecutive output rows each (of every matrix in a stack)."""

    def embed(self, table: Weight, token_ids: Array) -> Array:
        """Rows of `table` [vocab, E] by int32 `token_ids` [T], dequantised: [T, E]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension of [T, E]."""

    def rms_norm_pair(self, x: Array, x_weight: Array, y: Array, y_weight: Array, eps: float) -> Array:
        """The `rms_norm` of x and that of y, both [T, E], side by side: [T, 2·E]."""

    def linear(self, x: Array, weights: Sequence[Weight]) -> tuple[Array, ...]:
        """x [T, in] times each of `weights` [out, in], one [T, out] per weight; x is quantised once."""

    def add_bias(self, x: Array, bias: Array) -> Array:
        """Each row of x [T, out] plus `bias` [out]. x is not read again: the sum may take its place."""

    def scale(self, x: Array, factor: float) -> Array:
        """x [T, E] times `factor`. x is not read again: the result may take its place."""

    def softcap(self, x: Array, cap: float) -> Array:
        """cap · tanh(x / cap) of x [T, V]. x is not read again: the result may take its place."""

    def add_norm(
        self,
        x: Array,
        update: Array | ExpertOutputs | BiasedOutput,
        weight: Array,
        eps: float,
        *,
        for_router: bool = False,
    ) -> tuple[Array, Array]:
        """x + update, and its `rms_norm`: the step between two parts of a block.

        for_router: nothing reads the two before the norm was given to `router`, which may compute them.

        The update of experts is Σ_k weight_k · (routed_k + bias_k) in rank order + sigmoid(shared_gate) ·
        shared, the last only where there is a shared expert, and its weight 1 where it has no gate.
        """

    def add_post_norm(
        self, x: Array, update: Array | ExpertOutputs, post: PostNorms, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        """(x + the `rms_norm` of `update` by `post.weight`) · `post.scale`, and its `rms_norm` by `weight`.

        The update of experts is as in `add_norm`. With `post.routed` it is the norm of Σ_k weight_k ·
        routed_k by that, plus the norm of shared by `post.shared`.
        """

    def inject_norm(
        self,
        streams: Array | None,
        update: Array | ExpertOutputs,
        injection: Array | None,
        weight: Array,
        eps: float,
    ) -> tuple[Array, Array]:
        """C residual streams side by side after an update, and the `rms_norm` of each, both [T, C·E].

        A stream c becomes itself + 2 · sigmoid(injection_c / C) · update, for streams [T, C·E] and injection
        [T, C]. With neither, all streams become the update. update: as in `add_norm`. weight: [C·E].
        """

    def stream_gates(
        self, x: Array, low: Sequence[Weight], up: Weight, divisor: int
    ) -> tuple[Array, tuple[Array, ...]]:
        """up · silu(low_0 · x / divisor), and the products of x with the other weights of `low`."""

    def mix_streams(self, normed: Array, gates: Array, num_streams: int) -> Array:
        """The mean over C streams of normed · sigmoid(gates), both [T, C·E]: [T, E]."""

    def norm_streams(self, x: Array, weight: Array, eps: float, num_streams: int) -> Array:
        """The `rms_norm` of each of C streams side by side, [T, C·E], by weight [C·E]."""

    def project_streams(self, x: Array, norm: Array, eps: float, weight: Weight, num_streams: int) -> Array:
        """The `rms_norm` of x [T, C·E] by norm [C·E], C streams as one row; then each stream times `weight`
        [out, E]: [T, C·out].
        """

    def map_ngram_table(self, file: GGUFFile, info: TensorInfo, hashing: NgramHash) -> Weight:
        """A table of n-grams, left in the file: `ngram_rows` reads a row of it for each head of a token."""

    def ngram_ids(
        self, token_ids: Array, hashing: NgramHash, table: Weight, state: NgramState, rows: Rows
    ) -> Array:
        """Which rows of `table` belong to each token and those before it. They may be read ahead.

        Advances `state.tokens`, and `state.kept_tokens` by rows of trees. Formulas of n-gram embeddings:
        docs of `kernels/ngram/reference.py`.
        """

    def ngram_rows(self, table: Weight, ids: Array) -> Array:
        """The rows that `ngram_ids` named last, dequantised, side by side: [T, heads · columns]."""

    def ngram_gate(self, key: Array, query: Array, value: Array) -> Array:
        """value [T, E] gated for each of C streams by keys and queries [T, C·E]: [T, C·E]."""

    def ngram_conv(
        self,
        streams: Array,
        gated: Array,
        normed: Array,
        taps: Array,
        dilation: int,
        state: NgramState,
        rows: Rows,
    ) -> Array:
        """streams + gated + the dilated convolution of `normed` [T, C·E] by a kernel [C·E, K]: [T, C·E].

        Advances `state.conv`, and `state.kept_rows` by rows of trees.
        """

    def commit_ngram(self, state: NgramState, path: CommittedPath) -> None:
        """Advances the state at `path.state_id` by the kept rows of the path, as a chain of them would."""

    def glu(self, gate: Array, up: Array, activation: Activation = SWIGLU) -> Array:
        """The gated unit of both, [T, F]: silu(gate) · up unless `activation` is another."""

    def rope_angles(self, positions: Array, rope: RopeSpec) -> Array:
        """cos and sin of position · theta^(−2i/num_dims), rounded from float64: [T, num_dims / 2, 2]."""

    def attention(self, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows) -> Array:
        """Causal attention: [T, H·D].

        Queries and keys are RMS-normed per head where there are norms, then rotated by `inputs.angles`; keys
        and values are written into the caches at `rows`. Each row attends to positions 0 … its own of its
        sequence, in a batch to the committed positions, its ancestors and itself; with a window only to the
        last `heads.window` of these positions, and of all those only to the blocks in `inputs.chosen`. The
        result is multiplied as `heads.output_gate` says. Mutates both caches.
        """

    def choose_blocks(
        self, inputs: IndexerInputs, heads: IndexerHeads, cache: Array, rows: Rows
    ) -> ChosenBlocks:
        """The blocks that each row attends to; docs of `kernels/indexer/reference.py`. Mutates the cache."""

    def gated_delta_net(
        self, inputs: DeltaNetInputs, weights: DeltaNetWeights, conv_state: Array, state: Array
    ) -> Array:
        """Causal convolution, SiLU, the gated delta rule and the gated norm: [T, NV·d].

        conv_state [states, taps − 1, C] holds the last raw qkv rows, state [states, NV, d, d] (key dimension
        first) the recurrent state, both float32; both are advanced over `inputs.rows`, but not over rows of
        trees, each of which starts from the states after its parent. Formula: docs of
        `kernels/gated_delta_net/reference.py`.
        """

    def commit_attention(self, caches: Sequence[tuple[Array, ...]], path: CommittedPath) -> None:
        """Copies keys and values of the path's rows to the positions after the committed ones.

        Mutates each layer's caches, [blocks, BLOCK_POSITIONS, G, row]: two, and that of its indexer.
        """

    def commit_delta_net(self, layers: Sequence[RecurrentLayer], path: CommittedPath) -> None:
        """Advances each layer's states at `path.state_id` over its kept inputs of the path's rows, with the
        bits of a chain of them.
        """

    def ffn(self, x: Array, weights: FfnWeights) -> Array | ExpertOutputs:
        """down(glu(gate x, up x)): [T, E] → [T, E], or as outputs of one expert of weight 1."""

    def router(
        self, x: Array, weights: RouterWeights, experts: ExpertWeights, residual: Array = None
    ) -> Routing:
        """The choice by the products of x and `weights.gate`, as `kernels/router/reference.py` defines it.

        experts: those to choose from, which read x. residual: the residual stream that x is a norm of, for
        routers with an `input_norm`; these read its norm in place of x.
        """

    def experts(self, x: Array, routing: Routing, weights: ExpertWeights) -> ExpertOutputs:
        """down_e(glu(gate_e x, up_e x)) for each chosen expert, and for the shared one if there is one.

        Biases of gate and up are added before the gated unit. That of down is left to `add_norm`.
        """
