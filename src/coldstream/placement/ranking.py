"""The order of experts for fast memory, and the ones that fit. Pure.

An expert is a number, layer · num_experts + expert, as in `policies.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def assumed_uses(num_layers: int, num_experts: int) -> Array:
    """Uses for planning without a trace, float64 [layers, experts].

    A small part of the experts makes up most uses, but nobody knows which part. So uses fall with the
    expert's number, the same in all layers. Each layer gets its share, and a little more where experts are
    small.
    """
    return np.tile(1.0 / np.arange(1, num_experts + 1), (num_layers, 1))


def ranked(uses: Array, expert_bytes: Sequence[int]) -> Array:
    """All experts by falling uses per byte, int64 [layers · experts].

    uses: float64 [layers, experts], counts or expected uses per step; expert_bytes: of each layer. Ties are
    ordered by more uses, then higher rank in the layer, then lower layer, then lower id.
    """
    num_layers, num_experts = uses.shape
    by_use = np.lexsort((np.broadcast_to(np.arange(num_experts), uses.shape), -uses))
    ranks = np.empty_like(by_use)
    np.put_along_axis(ranks, by_use, np.arange(num_experts)[None, :], axis=1)
    layers = np.repeat(np.arange(num_layers), num_experts)
    density = uses / np.asarray(expert_bytes, np.float64).reshape(num_layers, 1)
    # The last key counts most; numpy sorts stably, so equals stay in the order of ids.
    return np.lexsort((layers, ranks.ravel(), -uses.ravel(), -density.ravel())).astype(np.int64)


def layers_to_pin(num_layers: int, count: int) -> tuple[int, ...]:
    """The first `count` of: the first layer, the last, then from the second on.

    Routing in the outer layers is the most uniform, so that a cache helps them least.
    """
    order = dict.fromkeys([0, num_layers - 1, *range(1, num_layers)])
    return tuple(order)[:count]


def weights_by_layer(num_layers: int, weights: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """The weight of a use in each layer, by default 1. Empty if it is 1 in all layers.

    weights: the last entry of a layer counts.
    """
    named = dict(weights)
    by_layer = tuple(named.get(layer, 1.0) for layer in range(num_layers))
    return () if all(weight == 1 for weight in by_layer) else by_layer


def take_fitting(order: Sequence[int], sizes: Array, num_bytes: int) -> list[int]:
    """The experts of `order` that fit into `num_bytes`, taken in order and skipping those too large.

    sizes: bytes by number. With more bytes the result never has fewer bytes.
    """
    taken = []
    smallest = int(sizes.min()) if sizes.size else 0
    for number in order:
        size = int(sizes[number])
        if size <= num_bytes:
            taken.append(int(number))
            num_bytes -= size
        if num_bytes < smallest:
            break
    return taken
