"""Laguna: `laguna`, such as Laguna-XS-2.1 (33B-A3B) and Laguna-S-2.1 (118B-A8B).

Every layer attends. One of four, beginning with the first, sees all positions. It rotates half of each head,
by YaRN. The others see a window, rotate whole heads by another base, and have more query heads. What a head
returns is multiplied by the softplus of a gate. There is one gate for a head, or one for each element: no key
says which, but the shape of the tensor does. The first layers are dense. The others have a sigmoid router
with a selection bias, and a shared expert without a gate.

The constants of YaRN are those of the file, as in the checkpoint; llama.cpp takes the usual ones for every
file. Source: the converter of llama.cpp, and `LagunaForCausalLM` of transformers.
"""

from dataclasses import replace
from typing import Final

from coldstream.kernels.ops import RouterSpec
from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import (
    WindowPattern,
    read_attention,
    read_ffns,
    read_moe,
    read_router,
)
from coldstream.models.spec.layer_specs import AttentionSpec, LayerSpec
from coldstream.models.spec.layer_tensors import attention_block_tensors
from coldstream.models.spec.rope_keys import YarnRules

_WINDOWS: Final = WindowPattern(period=4, is_full_first=True, is_scaled=False)
_ROUTER: Final = RouterSpec(gating="sigmoid", selection_bias=True)


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    attentions = read_attention(
        keys, output_gate="head", qk_norm="head", windows=_WINDOWS, yarn=YarnRules(has_betas=True)
    )
    moe = read_moe(keys, shared="plain", router=read_router(keys, _ROUTER, is_fixed=False))
    return tuple(
        LayerSpec(_with_gate(keys, block, attention), ffn)
        for block, (attention, ffn) in enumerate(zip(attentions, read_ffns(keys, moe), strict=True))
    )


def _with_gate(keys: Hyperparameters, block: int, attention: AttentionSpec) -> AttentionSpec:
    """The attention of a block with the kind of gate that its tensor has."""
    has_elements = keys.num_rows(f"blk.{block}.attn_gate.weight") == attention.query_dim
    return replace(attention, output_gate="element") if has_elements else attention


LAGUNA: Final = Architecture("laguna", _layers, attention_block_tensors, ffn_norm="ffn_norm")
