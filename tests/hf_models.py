"""Tiny random models of every architecture from `transformers`, whose outputs depend on every weight."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.laguna import LagunaConfig, LagunaForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

VOCAB_SIZE = 320


def tiny_model(
    *, moe: bool, value_heads_per_key_head: int, tied: bool = False, scaling: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Four layers, the last with full attention. All rows are multiples of 256 if the ratio is 2.

    scaling: further rope parameters.
    """
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * value_heads_per_key_head,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
            **(scaling or {}),
        },
    }
    torch.manual_seed(0)
    if moe:
        config = Qwen3_5MoeTextConfig(
            **common,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=512,
            num_experts=8,
            num_experts_per_tok=3,
        )
        model = Qwen3_5MoeForCausalLM(config)
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, intermediate_size=512))
    randomize(model)
    return model.eval()


def tiny_qwen3next(value_heads_per_key_head: int) -> PreTrainedModel:
    """Four layers, the last with full attention. All rows are multiples of 256 if the ratio is 2."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * value_heads_per_key_head,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=3,
    )
    model = Qwen3NextForCausalLM(config)
    randomize(model)
    return model.eval()


def tiny_qwen3moe(scaling: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Two layers. All rows are multiples of 256. scaling: further rope parameters."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, **(scaling or {})},
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    randomize(model, norm_center=1.0)
    return model.eval()


# Pairs and triples of tokens, with two heads each, in the second layer. A token of the text ends them.
NGRAMS: Mapping[str, Any] = {
    "ple_layer_ids": [2],
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 500,
    "ple_conv_kernel_size": 4,
    "eos_token_id": 7,
}


def tiny_qwen4exp(**changes: Any) -> PreTrainedModel:
    """Four layers, the last with an indexer that keeps 128 positions, in blocks of 4. No n-grams.

    changes: `NGRAMS` for these.
    """
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
            "moe_intermediate_size": 160,
            "shared_expert_intermediate_size": 160,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "hc_count": 4,
            "hc_lowrank": 96,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 128,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            **changes,
        }
    )
    model = Qwen4ExpForCausalLM(config)
    randomize(model)
    with torch.no_grad():
        model.lm_head.weight *= 2  # a mean of four streams is smaller than what a norm gives
    return model.eval()


def tiny_laguna(
    gating: str = "per-head", scaling: Mapping[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """Five layers: the first dense, the first and the last without a window. All rows are multiples of 256.

    scaling: further rope parameters of layers without a window. Of their frequencies some are kept, some
    blended, some divided.
    """
    torch.manual_seed(0)
    full = {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_attention_heads_per_layer": [4, 8, 8, 8, 4],
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 16,
        "gating": gating,
        "rope_parameters": {
            "full_attention": full | dict(scaling or {}),
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_routed_scaling_factor": 2.5,
    }
    model = LagunaForCausalLM(LagunaConfig(**values | changes))
    randomize(model, norm_center=1.0)
    return model.eval()


def tiny_gpt_oss(scaling: Mapping[str, Any] | None = None, **changes: Any) -> PreTrainedModel:
    """Four layers, the first and the third with a window. All rows are multiples of 256.

    scaling: further rope parameters. Of the frequencies some are kept, some blended, some divided.
    """
    torch.manual_seed(0)
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 8192,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
            **(scaling or {}),
        },
    }
    model = GptOssForCausalLM(GptOssConfig(**values | changes))
    randomize(model, norm_center=1.0)
    return model.eval()


def tiny_gemma4(**changes: Any) -> PreTrainedModel:
    """Four layers, the second and the last without a window and with larger heads, whose values are keys.

    Rows of most matrices are multiples of 256. A quarter of a head rotates in layers without a window.
    """
    torch.manual_seed(0)
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 64,
        "global_head_dim": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 4.0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 256,
        "max_position_embeddings": 8192,
    }
    model = Gemma4ForCausalLM(Gemma4TextConfig(**values | changes))
    randomize(model, norm_center=1.0)
    with torch.no_grad():
        for layer, each in enumerate(model.model.layers):
            each.layer_scalar.fill_(0.6 + 0.2 * layer)
            each.self_attn.q_norm.weight *= 0.12  # scores are not divided by the root of the heads' size
        model.model.embed_tokens.weight *= 0.1  # the head is tied to them: some logits are near the cap
    return model.eval()


@torch.no_grad()
def randomize(model: PreTrainedModel, norm_center: float = 0.0) -> None:
    """Weights as large as trained ones, so that a wrong head order or a missing norm shows in the logits.

    norm_center: of the weights of norms, 0 where the model adds 1 to them.
    """
    generator = torch.Generator().manual_seed(1)

    def normal(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3 - 1)
        elif name.endswith("dt_bias"):
            parameter.copy_(normal(parameter))
        elif name.endswith("conv1d.weight"):
            parameter.copy_(normal(parameter) * 0.5)
        elif name.endswith("sinks"):
            parameter.copy_(1 + normal(parameter) * 2)
        elif name.endswith("_bias") or (name.endswith(".bias") and parameter.dim() == 1):
            parameter.copy_(normal(parameter) * 0.3)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.copy_(1 + normal(parameter) * 0.2)
        elif parameter.dim() == 1:
            parameter.copy_(norm_center + normal(parameter) * 0.2)
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(normal(parameter))
        else:
            parameter.copy_(normal(parameter) * 1.5 * parameter.shape[-1] ** -0.5)


@torch.no_grad()
def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [T, vocab]."""
    return model(torch.tensor([token_ids])).logits[0]
