"""Writes a model of `transformers` as a GGUF file, with the variants that converters in use produce.

GGUF differs from the original checkpoint in three ways: norm weights contain their 1, decays are
−exp(A_log), and in Qwen3.5 the value heads of the gated DeltaNet are tiled (head h reads key head h mod NK)
and not grouped (h div r). Qwen3-Next keeps them grouped. Norm weights of Qwen3-MoE and Laguna have nothing to
add.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from transformers import PreTrainedModel

import gguf
from gguf import GGMLQuantizationType, GGUFWriter
from tools import llama_cpp

F32 = GGMLQuantizationType.F32
NUM_SPECIAL_TOKENS = 2
ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen4_exp_text": "qwen4exp",
    "laguna": "laguna",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
}
OF_LLAMA = ("qwen3_moe", "laguna")  # whose norms multiply by their weights, and lie where Llama has them
PLAIN_NORMS = (*OF_LLAMA, "gpt_oss", "gemma4_text")  # whose norms multiply by their weights
Tensors = Iterator[tuple[str, np.ndarray]]

COMMON_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "attn_hyper_connection.hc_norm.weight": "hc_attn_norm.weight",
    "attn_hyper_connection.input_mix_weight_down.weight": "hc_attn_down.weight",
    "attn_hyper_connection.input_mix_weight_up.weight": "hc_attn_up.weight",
    "attn_hyper_connection.block_inject_weight.weight": "hc_attn_inject.weight",
    "mlp_hyper_connection.hc_norm.weight": "hc_ffn_norm.weight",
    "mlp_hyper_connection.input_mix_weight_down.weight": "hc_ffn_down.weight",
    "mlp_hyper_connection.input_mix_weight_up.weight": "hc_ffn_up.weight",
    "mlp_hyper_connection.block_inject_weight.weight": "hc_ffn_inject.weight",
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.norm_key.weight": "ple_norm_key.weight",
    "ple.norm_query.weight": "ple_norm_query.weight",
    "ple.norm_conv.weight": "ple_norm_conv.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
    "self_attn.indexer.index_qk_proj.weight": "indexer.qk_proj.weight",
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm.weight",
    "model.hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "model.hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
}
# Kept in float32 by every converter unless a variant asks for something else.
SMALL_WEIGHTS = (
    "norm.weight",
    "ssm_conv1d.weight",
    "ple_conv1d.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
)


@dataclass(frozen=True)
class Variant:
    """How a file differs from what the mainstream converter writes by default.

    types: GGUF name without block and suffix ("attn_q", "ffn_down_exps") → type; "" is for all other
    matrices.
    """

    types: Mapping[str, GGMLQuantizationType] = field(default_factory=lambda: MappingProxyType({}))
    ssm_in: bool = False  # as the first converters of Qwen3-Next; later ones take it apart
    fused_experts: bool = False
    fused_qkv: bool = False
    shared_gate_as_matrix: bool = False
    ollama: bool = False
    mtp_block: bool = False
    block_sizes: bool = True  # False: as a converter that takes no layer for one with an indexer


def convert(model: PreTrainedModel, path: Path, variant: Variant | None = None) -> Path:
    """Writes `model` to `path`, which is returned."""
    variant = variant or Variant()
    config = model.config
    writer = GGUFWriter(path, ARCHITECTURES[config.model_type])
    if config.model_type != "gemma4_text":
        add_hyperparameters(writer, config, variant)
    if config.model_type == "laguna":
        add_laguna_hyperparameters(writer, config)
    if config.model_type == "gemma4_text":
        add_gemma4_hyperparameters(writer, config)
    if getattr(config, "ple_layer_ids", None):
        add_hashes(writer, model)
    add_tokenizer(writer, config.vocab_size)
    for name, values in gguf_tensors(model, variant):
        add_tensor(writer, name, values, variant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_hyperparameters(writer: GGUFWriter, config, variant: Variant) -> None:
    prefix = writer.arch
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    integers = {
        "block_count": config.num_hidden_layers + variant.mtp_block,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    if prefix not in ("qwen3moe", "gpt-oss"):
        integers["rope.dimension_count"] = int(config.head_dim * rope["partial_rotary_factor"])
    if hasattr(config, "linear_num_key_heads"):
        integers |= delta_net_hyperparameters(config)
    if prefix != "laguna":
        integers["attention.head_count"] = config.num_attention_heads
    if hasattr(config, "num_experts"):
        integers["expert_count"] = config.num_experts
        integers["expert_used_count"] = config.num_experts_per_tok
        size = config.intermediate_size if prefix == "gpt-oss" else config.moe_intermediate_size
        integers["expert_feed_forward_length"] = size
        if hasattr(config, "shared_expert_intermediate_size"):
            integers["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    else:
        integers["feed_forward_length"] = config.intermediate_size
    if prefix == "gpt-oss":
        integers["feed_forward_length"] = config.intermediate_size
        integers["attention.sliding_window"] = config.sliding_window
    if variant.mtp_block:
        integers["nextn_predict_layers"] = 1
    if prefix == "qwen4exp":
        integers |= stream_hyperparameters(config)
        ratio = config.indexer_compress_ratio if variant.block_sizes else 0
        sizes = [ratio if kind == "indexed_attention" else 0 for kind in config.layer_types]
        writer.add_array(f"{prefix}.attention.compress_ratios", sizes + [0] * variant.mtp_block)
        integers |= ngram_hyperparameters(config)
    for key, value in integers.items():
        writer.add_uint32(f"{prefix}.{key}", value)
    writer.add_float32(f"{prefix}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{prefix}.rope.freq_base", rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_string(f"{prefix}.rope.scaling.type", rope["rope_type"])
        writer.add_float32(f"{prefix}.rope.scaling.factor", rope["factor"])
    if "original_max_position_embeddings" in rope:
        original = rope["original_max_position_embeddings"]
        writer.add_uint32(f"{prefix}.rope.scaling.original_context_length", original)
    if "mrope_section" in rope:
        writer.add_array(f"{prefix}.rope.dimension_sections", [*rope["mrope_section"], 0])
    if variant.ollama:
        is_full = [kind == "full_attention" for kind in config.layer_types]
        head_counts = [config.num_key_value_heads if full else 0 for full in is_full]
        writer.add_array(f"{prefix}.attention.head_count_kv", head_counts)
        writer.add_bool(f"{prefix}.rope.mrope_interleaved", True)
    else:
        writer.add_uint32(f"{prefix}.attention.head_count_kv", config.num_key_value_heads)


def stream_hyperparameters(config) -> dict[str, int]:
    return {
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
    }


def add_laguna_hyperparameters(writer: GGUFWriter, config) -> None:
    """What the mainstream converter writes of this family alone."""
    prefix, windowed = writer.arch, config.rope_parameters["sliding_attention"]
    writer.add_array(f"{prefix}.attention.head_count", config.num_attention_heads_per_layer)
    integers = {
        "attention.sliding_window": config.sliding_window,
        "expert_gating_func": 2,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
        "rope.dimension_count_swa": int(config.head_dim * windowed["partial_rotary_factor"]),
        "vocab_size": config.vocab_size,
    }
    for key, value in integers.items():
        writer.add_uint32(f"{prefix}.{key}", value)
    writer.add_bool(f"{prefix}.expert_weights_norm", True)
    scaling = config.rope_parameters["full_attention"]
    for key, number in {
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "rope.freq_base_swa": windowed["rope_theta"],
        "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
        "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
        "rope.scaling.yarn_attn_factor": 1.0,
    }.items():
        writer.add_float32(f"{prefix}.{key}", number)


def add_gemma4_hyperparameters(writer: GGUFWriter, config) -> None:
    """All of this family, as the mainstream converter writes them."""
    prefix, ropes = writer.arch, config.rope_parameters
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    full, swa = (config.per_layer_config[f"{kind}_attention"] for kind in ("full", "sliding"))
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": config.sliding_window,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": swa.head_dim,
        "attention.value_length_swa": swa.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": swa.head_dim,
    }.items():
        writer.add_uint32(f"{prefix}.{key}", value)
    kv_heads = [(swa if flag else full).num_key_value_heads for flag in windowed]
    writer.add_array(f"{prefix}.attention.head_count_kv", kv_heads)
    writer.add_array(f"{prefix}.attention.sliding_window_pattern", windowed)
    for key, number in {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        **({"final_logit_softcapping": cap} if (cap := config.final_logit_softcapping) else {}),
    }.items():
        writer.add_float32(f"{prefix}.{key}", number)


def rope_factors(config) -> np.ndarray:
    """By which the frequencies of layers without a window are divided: most pairs do not turn."""
    pairs = config.per_layer_config["full_attention"].head_dim // 2
    turning = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


def ngram_hyperparameters(config) -> dict[str, int]:
    """The single numbers; `add_hashes` writes the others, which are of 64 bits."""
    if not config.ple_layer_ids:
        return {}
    num_heads = (config.ngram_size - 1) * config.heads_per_ngram
    return {
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "embedding_length_per_layer_input": config.ple_embed_dim // num_heads,
    }


def add_hashes(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """How tokens become rows of the table, as the model has computed it."""
    (layer,) = (number - 1 for number in model.config.ple_layer_ids)
    embedding = model.model.layers[layer].ple.ple_embedding
    writer.add_array(f"{writer.arch}.ple.layers", [layer])
    for name, numbers in {
        "layer_multipliers": embedding.layer_multipliers.tolist(),
        "head_offsets": embedding.head_offsets,
        "head_vocab_sizes": embedding.head_vocab_sizes,
    }.items():
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
        writer.add_key_value(f"{writer.arch}.ple.{name}", numbers, *kinds)


def delta_net_hyperparameters(config) -> dict[str, int]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }


def add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Bytes, then pairs of letters, then two special tokens: enough to tokenise any text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    pairs = [f"{a} {b}" for a in "etaoins" for b in "rhdlucmfwyg"][: vocab_size - 256 - NUM_SPECIAL_TOKENS]
    tokens = [alphabet[byte] for byte in range(256)] + [pair.replace(" ", "") for pair in pairs]
    special = ["<|endoftext|>", "<|im_end|>"]
    assert len(tokens) + len(special) == vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens + special)
    writer.add_token_types([1] * len(tokens) + [3] * len(special))
    writer.add_token_merges(pairs)
    writer.add_eos_token_id(vocab_size - 1)


def gguf_tensors(model: PreTrainedModel, variant: Variant) -> Tensors:
    """Names and float32 values of all tensors of the file."""
    config = model.config
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith("ngram_embedding.weight"):
            yield "per_layer_token_embd.weight", values
        if name in GLOBAL_NAMES:
            yield GLOBAL_NAMES[name], transform(name, values, config, variant)
    if config.model_type == "gemma4_text":
        yield "rope_freqs.weight", rope_factors(config)
        for layer, each in enumerate(model.model.layers):
            yield f"blk.{layer}.layer_output_scale.weight", each.layer_scalar.numpy()
    for layer in range(config.num_hidden_layers):
        yield from block_tensors(model, layer, layer, variant)
    if variant.mtp_block:
        # Random checkpoints have none; the last layer again, with its own projections, has the right shapes.
        last = config.num_hidden_layers
        yield from block_tensors(model, last - 1, last, variant)
        if config.model_type == "qwen4_exp_text":
            for name, values in stream_nextn(config).items():
                yield f"blk.{last}.nextn.{name}.weight", values
            return
        hidden = config.hidden_size
        for name, shape in {"eh_proj": (hidden, 2 * hidden), "enorm": hidden, "hnorm": hidden}.items():
            yield f"blk.{last}.nextn.{name}.weight", np.ones(shape, np.float32)
        yield f"blk.{last}.nextn.shared_head_norm.weight", np.ones(hidden, np.float32)


def stream_nextn(config) -> dict[str, np.ndarray]:
    """Random tensors of an MTP block beside its layer, where there are several residual streams."""
    rng, width = np.random.default_rng(11), config.hc_count * config.hidden_size
    shapes = {
        "eh_proj": (config.hidden_size, 2 * config.hidden_size),
        "hc_head_down": (config.hc_lowrank, width),
        "hc_head_up": (width, config.hc_lowrank),
    }
    tensors = {name: 1.5 * rng.normal(size=shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name, size in (("enorm", config.hidden_size), ("hnorm", width), ("hc_head_norm", width)):
        tensors[name] = 1 + rng.normal(size=size) / 5
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def block_tensors(model: PreTrainedModel, source: int, block: int, variant: Variant) -> Tensors:
    """The tensors of layer `source`, as block `block` of the file."""
    prefix = f"model.layers.{source}."
    tensors = {
        COMMON_NAMES[name.removeprefix(prefix)]: transform(
            name.removeprefix(prefix), parameter.detach().numpy(), model.config, variant
        )
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and not name.endswith("ngram_embedding.weight")
    }
    if model.config.model_type == "gpt_oss":
        tensors = with_rows_of_experts(tensors)
    if model.config.model_type in OF_LLAMA:
        tensors["ffn_norm.weight"] = tensors.pop("post_attention_norm.weight")
    if "ffn_gate_up_exps.weight" in tensors and not variant.fused_experts:
        gate, up = np.split(tensors.pop("ffn_gate_up_exps.weight"), 2, axis=1)
        tensors |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if "attn_q.weight" in tensors and variant.fused_qkv:
        tensors["attn_qkv.weight"] = np.concatenate([tensors.pop(f"attn_{part}.weight") for part in "qkv"])
    if "ffn_gate_inp_shexp.weight" in tensors and not variant.shared_gate_as_matrix:
        tensors["ffn_gate_inp_shexp.weight"] = tensors["ffn_gate_inp_shexp.weight"].reshape(-1)
    if "ssm_in.weight" in tensors and not variant.ssm_in:
        tensors |= apart(tensors.pop("ssm_in.weight"), model.config)
    if "indexer.qk_proj.weight" in tensors:
        rows = model.config.indexer_n_heads * model.config.indexer_head_dim
        query, key = np.split(tensors.pop("indexer.qk_proj.weight"), [rows])
        tensors |= {"indexer.q_proj.weight": query, "indexer.k_proj.weight": key}
    if "ssm_dt.bias" in tensors and variant.ollama:
        tensors["ssm_dt"] = tensors.pop("ssm_dt.bias")
    for name, values in tensors.items():
        yield f"blk.{block}.{name}", values


def with_rows_of_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of gpt-oss, whose checkpoint has them transposed, and gate and up column by column in turn."""
    fused = tensors.pop("ffn_gate_up_exps.weight").swapaxes(1, 2)
    biases = tensors.pop("ffn_gate_up_exps.bias")
    down = tensors.pop("ffn_down_exps.weight").swapaxes(1, 2)
    return tensors | {
        "ffn_gate_exps.weight": fused[:, ::2],
        "ffn_up_exps.weight": fused[:, 1::2],
        "ffn_gate_exps.bias": biases[:, ::2],
        "ffn_up_exps.bias": biases[:, 1::2],
        "ffn_down_exps.weight": down,
    }


