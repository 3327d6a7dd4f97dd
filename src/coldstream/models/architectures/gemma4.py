"""gemma-4: `gemma4` with experts, 26B-A4B.

Every layer attends, with norms of queries, keys and values, and scores as they are. Most layers see a window.
The others have larger heads, fewer of keys and values, and no projection of values, which are their keys.
They rotate by another base, and a tensor of the file stops three of four pairs.

What a part gives is normed before it is added. Beside the experts is a dense network with a norm of its own
before and behind it, and the router reads the residual stream by another norm. A number of each layer
multiplies the residual stream. Embeddings are scaled, and logits capped. Norm weights have nothing added.
Source: the converter and the graph of llama.cpp, and `Gemma4ForCausalLM` of transformers.
"""

from dataclasses import replace
from typing import Final

from coldstream.errors import UnsupportedError
from coldstream.kernels.ops import Activation, RouterSpec
from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import WindowPattern, read_attention, read_moe, read_router
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec
from coldstream.models.spec.layer_tensors import OUTPUT_SCALE, attention_block_tensors

_WINDOWS: Final = WindowPattern(
    period=0, is_full_first=False, is_scaled=False, is_required=True, has_heads=True
)
# Any of these may be why a rotary embedding is scaled.
_SCALING_KEYS: Final = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
)
# What other models of the family have, and this one has not.
_ABSENT: Final = {
    "embedding_length_per_layer_input": "no embeddings of each layer",
    "attention.shared_kv_layers": "keys and values of each layer",
}


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    if "expert_count" not in keys:
        raise keys.error(
            UnsupportedError, "expert_count", "missing: models without experts are not supported"
        )
    for name, supported in _ABSENT.items():
        if count := keys.integer(name, 0, 1 << 24, 0):
            raise keys.error(UnsupportedError, name, f"{count}, supported: {supported}")
    if keys.num_nextn_layers:
        problem = f"{keys.num_nextn_layers} blocks for multi-token prediction, supported: none"
        raise keys.error(UnsupportedError, "nextn_predict_layers", problem)
    attentions = read_attention(
        keys, output_gate="none", qk_norm="head", rotates_whole_heads=True, windows=_WINDOWS
    )
    usual = RouterSpec(own_input=True, expert_scale=_some_block_has(keys, "ffn_down_exps.scale"))
    router = read_router(keys, usual)
    moe = read_moe(keys, shared="parallel", router=router, activation=Activation("geglu"))
    output_scale = _some_block_has(keys, OUTPUT_SCALE)
    return tuple(
        LayerSpec(_own(keys, block, attention), moe, post_norms=True, output_scale=output_scale)
        for block, attention in enumerate(attentions)
    )


def _some_block_has(keys: Hyperparameters, name: str) -> bool:
    """Whether blocks have such a tensor. A block that lacks it then is damaged."""
    return any(f"blk.{block}.{name}" in keys.tensors for block in range(keys.num_layers))


def _own(keys: Hyperparameters, block: int, attention: AttentionSpec) -> AttentionSpec:
    """The attention of a block with what no key states of it."""
    attention = replace(attention, v_norm=True, scale=1.0)
    if attention.window is not None:
        return attention
    projected = (f"blk.{block}.{name}.weight" in keys.tensors for name in ("attn_v", "attn_qkv"))
    if attention.rope.scaling is not None:
        name = next(name for name in _SCALING_KEYS if name in keys)
        problem = f"{keys.value(name)}, supported: frequencies by the tensor rope_freqs alone"
        raise keys.error(UnsupportedError, name, problem)
    return replace(attention, rope_factors=True, values_are_keys=not any(projected))


GEMMA4: Final = Architecture(
    "gemma4",
    _layers,
    attention_block_tensors,
    ffn_norm="pre_ffw_norm_2",
    scales_embeddings=True,
    caps_logits=True,
)
