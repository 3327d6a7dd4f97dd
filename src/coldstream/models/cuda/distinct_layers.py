"""Which layers of a model launch other kernels than the layers before them.

A layer's launches follow from the types and shapes of its weights, never from their values, and a model
repeats few combinations of those. Pure.
"""

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch

from coldstream.layers.moe import MoeWeights
from coldstream.models.loader import Block


def distinct_layers(blocks: Sequence[Block], distance: int = 0) -> tuple[int, ...]:
    """The first layer of each kind, in order.

    distance: how many layers ahead missing experts are guessed, 0 if none are; a layer without another one so
    far behind it guesses nothing.
    """
    first: dict[Hashable, int] = {}
    behind = 0  # layers behind this one that may miss an expert
    for layer in reversed(range(len(blocks))):
        block = blocks[layer]
        first[_kind(block), min(behind, distance)] = layer
        behind += isinstance(block.ffn, MoeWeights) and bool(block.ffn.experts.gate.is_partial)
    return tuple(sorted(first.values()))


def distinct_mixers(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The first layer with a mixer of each kind, in order."""
    first: dict[Hashable, int] = {}
    for layer, block in enumerate(blocks):
        first.setdefault(_kind(block.mixer), layer)
    return tuple(first.values())


def _kind(value: Any) -> Hashable:
    """Types and shapes of everything in `value`, without addresses and contents."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    kind: Any = type(value)
    if (names := _fields_of(kind)) is not None:
        return kind, tuple(_kind(getattr(value, name)) for name in names)
    plain: Hashable = value
    return plain


@cache
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Names of the fields; None if it is no dataclass, which takes long to find out of an enumeration."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