def transform(name: str, values: np.ndarray, config, variant: Variant) -> np.ndarray:
    """A tensor of the checkpoint in GGUF's conventions."""
    part = name.removeprefix("linear_attn.")
    if part == "ple.conv1d.weight":
        return values.squeeze(1)
    if part == name:
        return values + 1 if "norm" in name and config.model_type not in PLAIN_NORMS else values
    if part == "A_log":
        values = -np.exp(values)
    elif part == "conv1d.weight":
        values = values.squeeze(1)
    if variant.ollama or part == "norm.weight" or config.model_type == "qwen3_next":
        return values
    head_dim = config.linear_value_head_dim
    heads = (config.linear_num_key_heads, config.linear_num_value_heads)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * heads[0] * config.linear_key_head_dim
        return np.concatenate((values[:keys], tile_heads(values[keys:], heads, head_dim, axis=0)))
    if part == "out_proj.weight":
        return tile_heads(values, heads, head_dim, axis=1)
    return tile_heads(values, heads, head_dim if part == "in_proj_z.weight" else 1, axis=0)


def apart(qkvz: np.ndarray, config) -> dict[str, np.ndarray]:
    """`attn_qkv` and `attn_gate` of rows that lie key head by key head: query, key, values and gates."""
    num_heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // num_heads * config.linear_value_head_dim
    by_head = qkvz.reshape(num_heads, -1, qkvz.shape[-1])
    parts = np.split(by_head, (size, 2 * size, 2 * size + values), axis=1)
    *qkv, gate = (part.reshape(-1, qkvz.shape[-1]) for part in parts)
    return {"attn_qkv.weight": np.concatenate(qkv), "attn_gate.weight": gate}


