"""The n-gram embedding of a layer: what the last tokens add to its residual streams."""

from dataclasses import dataclass

from coldstream.kernels.ops import Array, ExpertOutputs, NgramHash, NgramState, Ops, Rows, Weight
from coldstream.layers.hyper_connections import HyperConnectionWeights, Streams, mixed_streams


@dataclass(frozen=True)
class NgramWeights:
    """Named as in the file, without `ple_`; see `kernels/ngram/reference.py`."""

    table: Weight  # [rows, columns]
    hashing: NgramHash
    key: Weight  # [C·E, heads · columns]
    value: Weight  # [E, heads · columns]
    norm_key: Array  # [C·E], as the next two
    norm_query: Array
    norm_conv: Array
    taps: Array  # [C·E, K], the current row's last
    dilation: int


@dataclass(frozen=True)
class NgramMixture:
    """What a block reads of residual streams to which n-grams are added before."""

    ngram: NgramWeights
    mixture: HyperConnectionWeights


@dataclass(frozen=True)
class NgramInputs:
    """Rows of the table, `Ops.ngram_ids`, of each row of a step, and what is kept of its sequences."""

    ids: Array
    state: NgramState
    rows: Rows


def find_ngrams(
    ops: Ops, token_ids: Array, weights: NgramWeights, state: NgramState, rows: Rows
) -> NgramInputs:
    """What `add_ngrams` reads. To be asked for early, as it may come from a disk. Advances `state.tokens`."""
    ids = ops.ngram_ids(token_ids, weights.hashing, weights.table, state, rows)
    return NgramInputs(ids, state, rows)


def add_ngrams(
    ops: Ops,
    streams: Streams,
    output: Array | ExpertOutputs,
    entry: NgramMixture,
    inputs: NgramInputs,
    eps: float,
) -> tuple[Streams, Array]:
    """The streams after the output of a part and n-grams, and what the next part reads of them, [T, E].

    Advances `inputs.state.conv`.
    """
    weights, mixture = entry.ngram, entry.mixture
    values, query = ops.inject_norm(streams.values, output, streams.injection, weights.norm_query, eps)
    embedded = ops.ngram_rows(weights.table, inputs.ids)
    key, value = ops.linear(embedded, (weights.key, weights.value))
    del embedded
    key = ops.norm_streams(key, weights.norm_key, eps, mixture.num_streams)
    gated = ops.ngram_gate(key, query, value)
    del key, query, value
    normed = ops.norm_streams(gated, weights.norm_conv, eps, mixture.num_streams)
    values = ops.ngram_conv(values, gated, normed, weights.taps, weights.dilation, inputs.state, inputs.rows)
    normed = ops.norm_streams(values, mixture.norm, eps, mixture.num_streams)
    return mixed_streams(ops, (values, normed), mixture)
