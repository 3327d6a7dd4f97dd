"""The memory of a model between steps: keys and values per position, and the recurrent states.

Keys and values are contiguous for each sequence, or in blocks of positions. They can be truncated to any
earlier position by overwriting. A recurrent state describes only the sequence's present end.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Protocol, Self

from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, ELEMENT_BYTES
from coldstream.kernels.ops import BLOCK_POSITIONS, MAX_TREE_ROWS, Array, KeptInputs, NgramState, Ops
from coldstream.placement.plan import FixedPart

MAX_SEQUENCES = 16
STATES_OF_CONTEXT = 2  # where there is memory for several


class CacheShape(Protocol):
    """The part of `ModelSpec` that the cache needs."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def index_dim(self) -> int: ...
    @property
    def conv_kernel(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def ssm_state_size(self) -> int: ...
    @property
    def ngram_shape(self) -> "NgramShape | None": ...


@dataclass(frozen=True)
class NgramShape:
    """Of what the n-gram embedding of a layer, which is one with a DeltaNet, keeps of a sequence."""

    layer: int
    context: int  # tokens
    history: int  # rows
    width: int  # of a row


@dataclass(frozen=True)
class AttentionState:
    """Keys, after norm and rotation, and values, [sequences, positions, G, row] each; see `CacheLayout`."""

    k: Array
    v: Array
    index: Array = None  # keys of an indexer, [sequences, positions, 1, d]; None without one

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that there are, each of the same positions."""
        return (self.k, self.v) if self.index is None else (self.k, self.v, self.index)


@dataclass(frozen=True)
class DeltaNetState:
    """The last raw convolution inputs and the recurrent state, float32."""

    conv_state: Array  # [states, taps − 1, C]
    state: Array  # [states, NV, d, d], key dimension first
    kept: KeptInputs | None = None  # of rows of draft trees; None where there are none
    ngram: NgramState | None = None  # of a layer with an n-gram embedding


LayerState = AttentionState | DeltaNetState


def num_blocks_of(length: int) -> int:
    """Blocks for `length` positions of a sequence."""
    return -(-length // BLOCK_POSITIONS)


@dataclass(frozen=True)
class CacheSize:
    """What all sequences in blocks can hold together."""

    num_blocks: int  # of keys and values, BLOCK_POSITIONS each
    num_states: int  # recurrent states: one per sequence and per checkpoint
    num_tree_rows: int = 0  # rows of pending draft trees

    @classmethod
    def of(cls, num_sequences: int, context_length: int, num_trees: int = 0) -> Self:
        """For sequences of up to `context_length` positions each, `num_trees` of them with a tree."""
        num_blocks = num_sequences * num_blocks_of(context_length)
        return cls(num_blocks, num_sequences, num_trees * MAX_TREE_ROWS)

    @classmethod
    def planned(cls, fixed: FixedPart) -> Self:
        """What a plan with this fixed part has memory for."""
        num_blocks = fixed.num_contexts * num_blocks_of(fixed.ctx_size)
        return cls(num_blocks, fixed.num_sequences, fixed.num_tree_rows)

    @classmethod
    def shared(
        cls,
        shape: CacheShape,
        context_length: int,
        kv_type: str,
        *,
        is_scarce: bool,
        num_tree_rows: int = 0,
        num_contexts: int = 1,
    ) -> Self:
        """For `num_contexts` sequences of up to `context_length` positions, or for more that share blocks.

        Unless memory is scarce, there are as many states as blocks, up to MAX_SEQUENCES. Beyond that a
        further sequence hardly lowers the cost of a row.

        is_scarce: whether the cache takes memory from experts. A state of a large model is as large as
        thousands of positions, and a single sequence needs only one. So all states but one then take at most
        a quarter of the bytes of keys and values. With several contexts there are at least two states for
        each, as kept prefixes have states too.
        """
        num_blocks = num_blocks_of(context_length)
        num_states = min(num_blocks, MAX_SEQUENCES)
        one_state = state_bytes(shape)
        if is_scarce and one_state:
            kv_bytes = num_blocks * BLOCK_POSITIONS * kv_token_bytes(shape, kv_type)
            num_states = min(num_states, 1 + kv_bytes // 4 // one_state)
        if num_contexts > 1:
            num_states = max(num_states, STATES_OF_CONTEXT * num_contexts)
        return cls(num_contexts * num_blocks, num_states, num_tree_rows)


class ModelCache:
    """The states of all layers for `num_states` sequences of up to `context_length` positions.

    kv_type is the name of a `CacheLayout`. `in_blocks` creates one in blocks instead. layers[i] belongs to
    layer i of the trunk. The system provides memory of keys and values when a position is first written.
    """

    layers: tuple[LayerState, ...]

    def __init__(
        self,
        shape: CacheShape,
        ops: Ops,
        num_states: int,
        context_length: int,
        kv_type: str = "i16",
    ) -> None:
        if num_states < 1 or context_length < 1:
            raise ValueError(
                f"a cache of {num_states} sequences and {context_length} positions can hold nothing"
            )
        self.num_states = num_states
        self.context_length = context_length
        self._allocate(shape, ops, kv_type, (num_states, context_length), 0)

    @classmethod
    def in_blocks(cls, shape: CacheShape, ops: Ops, size: CacheSize, kv_type: str = "i16") -> Self:
        """Keys and values [blocks, BLOCK_POSITIONS, G, row]; there are `size.num_states` states."""
        if min(size.num_blocks, size.num_states) < 1 or size.num_tree_rows < 0:
            raise ValueError(
                f"a cache of {size.num_blocks} blocks and {size.num_states} states holds nothing"
            )
        cache = cls.__new__(cls)
        cache.num_states = size.num_states
        cache.context_length = size.num_blocks * BLOCK_POSITIONS
        cache._allocate(shape, ops, kv_type, (size.num_blocks, BLOCK_POSITIONS), size.num_tree_rows)
        return cache

    def _allocate(
        self, shape: CacheShape, ops: Ops, kv_type: str, places: tuple[int, int], num_tree_rows: int
    ) -> None:
        layout = CACHE_LAYOUTS[kv_type]
        self._recurrent = self._recurrent_arrays(shape, ops)
        layers_before = count()
        kv_heads = iter(shape.kv_heads)

        def layer_state(index: int, kind: str) -> LayerState:
            if kind == "attention":
                num_heads, head_dim = next(kv_heads)
                kv_shape = (*places, num_heads, layout.row_elements(head_dim))
                k, v = (ops.zeros(kv_shape, layout.element) for _ in range(2))
                if not shape.index_dim:
                    return AttentionState(k, v)
                return AttentionState(k, v, ops.zeros((*places, 1, shape.index_dim), index_element(kv_type)))
            layer = next(layers_before)
            conv_state, state = (array[layer] for array in self._recurrent[:2])
            kept = kept_inputs() if num_tree_rows else None
            ngram = shape.ngram_shape
            if ngram is None or ngram.layer != index:
                return DeltaNetState(conv_state, state, kept)
            return DeltaNetState(conv_state, state, kept, ngram_state(ngram))

        def kept_inputs() -> KeptInputs:
            widths = (shape.conv_dim, shape.num_value_heads, shape.num_value_heads)
            return KeptInputs(*(ops.zeros((num_tree_rows, width), "float32") for width in widths))

        def ngram_state(ngram: NgramShape) -> NgramState:
            tokens, conv = (array[0] for array in self._recurrent[2:])
            if not num_tree_rows:
                return NgramState(tokens, conv)
            kept = ops.zeros((num_tree_rows,), "int32"), ops.zeros((num_tree_rows, ngram.width), "float32")
            return NgramState(tokens, conv, *kept)

        self.layers = tuple(layer_state(index, kind) for index, kind in enumerate(shape.layer_kinds))

    def _recurrent_arrays(self, shape: CacheShape, ops: Ops) -> tuple[Array, ...]:
        """Of all recurrent layers [layers, states, …], so that one call writes a state of all of them."""
        num_layers = shape.layer_kinds.count("delta_net")
        if not num_layers:
            return ()
        size = shape.ssm_state_size
        states = (num_layers, self.num_states)
        arrays = (
            ops.zeros((*states, shape.conv_kernel - 1, shape.conv_dim), "float32"),
            ops.zeros((*states, shape.num_value_heads, size, size), "float32"),
        )
        ngram = shape.ngram_shape
        if ngram is None:
            return arrays
        return (
            *arrays,
            ops.zeros((1, self.num_states, ngram.context), "int32"),
            ops.zeros((1, self.num_states, ngram.history, ngram.width), "float32"),
        )

    def with_layers(self, layers: Sequence[int]) -> Self:
        """A cache for steps of these layers alone, over the same memory. States are still those of all."""
        some = copy(self)
        some.layers = tuple(self.layers[layer] for layer in layers)
        return some

    def tensors(self) -> tuple[Array, ...]:
        """All arrays, layer by layer."""
        parts: list[LayerState | KeptInputs | NgramState] = []
        for layer in self.layers:
            parts.append(layer)
            if isinstance(layer, DeltaNetState):
                parts += [part for part in (layer.kept, layer.ngram) if part is not None]
        found = (tensor for part in parts for tensor in vars(part).values())
        return tuple(each for each in found if not isinstance(each, KeptInputs | NgramState | None))

    @property
    def num_bytes(self) -> int:
        """Bytes of address space. Keys and values that were never written take no memory."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())

    def reset(self, state_id: int) -> None:
        """Makes a state that of an empty sequence. IndexError for a number out of range.

        Mutates the recurrent states. Keys and values stay: a position is always written before it is read.
        """
        if not 0 <= state_id < self.num_states:
            raise IndexError(f"state {state_id} of {self.num_states}")
        for array in self._recurrent:
            array[:, state_id] = 0

    def copy_state(self, source: int, target: int) -> None:
        """Copies the recurrent states of number `source` to number `target`."""
        for array in self._recurrent:
            array[:, target] = array[:, source]

    def copy_block(self, source: int, target: int, num_positions: int) -> None:
        """Copies what layers keep of the first `num_positions` of a block to another."""
        for layer in self.layers:
            if isinstance(layer, AttentionState):
                layer.k[target, :num_positions] = layer.k[source, :num_positions]
                layer.v[target, :num_positions] = layer.v[source, :num_positions]
                if layer.index is not None:
                    layer.index[target, :num_positions] = layer.index[source, :num_positions]


def state_bytes(shape: CacheShape) -> int:
    """Bytes of the recurrent states of one sequence."""
    size = shape.num_value_heads * shape.ssm_state_size**2 + (shape.conv_kernel - 1) * shape.conv_dim
    ngram = shape.ngram_shape
    of_ngrams = ngram.context + ngram.history * ngram.width if ngram else 0
    return 4 * (shape.layer_kinds.count("delta_net") * size + of_ngrams)


def context_bytes(shape: CacheShape, context_length: int, kv_type: str) -> int:
    """Bytes of each of several whole contexts, with its states."""
    num_positions = num_blocks_of(context_length) * BLOCK_POSITIONS
    return num_positions * kv_token_bytes(shape, kv_type) + STATES_OF_CONTEXT * state_bytes(shape)


def kept_bytes(shape: CacheShape) -> int:
    """Bytes of the inputs that are kept of a row of a draft tree."""
    of_ngrams = 1 + shape.ngram_shape.width if shape.ngram_shape else 0
    of_delta_net = shape.layer_kinds.count("delta_net") * (shape.conv_dim + 2 * shape.num_value_heads)
    return 4 * (of_delta_net + of_ngrams)


def kv_token_bytes(shape: CacheShape, kv_type: str) -> int:
    """Bytes of the keys and values of one position, and of what indexers keep of it."""
    layout = CACHE_LAYOUTS[kv_type]
    of_heads = 2 * sum(num_heads * layout.row_bytes(head_dim) for num_heads, head_dim in shape.kv_heads)
    of_index = shape.index_dim * ELEMENT_BYTES[index_element(kv_type)]
    return of_heads + len(shape.kv_heads) * of_index


def index_element(kv_type: str) -> str:
    """The type of an indexer's cache beside keys and values of `kv_type`."""
    return "float32" if kv_type == "f32" else "float16"