def tile_heads(values: np.ndarray, heads: tuple[int, int], size: int, axis: int) -> np.ndarray:
    """Value heads of `size` entries along `axis` from grouped (k·r + j) to tiled (j·NK + k) order."""
    num_key_heads, num_value_heads = heads
    per_key_head = num_value_heads // num_key_heads
    order = [k * per_key_head + j for j in range(per_key_head) for k in range(num_key_heads)]
    shape = (*values.shape[:axis], num_value_heads, size, *values.shape[axis + 1 :])
    return values.reshape(shape).take(order, axis=axis).reshape(values.shape)


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, variant: Variant) -> None:
    quant_type = tensor_type(name, values, variant)
    values = np.ascontiguousarray(values, np.float32)
    if quant_type == F32:
        writer.add_tensor(name, values)
    elif quant_type in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        writer.add_tensor(name, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
    else:
        writer.add_tensor(name, llama_cpp.quantize(values, int(quant_type)), raw_dtype=quant_type)


def tensor_type(name: str, values: np.ndarray, variant: Variant) -> GGMLQuantizationType:
    stem = name.removesuffix(".weight").split(".")[-1]
    if name.endswith(".bias"):
        return F32
    if values.ndim == 1 and stem not in variant.types:
        return F32
    default = F32 if name.endswith(SMALL_WEIGHTS) else variant.types.get("", F32)
    return variant.types.get(stem, default)
