"""Hyper-connections: each part of a block reads a mixture of several residual streams, and adds to all.

Formulas are in `kernels/hyper_connections/reference.py`. A mixture stands in place of a norm.
"""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, ExpertOutputs, Ops, Weight


@dataclass(frozen=True)
class HyperConnectionWeights:
    """How a part of a block reads C streams side by side, and how its output enters them."""

    norm: Array  # [C·E], of each stream
    down: Weight  # [rank, C·E]
    up: Weight  # [C·E, rank]
    inject: Weight | None  # [C, C·E]; None if nothing is added behind
    num_streams: int


@dataclass(frozen=True)
class Streams:
    """Residual streams, and the logits by which the next update enters them."""

    values: Array  # [T, C·E], side by side
    injection: Array | None  # [T, C]; None if there is no update behind


@dataclass(frozen=True)
class EnteringStreams:
    """What enters the first block, where that are several streams already."""

    values: Array  # [T, C·E], side by side
    update: Array  # [T, E], which is added to each of them
    no_injection: Array  # zeros [T, C]: the logits of an update that is added as it is


def enter_streams(
    ops: Ops, x: Array | EnteringStreams, weights: HyperConnectionWeights, eps: float
) -> tuple[Streams, Array]:
    """Streams that all are x [T, E], or those that enter, and what the first part reads of them, [T, E]."""
    if isinstance(x, EnteringStreams):
        return update_streams(ops, Streams(x.values, x.no_injection), x.update, weights, eps)
    return mixed_streams(ops, ops.inject_norm(None, x, None, weights.norm, eps), weights)


def update_streams(
    ops: Ops, streams: Streams, update: Array | ExpertOutputs, weights: HyperConnectionWeights, eps: float
) -> tuple[Streams, Array]:
    """The streams after the output of a part, and what the next one reads of them, [T, E]."""
    found = ops.inject_norm(streams.values, update, streams.injection, weights.norm, eps)
    return mixed_streams(ops, found, weights)


def mixed_streams(
    ops: Ops, found: tuple[Array, Array], weights: HyperConnectionWeights
) -> tuple[Streams, Array]:
    """Streams with the logits of the part that reads them, and what it reads; found: values and norms."""
    values, normed = found
    low = (weights.down,) if weights.inject is None else (weights.down, weights.inject)
    gates, injection = ops.stream_gates(normed, low, weights.up, weights.num_streams)
    streams = Streams(values, injection[0] if injection else None)
    del injection
    return streams, ops.mix_streams(normed, gates, weights.num_streams)
