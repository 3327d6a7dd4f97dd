"""gpt-oss: `gpt-oss`, 20b (21B-A3.6B) and 120b (117B-A5B).

Every layer attends, with biases, without norms of queries and keys, and with a logit of each head that takes
a part of the softmax and has no value. The first of two layers sees a window. All rotate alike, by YaRN. The
first and the last dimension that it blends are no whole numbers, as in the checkpoint. llama.cpp makes them
whole, and no key says which is meant. Routers have a bias, and weights are a softmax of the chosen logits.
Experts have biases and a clamped unit.
Source: the converter of llama.cpp, and `GptOssForCausalLM` of transformers.
"""

from dataclasses import replace
from typing import Final

from coldstream.kernels.ops import RouterSpec
from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import (
    WindowPattern,
    read_attention,
    read_clamped_swiglu,
    read_moe,
    read_router,
)
from coldstream.models.spec.layer_specs import LayerSpec
from coldstream.models.spec.layer_tensors import attention_block_tensors
from coldstream.models.spec.rope_keys import YarnRules

_WINDOWS: Final = WindowPattern(period=2, is_full_first=False, is_scaled=True, is_required=True)
_ROUTER: Final = RouterSpec(gating="softmax of the chosen", bias=True)
YARN: Final = YarnRules(truncate=False)


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    attentions = read_attention(
        keys, output_gate="none", qk_norm="none", rotates_whole_heads=True, windows=_WINDOWS, yarn=YARN
    )
    moe = read_moe(keys, shared="none", router=read_router(keys, _ROUTER))
    moe = replace(moe, activation=read_clamped_swiglu(keys), bias=True)
    return tuple(LayerSpec(replace(each, bias="all", sinks=True), moe) for each in attentions)


GPT_OSS: Final = Architecture("gpt-oss", _layers, attention_block_tensors)
