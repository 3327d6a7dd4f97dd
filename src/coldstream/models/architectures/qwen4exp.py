"""Qwen3.8-Flash-Next: `qwen4exp`, a mixture of experts with four residual streams.

It has the mixers of `qwen35moe`, with these differences:

- hyper-connections in place of every norm of a block, and of the last norm;
- a sigmoid as the output gate of the DeltaNet;
- an indexer that chooses the positions which attention reads, in texts that are longer than its choice;
- an n-gram embedding before one layer, from a table that is a third of a file.

Norm weights have their 1 added. Source: the converter of llama.cpp, and `Qwen4ExpTextModel` of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from coldstream.errors import UnsupportedError
from coldstream.kernels.ops import MIN_FORK_ROWS, NgramHash
from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import MAX_HEADS, Hyperparameters
from coldstream.models.spec.layer_keys import hybrid_layers, read_attention, read_delta_net, read_moe
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    HyperConnectionSpec,
    IndexerSpec,
    LayerSpec,
    NgramSpec,
)
from coldstream.models.spec.layer_tensors import (
    NGRAM_TABLE,
    Requirement,
    delta_net_projections,
    hybrid_block_tensors,
    indexer_tensors,
    ngram_tensors,
)
from coldstream.models.spec.rope_keys import check_sections

_MOST_ROWS: Final = (1 << 31) - 1  # of the table of n-grams
_BLOCK_SIZES: Final = "attention.compress_ratios"


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    indexer = _indexer(keys)
    attentions = read_attention(keys, output_gate="query", qk_norm="head")
    for rope_dims in {attention.rope.num_dims for attention in attentions}:
        check_sections(keys.keys, keys.architecture, rope_dims)
    attentions = tuple(replace(attention, indexer=indexer) for attention in attentions)
    delta_net = replace(read_delta_net(keys, value_heads_grouped=False), output_gate="sigmoid")
    streams = HyperConnectionSpec(
        num_streams=keys.integer("hyper_connection.count", 2, 64),
        rank=keys.integer("hyper_connection.low_rank", 1, 1 << 16),
    )
    layers = hybrid_layers(keys, attentions, delta_net, read_moe(keys, shared="gated"))
    return _with_ngrams(keys, tuple(replace(layer, hyper_connections=streams) for layer in layers))


def _with_ngrams(keys: Hyperparameters, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers with the n-gram embedding that the file may state for one of them."""
    name = "ple.layers"
    found = keys.keys.integers(keys.key(name), 0, keys.num_layers - 1) if name in keys else ()
    if len(found) > 1:
        raise keys.error(UnsupportedError, name, f"{list(found)}, supported: n-grams before one layer")
    if not found:
        if NGRAM_TABLE in keys.tensors:
            problem = (
                f"names no layer, but the file has the tensor {NGRAM_TABLE}: convert or download it again"
            )
            raise keys.inconsistent(name, problem)
        return layers
    (place,) = found
    if place == 0:
        raise keys.error(UnsupportedError, name, "0, supported: n-grams before a layer after the first")
    if layers[place].kind != "delta_net":
        raise keys.inconsistent(name, f"layer {place} attends: expected one with a gated DeltaNet")
    with_ngrams = replace(layers[place], ngram=_ngram(keys))
    return (*layers[:place], with_ngrams, *layers[place + 1 :])


def _ngram(keys: Hyperparameters) -> NgramSpec:
    length = keys.integer("ple.ngram_size", 2, 4)
    heads = keys.integer("ple.heads_per_ngram", 1, 64)
    num_heads = (length - 1) * heads
    multipliers = _numbers(keys, "ple.layer_multipliers", length, (1 << 63) - 1)
    offsets = _numbers(keys, "ple.head_offsets", num_heads, _MOST_ROWS)
    sizes = _numbers(keys, "ple.head_vocab_sizes", num_heads, _MOST_ROWS)
    for offset, size in zip(offsets, sizes, strict=True):
        if not 0 < size <= _MOST_ROWS - offset:
            problem = f"{size} rows from {offset} on, expected some that fit 31 bits"
            raise keys.inconsistent("ple.head_vocab_sizes", problem)
    num_taps = keys.integer("ple.conv_kernel", 2, 16)
    if (num_taps - 1) * length > MIN_FORK_ROWS:
        problem = f"{num_taps} rows, {length} rows apart each, supported: up to {MIN_FORK_ROWS} rows back"
        raise keys.error(UnsupportedError, "ple.conv_kernel", problem)
    end_token = keys.integer("ple.eos_token_id", 0, (1 << 31) - 2)
    hashing = NgramHash(multipliers, sizes, offsets, end_token, heads)
    columns = keys.integer("embedding_length_per_layer_input", 1, 1 << 16)
    table = keys.tensors.get(NGRAM_TABLE)
    row_bytes = 0 if table is None else table.num_bytes // table.shape[0]
    return NgramSpec(hashing, columns, row_bytes, num_taps)


def _numbers(keys: Hyperparameters, name: str, count: int, most: int) -> tuple[int, ...]:
    found = keys.keys.integers(keys.key(name), 0, most)
    if len(found) != count:
        raise keys.inconsistent(name, f"{len(found)} numbers, expected {count}")
    return found


def _indexer(keys: Hyperparameters) -> IndexerSpec:
    """Some converters write that no layer has blocks, for layers that have an indexer."""
    sizes = keys.per_layer(_BLOCK_SIZES, 1 << 16) if _BLOCK_SIZES in keys else ()
    block_size = keys.uniform(_BLOCK_SIZES, 1 << 16) if any(sizes) else 0
    top_k = keys.integer("attention.indexer.top_k", 1, 1 << 24)
    if block_size and top_k % block_size:
        problem = f"{top_k} positions are no whole blocks of {block_size}"
        raise keys.inconsistent("attention.indexer.top_k", problem)
    return IndexerSpec(
        num_heads=keys.integer("attention.indexer.head_count", 1, MAX_HEADS),
        head_dim=keys.integer("attention.indexer.key_length", 1, 1024),
        top_k=top_k,
        block_size=block_size,
    )


_hybrid_tensors = partial(hybrid_block_tensors, projections=delta_net_projections)


def _block_tensors(layer: LayerSpec, hidden: int) -> tuple[Requirement, ...]:
    tensors = _hybrid_tensors(layer, hidden)
    if layer.ngram is not None and layer.hyper_connections is not None:
        tensors += ngram_tensors(layer.ngram, layer.hyper_connections.num_streams, hidden)
    if not isinstance(layer.mixer, AttentionSpec):
        return tensors
    assert layer.mixer.indexer is not None, "every layer of the family that attends has an indexer"
    return (*tensors, *indexer_tensors(layer.mixer.indexer, hidden))


QWEN4EXP: Final = Architecture("qwen4exp", _layers, _block_tensors)
