"""Qwen3.8-Flash-Next: `qwen4exp`, a mixture of experts with four residual streams.

It has the mixers of `qwen35moe`, with these differences:

- hyper-connections in place of every norm of a block, and of the last norm;
- a sigmoid as the output gate of the DeltaNet;
- an indexer that chooses the positions which attention reads. Texts are held to as many positions as all rows
  see without it.

Norm weights have their 1 added. The n-gram embedding of one layer (`ple`) is refused. Source: the converter
of llama.cpp, and `Qwen4ExpTextModel` of transformers.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from coldstream.errors import UnsupportedError
from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import MAX_HEADS, Hyperparameters
from coldstream.models.spec.layer_keys import hybrid_layers, read_attention, read_delta_net, read_moe
from coldstream.models.spec.layer_specs import AttentionSpec, HyperConnectionSpec, IndexerSpec, LayerSpec
from coldstream.models.spec.layer_tensors import (
    Requirement,
    delta_net_projections,
    hybrid_block_tensors,
    indexer_tensors,
)
from coldstream.models.spec.rope_keys import check_sections

_BLOCK_SIZES: Final = "attention.compress_ratios"


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    if keys.keys.get(keys.key("ple.layers")):
        problem = f"{keys.value('ple.layers')}, supported: none, as n-gram embeddings are not computed yet"
        raise keys.error(UnsupportedError, "ple.layers", problem)
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
    return tuple(replace(layer, hyper_connections=streams) for layer in layers)


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
    if not isinstance(layer.mixer, AttentionSpec):
        return tensors
    assert layer.mixer.indexer is not None, "every layer of the family that attends has an indexer"
    return (*tensors, *indexer_tensors(layer.mixer.indexer, hidden))


QWEN4EXP: Final = Architecture("qwen4exp", _layers, _block_tensors)
