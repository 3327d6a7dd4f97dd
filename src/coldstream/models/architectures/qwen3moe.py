"""Qwen3 with experts: `qwen3moe`, such as Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder-30B-A3B.

Every layer attends, without an output gate, and has experts, none of them shared. Norm weights are as in the
checkpoint, which multiplies by them; nothing was added. Some files state that the shared expert has a size of
0. Source: the converter of llama.cpp, and `Qwen3MoeForCausalLM` of transformers.
"""

from typing import Final

from coldstream.models.architectures.architecture import Architecture
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_attention, read_moe
from coldstream.models.spec.layer_specs import LayerSpec
from coldstream.models.spec.layer_tensors import attention_block_tensors


def _layers(keys: Hyperparameters) -> tuple[LayerSpec, ...]:
    moe = read_moe(keys, shared="none")
    attentions = read_attention(keys, output_gate="none", qk_norm="head", rotates_whole_heads=True)
    return tuple(LayerSpec(attention, moe) for attention in attentions)


QWEN3MOE: Final = Architecture("qwen3moe", _layers, attention_block_tensors, ffn_norm="ffn_norm")
