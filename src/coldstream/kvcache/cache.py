"""The memory of a model between steps: keys and values per position, and the recurrent states.

Keys and values are contiguous for each sequence, or in blocks of positions. They can be truncated to any
earlier position by overwriting. A recurrent state describes only the sequence's present end.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol, Self

from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS, ELEMENT_BYTES
from coldstream.kernels.ops import BLOCK_POSITIONS, MAX_TREE_ROWS, Array, KeptInputs, NgramState, Ops
from coldstream.kvcache.windows import blocks_at_rest, blocks_of_pool
from coldstream.placement.plan import FixedPart

MAX_SEQUENCES = 16
STATES_OF_CONTEXT = 2  # where there is memory for several contexts, and with windows
USUAL_ROWS = 2048  # of a step, for estimates
MAX_POSITIONS = 1 << 24  # of a context that is only bounded by memory


class CacheShape(Protocol):
    """The part of `ModelSpec` that the cache needs."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def kv_windows(self) -> tuple[int | None, ...]: ...
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
    is_windowed: bool = False  # whether its blocks are those of the group of layers with windows

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


def is_windowed(state: LayerState) -> bool:
    """Whether a layer is of the group of layers with windows, which has blocks of its own."""
    return isinstance(state, AttentionState) and state.is_windowed


