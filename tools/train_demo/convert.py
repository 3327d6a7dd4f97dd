"""Trained weights to one GGUF file: names, types and metadata.

The model is trained in GGUF's conventions, so a tensor is renamed, given a type and written. Block formats
come from llama.cpp's own quantiser.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

import gguf
from tools.llama_cpp import quantize
from tools.train_demo.checkpoint import load_checkpoint
from tools.train_demo.file_types import stored_type
from tools.train_demo.model import EPS, DemoConfig
from tools.train_demo.tokenizer import CONTROL_TOKENS, END_OF_TEXT, load_tokenizer, merges_of

GGMLType = gguf.GGMLQuantizationType
MAX_FILE_BYTES = 32_000_000

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor under its GGUF name, float32, and its name in the model's state dict."""

    name: str
    values: np.ndarray
    source: str


def _block_tensors(source: str, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """GGUF's (suffix, values) for the tensor `name` of one block."""
    part = name.removeprefix("mixer.").removeprefix("ffn.")
    if part == "ssm_a_log":
        yield "ssm_a", -value.exp()
    elif part == "ssm_dt":
        yield "ssm_dt.bias", value
    elif part == "ffn_gate_up_exps":
        gate, up = value.chunk(2, dim=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif part == "ffn_gate_inp_shexp.weight":
        yield part, value.flatten()
    else:
        yield part if part.endswith(".weight") else f"{part}.weight", value


def gguf_tensors(state: Mapping[str, Tensor], config: DemoConfig) -> list[NamedTensor]:
    """Every tensor of the file, renamed, float32 and contiguous, in the state dict's order."""
    out: list[NamedTensor] = []
    nextn = f"blk.{config.num_layers}."

    def add(name: str, value: Tensor, source: str) -> None:
        out.append(NamedTensor(name, value.detach().float().contiguous().numpy(), source))

    for source, value in state.items():
        if source.startswith("blk."):
            _, index, rest = source.split(".", 2)
            for suffix, part in _block_tensors(source, rest, value):
                add(f"blk.{index}.{suffix}", part, source)
        elif source.startswith("nextn_block."):
            for suffix, part in _block_tensors(source, source.removeprefix("nextn_block."), value):
                add(nextn + suffix, part, source)
        elif source.startswith("nextn_"):
            add(f"{nextn}nextn.{source.removeprefix('nextn_')}", value, source)
        else:
            add(source, value, source)
    return out


def _write_model_metadata(writer: gguf.GGUFWriter, config: DemoConfig) -> None:
    arch = "qwen35moe"
    writer.add_block_count(config.num_layers + 1)
    writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(config.rope_dims)
    # Pairs are dealt in turn to the three position kinds; one beyond its kind's count would stay unrotated.
    pairs = config.rope_dims // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.expert_ffn_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_ffn_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.num_key_heads)
    writer.add_ssm_time_step_rank(config.num_value_heads)
    writer.add_ssm_inner_size(config.num_value_heads * config.ssm_state_size)
    writer.add_uint32(f"{arch}.full_attention_interval", config.full_attention_interval)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_eos_token_id(vocab[END_OF_TEXT])
    writer.add_pad_token_id(vocab[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    path: Path,
    state: Mapping[str, Tensor],
    config: DemoConfig,
    tokenizer: Tokenizer,
    quantised: bool = True,
) -> int:
    """Write the model to `path` and return the file's bytes.

    `quantised=False` stores everything as F32 (for comparisons). ValueError if a quantised file exceeds the
    limit.
    """
    writer = gguf.GGUFWriter(str(path), "qwen35moe")
    writer.add_name("coldstream demo")
    writer.add_description(
        "A small Qwen3.5-style mixture of experts that completes Python code, trained from scratch on the "
        "source of Python's standard library (PSF licence)."
    )
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation", "code", "python"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_model_metadata(writer, config)
    _write_tokenizer(writer, tokenizer)
    for tensor in gguf_tensors(state, config):
        kind = GGMLType[stored_type(tensor.source)] if quantised else GGMLType.F32
        if kind == GGMLType.F32:
            writer.add_tensor(tensor.name, tensor.values)
        else:
            writer.add_tensor(tensor.name, quantize(tensor.values, int(kind)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    size = path.stat().st_size
    if quantised and size > MAX_FILE_BYTES:
        raise ValueError(
            f"{path} has {size} bytes, the limit is {MAX_FILE_BYTES}: shrink the experts or their types"
        )
    return size


def convert(work: Path, out: Path) -> None:
    """Write the model trained in `work` to `out`, by way of a temporary file beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    state = load_checkpoint(work / "weights")
    size = write_gguf(unfinished, state, DemoConfig(), load_tokenizer(work / "tokenizer.json"))
    unfinished.replace(out)
    print(f"{out}: {size} bytes")
