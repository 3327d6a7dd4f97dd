"""The memory of a model between steps: keys and values per position, and the recurrent states.

A slot holds one sequence. Keys and values may be cut back to any earlier position by overwriting; the
recurrent states cannot, and say only what the sequence is now.
"""

from dataclasses import dataclass
from typing import Protocol

from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.ops import Array, Ops


class CacheShape(Protocol):
    """What the cache needs to know of a model; `ModelSpec` has it."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def conv_kernel(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...
    @property
    def num_value_heads(self) -> int: ...
    @property
    def ssm_state_size(self) -> int: ...


@dataclass(frozen=True)
class AttentionState:
    """Keys, after norm and rotation, and values, [slots, positions, G, row] each; see `CacheLayout`."""

    k: Array
    v: Array


@dataclass(frozen=True)
class DeltaNetState:
    """The last raw convolution inputs and the recurrent state, float32."""

    conv_state: Array  # [slots, taps − 1, C]
    state: Array  # [slots, NV, d, d], key dimension first


LayerState = AttentionState | DeltaNetState


class ModelCache:
    """The states of all layers for `num_slots` sequences of up to `context_length` positions.

    kv_type is the name of a `CacheLayout`.

    layers[i] belongs to layer i of the trunk. Memory of keys and values is taken from the system when a
    position is first written, not before.
    """

    layers: tuple[LayerState, ...]

    def __init__(
        self,
        shape: CacheShape,
        ops: Ops,
        num_slots: int,
        context_length: int,
        kv_type: str = "f16",
    ) -> None:
        if num_slots < 1 or context_length < 1:
            raise ValueError(f"a cache of {num_slots} slots and {context_length} positions can hold nothing")
        self.num_slots = num_slots
        self.context_length = context_length
        self.layers = tuple(self._layer_state(shape, ops, kind, kv_type) for kind in shape.layer_kinds)

    def _layer_state(self, shape: CacheShape, ops: Ops, kind: str, kv_type: str) -> LayerState:
        if kind == "attention":
            layout = CACHE_LAYOUTS[kv_type]
            row = layout.row_elements(shape.head_dim)
            kv_shape = (self.num_slots, self.context_length, shape.num_kv_heads, row)
            return AttentionState(ops.zeros(kv_shape, layout.element), ops.zeros(kv_shape, layout.element))
        size = shape.ssm_state_size
        return DeltaNetState(
            ops.zeros((self.num_slots, shape.conv_kernel - 1, shape.conv_dim), "float32"),
            ops.zeros((self.num_slots, shape.num_value_heads, size, size), "float32"),
        )

    def tensors(self) -> tuple[Array, ...]:
        """All arrays, layer by layer."""
        return tuple(tensor for layer in self.layers for tensor in vars(layer).values())

    @property
    def num_bytes(self) -> int:
        """Of address space; keys and values that were never written take no memory."""
        return sum(int(tensor.nbytes) for tensor in self.tensors())

    def reset(self, slot: int) -> None:
        """Makes `slot` the beginning of a sequence; IndexError if there is no such slot.

        Mutates the recurrent states. Keys and values stay: a position is always written before it is read.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        for layer in self.layers:
            if isinstance(layer, DeltaNetState):
                layer.conv_state[slot, ...] = 0
                layer.state[slot, ...] = 0