def num_blocks_of(length: int) -> int:
    """Blocks for `length` positions of a sequence."""
    return -(-length // BLOCK_POSITIONS)


@dataclass(frozen=True)
class CacheSize:
    """What all sequences in blocks can hold together."""

    num_blocks: int  # of keys and values, BLOCK_POSITIONS each
    num_states: int  # recurrent states: one per sequence and per checkpoint
    num_tree_rows: int = 0  # rows of pending draft trees
    num_window_blocks: int = 0  # of layers with windows alone; 0: those have the blocks of all others

    @classmethod
    def of(cls, num_sequences: int, context_length: int, num_trees: int = 0) -> Self:
        """For sequences of up to `context_length` positions each, `num_trees` of them with a tree."""
        num_blocks = num_sequences * num_blocks_of(context_length)
        return cls(num_blocks, num_sequences, num_trees * MAX_TREE_ROWS)

    @classmethod
    def planned(cls, fixed: FixedPart) -> Self:
        """What a plan with this fixed part has memory for."""
        num_blocks = fixed.num_contexts * num_blocks_of(fixed.ctx_size)
        return cls(num_blocks, fixed.num_sequences, fixed.num_tree_rows, fixed.num_window_blocks)

    @classmethod
    def shared(
        cls,
        shape: CacheShape,
        context_length: int,
        kv_type: str,
        *,
        is_scarce: bool,
        num_rows: int,
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

        num_rows: of a step. Layers with windows have blocks of their own if that takes less. Then a state has
        blocks of theirs too, and keys and values of which a quarter is taken are those of all other layers.
        There are two at least, so that a prefix is kept beside the sequence that goes on. Where a state takes
        nothing else, these blocks are shared by as many states as where memory is plentiful: texts shorter
        than a window take few of them.
        """
        num_blocks, window = num_blocks_of(context_length), group_window(shape)

        def num_states_of(one_state: int, position_bytes: int) -> int:
            num_states = min(num_blocks, MAX_SEQUENCES)
            if is_scarce and one_state:
                kv_bytes = num_blocks * BLOCK_POSITIONS * position_bytes
                num_states = min(num_states, 1 + kv_bytes // 4 // one_state)
            if num_contexts > 1:
                num_states = max(num_states, STATES_OF_CONTEXT * num_contexts)
            return num_states

        token_bytes, window_bytes = kv_token_bytes(shape, kv_type), window_token_bytes(shape, kv_type)
        all_blocks, together = num_contexts * num_blocks, num_states_of(state_bytes(shape), token_bytes)
        if window:
            one_state = state_bytes(shape) + blocks_at_rest(window) * BLOCK_POSITIONS * window_bytes
            apart = max(STATES_OF_CONTEXT, num_states_of(one_state, token_bytes - window_bytes))
            in_windows = blocks_of_pool(window, apart, num_rows)
            if in_windows < all_blocks:
                num_states = apart if state_bytes(shape) else max(apart, min(num_blocks, MAX_SEQUENCES))
                return cls(all_blocks, num_states, num_tree_rows, in_windows)
        return cls(all_blocks, together, num_tree_rows)

    @property
    def _of_sequences(self) -> tuple[int, int, int]:
        return self.num_blocks, self.num_states, self.num_window_blocks

    def covers(self, need: Self) -> bool:
        """Whether so many blocks and states are there."""
        return (
            self.num_blocks >= need.num_blocks
            and self.num_states >= need.num_states
            and self.num_window_blocks >= need.num_window_blocks
        )

    def helps(self, free: Self, need: Self) -> bool:
        """Whether there is anything of what `free` lacks of `need`."""
        parts = zip(self._of_sequences, free._of_sequences, need._of_sequences, strict=True)
        return any(here and less < asked for here, less, asked in parts)

    def with_more(self, more: Self) -> Self:
        """Both together."""
        parts = zip(vars(self).values(), vars(more).values(), strict=True)
        return type(self)(*(one + other for one, other in parts))

    def kv_bytes(self, shape: CacheShape, kv_type: str) -> int:
        """Bytes of keys and values of all layers, and of what indexers keep."""
        token_bytes, window_bytes = kv_token_bytes(shape, kv_type), window_token_bytes(shape, kv_type)
        if not self.num_window_blocks:
            return self.num_blocks * BLOCK_POSITIONS * token_bytes
        others = self.num_blocks * BLOCK_POSITIONS * (token_bytes - window_bytes)
        return others + self.window_bytes(shape, kv_type)

    def window_bytes(self, shape: CacheShape, kv_type: str) -> int:
        """Of `kv_bytes`, those of layers with windows that have blocks of their own."""
        return self.num_window_blocks * BLOCK_POSITIONS * window_token_bytes(shape, kv_type)


NOTHING: Final = CacheSize(0, 0)


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
        self._allocate(shape, ops, kv_type, (num_states, context_length), CacheSize(0, num_states))

    @classmethod
    def in_blocks(cls, shape: CacheShape, ops: Ops, size: CacheSize, kv_type: str = "i16") -> Self:
        """Keys and values [blocks, BLOCK_POSITIONS, G, row]; there are `size.num_states` states."""
        if min(size.num_blocks, size.num_states) < 1 or min(size.num_tree_rows, size.num_window_blocks) < 0:
            raise ValueError(
                f"a cache of {size.num_blocks} blocks and {size.num_states} states holds nothing"
            )
        cache = cls.__new__(cls)
        cache.num_states = size.num_states
        cache.context_length = size.num_blocks * BLOCK_POSITIONS
        cache._allocate(shape, ops, kv_type, (size.num_blocks, BLOCK_POSITIONS), size)
        return cache

    def _allocate(
        self, shape: CacheShape, ops: Ops, kv_type: str, places: tuple[int, int], size: CacheSize
    ) -> None:
        """places: of keys and values of layers in no group of their own."""
        layout, num_tree_rows = CACHE_LAYOUTS[kv_type], size.num_tree_rows
        self._recurrent = self._recurrent_arrays(shape, ops)
        layers_before = count()
        attentions = zip(shape.kv_heads, shape.kv_windows, strict=True)

        def layer_state(index: int, kind: str) -> LayerState:
            if kind == "attention":
                (num_heads, head_dim), window = next(attentions)
                is_windowed = size.num_window_blocks > 0 and window is not None
                own = (size.num_window_blocks, BLOCK_POSITIONS) if is_windowed else places
                kv_shape = (*own, num_heads, layout.row_elements(head_dim))
                k, v = (ops.zeros(kv_shape, layout.element) for _ in range(2))
                if not shape.index_dim:
                    return AttentionState(k, v, is_windowed=is_windowed)
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

    @property
    def has_windows(self) -> bool:
        """Whether layers with windows are a group of their own."""
        return any(map(is_windowed, self.layers))

    def with_layers(self, layers: Sequence[int]) -> Self:
        """A cache for steps of these layers alone, over the same memory. States are still those of all."""
        some = copy(self)
        some.layers = tuple(self.layers[layer] for layer in layers)
        return some

    def tensors(self) -> tuple[Array, ...]:
        """All arrays, layer by layer."""
        found: list[Array] = []
        for layer in self.layers:
            if isinstance(layer, AttentionState):
                found += layer.arrays
                continue
            parts: list[DeltaNetState | KeptInputs | NgramState] = [layer]
            parts += [part for part in (layer.kept, layer.ngram) if part is not None]
            values = (value for part in parts for value in vars(part).values())
            found += [each for each in values if not isinstance(each, KeptInputs | NgramState | None)]
        return tuple(found)

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

    def copy_block(self, source: int, target: int, num_positions: int, *, is_windowed: bool = False) -> None:
        """Copies what layers of a group keep of the first `num_positions` of a block to another."""
        for layer in self.layers:
            if isinstance(layer, AttentionState) and layer.is_windowed == is_windowed:
                for array in layer.arrays:
                    array[target, :num_positions] = array[source, :num_positions]


def group_window(shape: CacheShape) -> int:
    """Positions that layers with windows see at most, a row's own included; 0 if there are no such layers."""
    return max((window for window in shape.kv_windows if window is not None), default=0)


def state_bytes(shape: CacheShape) -> int:
    """Bytes of the recurrent states of one sequence."""
    size = shape.num_value_heads * shape.ssm_state_size**2 + (shape.conv_kernel - 1) * shape.conv_dim
    ngram = shape.ngram_shape
    of_ngrams = ngram.context + ngram.history * ngram.width if ngram else 0
    return 4 * (shape.layer_kinds.count("delta_net") * size + of_ngrams)


def context_bytes(shape: CacheShape, context_length: int, kv_type: str) -> int:
    """Bytes of each of several whole contexts, with its states."""
    num_positions = num_blocks_of(context_length) * BLOCK_POSITIONS
    token_bytes, window_bytes = kv_token_bytes(shape, kv_type), window_token_bytes(shape, kv_type)
    of_states = STATES_OF_CONTEXT * blocks_at_rest(group_window(shape)) * BLOCK_POSITIONS
    in_windows = min(num_positions, of_states) * window_bytes
    all_states = STATES_OF_CONTEXT * state_bytes(shape)
    return num_positions * (token_bytes - window_bytes) + in_windows + all_states


def least_kv_bytes(shape: CacheShape, context_length: int, kv_type: str) -> int:
    """About the fewest bytes of keys and values of a context, before the rows of a step are chosen."""
    token_bytes, window_bytes = kv_token_bytes(shape, kv_type), window_token_bytes(shape, kv_type)
    in_windows = min(context_length, _least_window_positions(shape)) * window_bytes
    return context_length * (token_bytes - window_bytes) + in_windows


def affordable_context(shape: CacheShape, num_bytes: int, kv_type: str) -> int:
    """The longest context whose `least_kv_bytes` are at most `num_bytes`, up to MAX_POSITIONS."""
    token_bytes, window_bytes = kv_token_bytes(shape, kv_type), window_token_bytes(shape, kv_type)
    in_windows = _least_window_positions(shape)
    short = num_bytes // max(1, token_bytes)
    if short < in_windows:
        return short
    others, left = token_bytes - window_bytes, num_bytes - in_windows * window_bytes
    return min(MAX_POSITIONS, left // others) if others else MAX_POSITIONS


def _least_window_positions(shape: CacheShape) -> int:
    """Positions that layers with windows keep with few states and steps of usual size."""
    window = group_window(shape)
    return blocks_of_pool(window, STATES_OF_CONTEXT, USUAL_ROWS) * BLOCK_POSITIONS if window else 0


def kept_bytes(shape: CacheShape) -> int:
    """Bytes of the inputs that are kept of a row of a draft tree."""
    of_ngrams = 1 + shape.ngram_shape.width if shape.ngram_shape else 0
    of_delta_net = shape.layer_kinds.count("delta_net") * (shape.conv_dim + 2 * shape.num_value_heads)
    return 4 * (of_delta_net + of_ngrams)


def kv_token_bytes(shape: CacheShape, kv_type: str) -> int:
    """Bytes of the keys and values of one position, and of what indexers keep of it."""
    of_index = shape.index_dim * ELEMENT_BYTES[index_element(kv_type)]
    return _heads_bytes(shape.kv_heads, kv_type) + len(shape.kv_heads) * of_index


def window_token_bytes(shape: CacheShape, kv_type: str) -> int:
    """Of `kv_token_bytes`, those of layers with windows."""
    layers = zip(shape.kv_heads, shape.kv_windows, strict=True)
    return _heads_bytes([heads for heads, window in layers if window is not None], kv_type)


def _heads_bytes(kv_heads: Sequence[tuple[int, int]], kv_type: str) -> int:
    layout = CACHE_LAYOUTS[kv_type]
    return 2 * sum(num_heads * layout.row_bytes(head_dim) for num_heads, head_dim in kv_heads)


def index_element(kv_type: str) -> str:
    """The type of an indexer's cache beside keys and values of `kv_type`."""
    return "float32" if kv_type == "f32" else "float16"
