"""Qwen3.5 and Qwen3.6: `qwen35moe`, and `qwen35` with a dense feed-forward network.

Most layers have a gated DeltaNet, the others gated full attention. The converters of llama.cpp tile the value
heads of the DeltaNet; files of Ollama's are recognised by keys that only its converters write.
"""

from functools import partial
from typing import Final

from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import (
    hybrid_layers,
    read_attention,
    read_delta_net,
    read_dense_ffn,
    read_moe,
)
from coldstream.models.spec.layer_specs import AttentionSpec, DeltaNetSpec, LayerSpec
from coldstream.models.spec.layer_tensors import delta_net_projections, hybrid_block_tensors
from coldstream.models.spec.rope_keys import check_sections

# Keys that only Ollama's converters write.
_OLLAMA_KEYS: Final = ("mrope_sections", "rope.mrope_section", "rope.mrope_interleaved", "vision.block_count")


def _moe_layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    return hybrid_layers(keys, *_mixers(keys), read_moe(keys, shared="gated"))


def _dense_layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    return hybrid_layers(keys, *_mixers(keys), read_dense_ffn(keys))


def _mixers(keys: Hyperparameters) -> tuple[tuple[AttentionSpec, ...], DeltaNetSpec]:
    attentions = read_attention(keys, output_gate="query", qk_norm="head")
    for rope_dims in {attention.rope.num_dims for attention in attentions}:
        check_sections(keys.keys, keys.architecture, rope_dims)
    return attentions, read_delta_net(keys, value_heads_grouped=_value_heads_grouped(keys))


def _value_heads_grouped(keys: Hyperparameters) -> bool:
    """Whether the value heads of the DeltaNet are in the order of the original checkpoint.

    Ollama's converters write a key if they have reordered them; all other converters reorder them and write
    no key.
    """
    if "ssm.v_head_reordered" in keys:
        return not keys.flag("ssm.v_head_reordered")
    return any(key in keys for key in _OLLAMA_KEYS)


_block_tensors = partial(hybrid_block_tensors, projections=delta_net_projections)
QWEN35: Final = Architecture("qwen35", _dense_layers, _block_tensors)
QWEN35MOE: Final = Architecture("qwen35moe", _moe_layers, _block_tensors)
