"""Complete tiny models with random weights, written as GGUF files for tests.

    paths = write_gguf(tmp_path / "tiny.gguf")  # MoE, Q8_0, 4 layers, hidden 256
    paths = write_gguf(path, "qwen35", quant="Q4_K", types={"*.ffn_down.weight": "Q6_K"}, tied=True)
    paths = write_gguf(path, num_shards=3, nextn=True, fused_experts=True, dims=Dims(layers=8, experts=32))

The files carry a byte-level tokenizer with a few merges and a ChatML template, and load in llama.cpp. To test
what a damaged or unusual file does, change the model between the two steps:

    model = make_model("qwen35moe", quant="F32")
    del model.tensors["blk.0.ssm_a"]
    model.metadata["qwen35moe.expert_used_count"] = 99
    write_model(path, model)

`model.tensors` holds float32 arrays in numpy order. F32, F16, BF16 and the types with blocks of 32 encode
those values; the types that the `gguf` package can't encode get random blocks of the same standard deviation,
so read the weights back from the file where their values matter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import gguf
from coldstream.gguf.quant_types import QuantType
from tensor_encoding import encode

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = {  # token → type: 3 is control, 4 is user-defined
    "<|endoftext|>": 3,
    "<|im_start|>": 3,
    "<|im_end|>": 3,
    "<think>": 4,
    "</think>": 4,
    "<tool_call>": 4,
    "</tool_call>": 4,
}
MERGES = (
    "Ġ t", "h e", "i n", "r e", "o n", "e r", "n d", "Ġt he", "in g", "Ġ d", "e f", "Ġd ef", "re t",
    "a n", "an d",
)  # fmt: skip


@dataclass(frozen=True)
class Dims:
    """Sizes of a tiny model. The defaults make every matrix row a whole number of 256-element blocks."""

    layers: int = 4  # of the trunk
    interval: int = 4  # layer i attends where (i + 1) % interval == 0, and is a gated DeltaNet elsewhere
    hidden: int = 256
    vocab: int = 320
    context: int = 4096
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_dims: int = 16
    key_heads: int = 2
    value_heads: int = 4
    state: int = 64
    conv_kernel: int = 4
    ffn: int = 512
    experts: int = 8
    experts_used: int = 2
    expert_ffn: int = 256
    shared_ffn: int = 256
    streams: int = 4  # of qwen4exp, as all below
    stream_rank: int = 96
    indexer_heads: int = 2
    indexer_dim: int = 32
    top_k: int = 2048
    ngram_sizes: tuple[int, ...] = (97, 101, 103, 107)  # rows of two heads of pairs, and of two of triples
    ngram_columns: int = 64


@dataclass(frozen=True)
class MixedAttention:
    """Layers that differ in query heads, in windows, and in the rotary embedding of those with a window."""

    head_counts: tuple[int, ...] = (4, 8, 4, 8)
    windowed: tuple[bool, ...] = (False, True, False, True)
    window: int = 5
    rope_dims: int = 32  # of layers with a window

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "attention.head_count": list(self.head_counts),
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": list(self.windowed),
            "rope.dimension_count_swa": self.rope_dims,
            "rope.freq_base_swa": 1e4,
        }


# Two layers of different kinds, for steps on an emulated GPU, whose time is mostly that of weights.
SMALL_EXPERTS = Dims(layers=2, interval=2, hidden=128, expert_ffn=64, shared_ffn=64)
# A model of some 100 KB (without tokenizer) for tests of the format alone: F32, or types with blocks of 32.
SMALL = Dims(
    hidden=32, vocab=16, heads=4, kv_heads=2, head_dim=8, rope_dims=4, key_heads=2, value_heads=4, state=8,
    ffn=64, experts=4, experts_used=2, expert_ffn=32, shared_ffn=64, stream_rank=16, indexer_dim=8,
    ngram_columns=8,
)  # fmt: skip


@dataclass
class TinyModel:
    """The contents of a file; may be changed before `write_model`."""

    arch: str
    metadata: dict[str, Any]  # bool, int (written as uint32), float (float32), str, lists of one of them
    tensors: dict[str, np.ndarray]  # float32
    types: dict[str, str] = field(default_factory=dict)  # tensor name → type name, F32 unless given


def write_gguf(path: Path, arch: str = "qwen35moe", *, num_shards: int = 1, **options: Any) -> list[Path]:
    """`make_model(arch, **options)` written to `path`; returns the paths of the parts."""
    if num_shards > 1:
        return write_model(path, make_model(arch, **options), num_shards)
    types = tuple((options.pop("types", None) or {}).items())
    path.write_bytes(_contents(arch, types, tuple(options.items())))
    return [path]


@lru_cache(maxsize=8)
def _contents(arch: str, types: tuple[tuple[str, str], ...], options: tuple[tuple[str, Any], ...]) -> bytes:
    """A file of `make_model`, kept as most tests want one of a few: making one takes 0.4 s."""
    with TemporaryDirectory() as folder:
        (path,) = write_model(
            Path(folder) / "model.gguf", make_model(arch, types=dict(types), **dict(options))
        )
        return path.read_bytes()


def make_model(
    arch: str = "qwen35moe",
    *,
    dims: Dims = Dims(),
    quant: str = "Q8_0",
    types: Mapping[str, str] | None = None,
    nextn: bool = False,
    fused_experts: bool = False,
    fused_attention: bool = False,
    ssm_in: bool = False,
    mixed: MixedAttention | None = None,
    tied: bool = False,
    tokenizer: bool = True,
    seed: int = 0,
    dense_layers: Collection[int] = (),
    plain_shared: bool = False,
    element_gates: bool = False,
    expert_biases: bool = False,
    ngrams: bool = False,
) -> TinyModel:
    """A model of `arch` ("qwen35", "qwen35moe", "qwen3next", "qwen3moe", "qwen4exp", "laguna", "gpt-oss" or
    "gemma4").

    quant            type of all matrices but the router, the convolution and the shared expert's gate (F32)
    types            overrides by pattern of tensor name, {"*_exps.weight": "Q4_K"}; the last match counts
    nextn            adds an MTP block behind the trunk
    fused_experts    `ffn_gate_up_exps` instead of `ffn_gate_exps` and `ffn_up_exps`
    fused_attention  `attn_qkv` instead of `attn_q`, `attn_k`, `attn_v` in attention layers
    ssm_in           of qwen3next: one `ssm_in` instead of `attn_qkv` and `attn_gate` in DeltaNet layers
    mixed            of qwen3moe and laguna: how the attention of its layers differs
    element_gates    of laguna: a gate for each element of a head, and not one for the head
    tied             no `output.weight`; always of gemma4
    dense_layers     layers without experts; for families that have some
    plain_shared     a shared expert without a gate, whatever the family has
    expert_biases    of the three matrices of routed experts
    ngrams           of qwen4exp: an n-gram embedding before the second layer
    tokenizer        False leaves out all tokenizer keys, and allows any dims.vocab

    A matrix whose rows are not whole blocks of its type becomes Q8_0 or F16.
    """
    rng = np.random.default_rng(seed)
    metadata = _hyperparameters(arch, dims, nextn)
    head_counts: Sequence[int] = [dims.heads] * (dims.layers + nextn)
    is_laguna = arch == "laguna"
    if is_laguna:
        mixed = mixed or laguna_attention(dims)
        dense_layers, plain_shared = {0}, True
    if mixed is not None:
        head_counts = mixed.head_counts
        metadata |= {f"{arch}.{key}": value for key, value in mixed.keys.items()}
    # With DeltaNet layers, and then gates of attention and a shared expert.
    is_hybrid = arch not in ("qwen3moe", "laguna", "gpt-oss", "gemma4")
    if tokenizer:
        metadata |= tokenizer_metadata(dims.vocab)
    tensors: dict[str, np.ndarray] = {"token_embd.weight": rng.normal(0, 1, (dims.vocab, dims.hidden))}
    for block in range(dims.layers + nextn):
        is_trunk = block < dims.layers
        recurrent = is_hybrid and is_trunk and (block + 1) % dims.interval != 0
        if arch == "qwen4exp":
            parts = _streams(rng, dims, "hc_attn") | _streams(rng, dims, "hc_ffn")
            parts |= {} if recurrent else _indexer(rng, dims)
        else:
            parts = _norm(rng, dims.hidden, "attn_norm", "post_attention_norm" if is_hybrid else "ffn_norm")
        own = replace(dims, heads=head_counts[block])
        if arch == "gemma4":
            own = gemma4_heads(dims, block)
        parts |= _delta_net(rng, dims) if recurrent else _attention(rng, own, fused_attention, is_hybrid)
        if recurrent and arch == "qwen3next":
            parts = _by_key_head(parts, dims, ssm_in)
        if arch == "qwen35" or block in dense_layers:
            parts |= _dense(rng, dims)
        else:
            parts |= _experts(rng, dims, fused_experts, is_hybrid or plain_shared)
            if plain_shared:
                del parts["ffn_gate_inp_shexp.weight"]
            if expert_biases:
                parts |= _expert_biases(rng, dims)
            if is_laguna:
                parts["exp_probs_b.bias"] = rng.normal(0, 0.3, dims.experts)
        if is_laguna:
            gates = own.heads * (dims.head_dim if element_gates else 1)
            parts["attn_gate.weight"] = _matrix(rng, gates, dims.hidden)
        if arch == "gpt-oss":
            parts = _as_gpt_oss(rng, dims, parts)
        if arch == "gemma4":
            parts = _as_gemma4(rng, dims, parts, keeps_values=is_windowed(block))
        parts |= {} if is_trunk else _nextn(rng, dims, arch)
        tensors |= {f"blk.{block}.{name}": values for name, values in parts.items()}
    if ngrams:
        metadata |= {f"{arch}.{name}": value for name, value in _ngram_keys(dims).items()}
        tensors |= _ngrams(rng, dims)
    if arch == "qwen4exp":
        tensors |= _mixture(rng, dims, "output_hc")
    else:
        tensors |= _norm(rng, dims.hidden, "output_norm")
    if arch == "gemma4":
        turning = np.arange(dims.head_dim) < dims.head_dim // 4
        tensors["rope_freqs.weight"] = np.where(turning, 1.0, 1e30)
        tensors["token_embd.weight"] *= 0.1  # the head is tied to them
    elif not tied:
        tensors["output.weight"] = 4 * _matrix(rng, dims.vocab, dims.hidden)
    tensors = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}
    return TinyModel(arch, metadata, tensors, _choose_types(tensors, quant, types or {}))


def write_model(path: Path, model: TinyModel, num_shards: int = 1) -> list[Path]:
    """Writes `model` to `path`, or in `num_shards` parts named after it; returns their paths."""
    per_shard = -(-len(model.tensors) // num_shards)
    writer = gguf.GGUFWriter(path, model.arch, split_max_tensors=per_shard if num_shards > 1 else 0)
    for key, value in model.metadata.items():
        _add_value(writer, key, value)
    rng = np.random.default_rng(len(model.tensors))
    for name, values in model.tensors.items():
        kind = QuantType[model.types.get(name, "F32")]
        # Signed bytes with a shape: the writer would look up the geometry of unsigned ones, and not know all.
        blocks = encode(values, kind.name, rng).view(np.int8)
        writer.add_tensor(name, blocks, raw_shape=values.shape, raw_dtype=kind)
    paths: list[Path] = writer.format_shard_names(path) if num_shards > 1 else [path]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return paths


def read_model(path: Path) -> TinyModel:
    """The contents of a file of float32 tensors."""
    reader = gguf.GGUFReader(path)
    fields = {name: each.contents() for name, each in reader.fields.items() if "." in name}
    arch = fields.pop("general.architecture")
    tensors = {each.name: each.data.copy() for each in reader.tensors}
    return TinyModel(arch, {name: value for name, value in fields.items() if value is not None}, tensors)


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """Keys of a byte-level BPE tokenizer of `vocab_size` (280 or more) tokens; the rest is padding."""
    tokens = [*_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [1] * len(tokens) + list(SPECIAL_TOKENS.values())
    tokens += SPECIAL_TOKENS
    padding = vocab_size - len(tokens)
    assert padding >= 0, (
        f"a vocabulary of {vocab_size} is smaller than the {len(tokens)} tokens that it must hold"
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _byte_alphabet() -> list[str]:
    """The printable stand-ins for bytes 0 … 255 in byte-level BPE, in the order of GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(0x100 + i) for i in range(others)]


def _hyperparameters(arch: str, dims: Dims, nextn: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": dims.layers + nextn,
        "context_length": dims.context,
        "embedding_length": dims.hidden,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": dims.rope_dims,
        "rope.dimension_sections": [(dims.rope_dims // 2 + more) // 3 for more in (2, 1, 0)] + [0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": dims.conv_kernel,
        "ssm.state_size": dims.state,
        "ssm.group_count": dims.key_heads,
        "ssm.time_step_rank": dims.value_heads,
        "ssm.inner_size": dims.value_heads * dims.state,
        "full_attention_interval": dims.interval,
    }
    if nextn:
        values["nextn_predict_layers"] = 1
    if arch in ("qwen3next", "qwen3moe"):
        del values["rope.dimension_sections"]
    if arch == "qwen4exp":
        kinds = [(layer + 1) % dims.interval != 0 for layer in range(dims.layers)] + [True] * nextn
        values |= {
            "hyper_connection.count": dims.streams,
            "hyper_connection.low_rank": dims.stream_rank,
            "attention.indexer.head_count": dims.indexer_heads,
            "attention.indexer.key_length": dims.indexer_dim,
            "attention.indexer.top_k": dims.top_k,
            "attention.compress_ratios": [0 if recurrent else 4 for recurrent in kinds],
        }
    if arch != "qwen35":
        values |= {
            "expert_count": dims.experts,
            "expert_used_count": dims.experts_used,
            "expert_feed_forward_length": dims.expert_ffn,
            "expert_shared_feed_forward_length": dims.shared_ffn,
        }
    else:
        values["feed_forward_length"] = dims.ffn
    if arch == "laguna":
        values |= _laguna_hyperparameters(dims)
        others = ("ssm.", "full_attention_interval", "rope.dimension_sections")
        values = {name: value for name, value in values.items() if not name.startswith(others)}
    if arch == "gpt-oss":
        values |= _gpt_oss_hyperparameters(dims)
        others = ("ssm.", "full_attention_interval", "rope.dimension_", "expert_shared_")
        values = {name: value for name, value in values.items() if not name.startswith(others)}
    if arch == "gemma4":
        values |= _gemma4_hyperparameters(dims)
        others = ("ssm.", "full_attention_interval", "rope.dimension_sections", "expert_shared_")
        values = {name: value for name, value in values.items() if not name.startswith(others)}
    if arch == "qwen3moe":
        others = ("ssm.", "full_attention_interval", "rope.dimension_count", "expert_shared_")
        values = {name: value for name, value in values.items() if not name.startswith(others)}
    return {f"{arch}.{name}": value for name, value in values.items()}


def _laguna_hyperparameters(dims: Dims) -> dict[str, Any]:
    """Beside those of attention that differ by layer."""
    return {
        "feed_forward_length": dims.ffn,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "rope.freq_base": 5e5,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
    }


def _gpt_oss_hyperparameters(dims: Dims) -> dict[str, Any]:
    """The first of two layers has a window, which no key says."""
    return {
        "feed_forward_length": dims.expert_ffn,
        "attention.sliding_window": 5,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
    }


def _gemma4_hyperparameters(dims: Dims) -> dict[str, Any]:
    """Every second layer has no window, and heads of twice the size."""
    windowed = [is_windowed(layer) for layer in range(dims.layers)]
    return {
        "feed_forward_length": dims.shared_ffn,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 4.0,
        "attention.head_count_kv": [gemma4_heads(dims, layer).kv_heads for layer in range(dims.layers)],
        "attention.key_length": 2 * dims.head_dim,
        "attention.value_length": 2 * dims.head_dim,
        "attention.key_length_swa": dims.head_dim,
        "attention.value_length_swa": dims.head_dim,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": 5,
        "attention.sliding_window_pattern": windowed,
        "rope.dimension_count": 2 * dims.head_dim,
        "rope.dimension_count_swa": dims.head_dim,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }


def is_windowed(layer: int) -> bool:
    """Whether a layer of gemma4 has a window."""
    return layer % 2 == 0


def gemma4_heads(dims: Dims, layer: int) -> Dims:
    """With the heads of a layer."""
    if is_windowed(layer):
        return dims
    return replace(dims, head_dim=2 * dims.head_dim, kv_heads=max(1, dims.kv_heads // 2))


def laguna_attention(dims: Dims) -> MixedAttention:
    """The first layer of four sees all positions; the others have twice the heads, and a window."""
    windowed = tuple(layer % 4 != 0 for layer in range(dims.layers))
    return MixedAttention(
        tuple(dims.heads * (1 + flag) for flag in windowed), windowed, rope_dims=dims.head_dim
    )


def _choose_types(
    tensors: Mapping[str, np.ndarray], quant: str, overrides: Mapping[str, str]
) -> dict[str, str]:
    kept_float = (
        "*_norm.weight",
        "*norm.weight",
        "*conv1d.weight",
        "*ffn_gate_inp.weight",
        "*_inp_shexp.weight",
        "*.bias",
    )
    chosen: dict[str, str] = {}
    for name, values in tensors.items():
        is_matrix = values.ndim > 1 and not any(fnmatchcase(name, pattern) for pattern in kept_float)
        matching = [type_name for pattern, type_name in overrides.items() if fnmatchcase(name, pattern)]
        chosen[name] = matching[-1] if matching else quant if is_matrix else "F32"
        if values.shape[-1] % QuantType[chosen[name]].block_elements:
            chosen[name] = "F16" if values.shape[-1] % 32 else "Q8_0"
    return chosen


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, shape[-1] ** -0.5, shape)


def _norm(rng: np.random.Generator, size: int, *names: str) -> dict[str, np.ndarray]:
    return {f"{name}.weight": rng.normal(1, 0.1, size) for name in names}


def _attention(rng: np.random.Generator, dims: Dims, fused: bool, gated: bool) -> dict[str, np.ndarray]:
    width, kv_width = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    qkv = [_matrix(rng, rows, dims.hidden) for rows in ((1 + gated) * width, kv_width, kv_width)]
    split = {f"attn_{name}.weight": rows for name, rows in zip("qkv", qkv, strict=True)}
    return {
        **({"attn_qkv.weight": np.concatenate(qkv)} if fused else split),
        "attn_output.weight": _matrix(rng, dims.hidden, width),
        **_norm(rng, dims.head_dim, "attn_q_norm", "attn_k_norm"),
    }


def _ngram_keys(dims: Dims) -> dict[str, Any]:
    return {
        "ple.layers": [1],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 5,
        "ple.layer_multipliers": [2**30 + 3, 2**29 + 7, 2**28 + 11],
        "ple.head_offsets": [sum(dims.ngram_sizes[:head]) for head in range(4)],
        "ple.head_vocab_sizes": list(dims.ngram_sizes),
        "embedding_length_per_layer_input": dims.ngram_columns,
    }


def _ngrams(rng: np.random.Generator, dims: Dims) -> dict[str, np.ndarray]:
    width, embedded = dims.streams * dims.hidden, 4 * dims.ngram_columns
    return {
        "per_layer_token_embd.weight": rng.normal(0, 1, (sum(dims.ngram_sizes) + 8, dims.ngram_columns)),
        "blk.1.ple_key.weight": _matrix(rng, width, embedded),
        "blk.1.ple_value.weight": _matrix(rng, dims.hidden, embedded),
        **_norm(rng, width, *(f"blk.1.ple_norm_{part}" for part in ("key", "query", "conv"))),
        "blk.1.ple_conv1d.weight": rng.normal(0, 0.5, (width, 4)),
    }


def _mixture(rng: np.random.Generator, dims: Dims, part: str) -> dict[str, np.ndarray]:
    width = dims.streams * dims.hidden
    return {
        **_norm(rng, width, f"{part}_norm"),
        f"{part}_down.weight": 3 * _matrix(rng, dims.stream_rank, width),
        f"{part}_up.weight": 3 * _matrix(rng, width, dims.stream_rank),
    }


def _streams(rng: np.random.Generator, dims: Dims, part: str) -> dict[str, np.ndarray]:
    inject = 4 * _matrix(rng, dims.streams, dims.streams * dims.hidden)
    return _mixture(rng, dims, part) | {f"{part}_inject.weight": inject}


def _indexer(rng: np.random.Generator, dims: Dims) -> dict[str, np.ndarray]:
    return {
        "indexer.q_proj.weight": _matrix(rng, dims.indexer_heads * dims.indexer_dim, dims.hidden),
        "indexer.k_proj.weight": _matrix(rng, dims.indexer_dim, dims.hidden),
        **_norm(rng, dims.indexer_dim, "indexer.q_norm", "indexer.k_norm"),
    }


def _delta_net(rng: np.random.Generator, dims: Dims) -> dict[str, np.ndarray]:
    value_dim = dims.value_heads * dims.state
    conv_dim = 2 * dims.key_heads * dims.state + value_dim
    return {
        "attn_qkv.weight": _matrix(rng, conv_dim, dims.hidden),
        "attn_gate.weight": _matrix(rng, value_dim, dims.hidden),
        "ssm_alpha.weight": _matrix(rng, dims.value_heads, dims.hidden),
        "ssm_beta.weight": _matrix(rng, dims.value_heads, dims.hidden),
        "ssm_a": -np.exp(rng.uniform(0, 2.5, dims.value_heads)),
        "ssm_dt.bias": rng.uniform(-4, -1, dims.value_heads),
        "ssm_conv1d.weight": rng.normal(0, 0.5, (conv_dim, dims.conv_kernel)),
        **_norm(rng, dims.state, "ssm_norm"),
        "ssm_out.weight": _matrix(rng, dims.hidden, value_dim),
    }


def _by_key_head(parts: dict[str, np.ndarray], dims: Dims, ssm_in: bool) -> dict[str, np.ndarray]:
    """DeltaNet projections as `qwen3next` has them: the rows of a key head together. Value heads grouped."""

    def together(*names: str) -> np.ndarray:
        by_head = [parts.pop(name).reshape(dims.key_heads, -1, dims.hidden) for name in names]
        return np.concatenate(by_head, axis=1).reshape(-1, dims.hidden)

    parts = dict(parts)
    parts["ssm_ba.weight"] = together("ssm_beta.weight", "ssm_alpha.weight")
    if ssm_in:
        keys = dims.key_heads * dims.state
        qkv = np.split(parts.pop("attn_qkv.weight"), (keys, 2 * keys))
        parts |= dict(zip("qkv", qkv, strict=True))
        parts["ssm_in.weight"] = together(*"qkv", "attn_gate.weight")
    return parts


def _dense(rng: np.random.Generator, dims: Dims) -> dict[str, np.ndarray]:
    return {
        "ffn_gate.weight": _matrix(rng, dims.ffn, dims.hidden),
        "ffn_up.weight": _matrix(rng, dims.ffn, dims.hidden),
        "ffn_down.weight": _matrix(rng, dims.hidden, dims.ffn),
    }


def _experts(rng: np.random.Generator, dims: Dims, fused: bool, shared: bool) -> dict[str, np.ndarray]:
    gate = _matrix(rng, dims.experts, dims.expert_ffn, dims.hidden)
    up = _matrix(rng, dims.experts, dims.expert_ffn, dims.hidden)
    split = {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    routed = {
        **({"ffn_gate_up_exps.weight": np.concatenate([gate, up], axis=1)} if fused else split),
        "ffn_down_exps.weight": _matrix(rng, dims.experts, dims.hidden, dims.expert_ffn),
        "ffn_gate_inp.weight": 4 * _matrix(rng, dims.experts, dims.hidden),
    }
    if not shared:
        return routed
    return routed | {
        "ffn_gate_inp_shexp.weight": _matrix(rng, dims.hidden),
        "ffn_gate_shexp.weight": _matrix(rng, dims.shared_ffn, dims.hidden),
        "ffn_up_shexp.weight": _matrix(rng, dims.shared_ffn, dims.hidden),
        "ffn_down_shexp.weight": _matrix(rng, dims.hidden, dims.shared_ffn),
    }


def _as_gpt_oss(rng: np.random.Generator, dims: Dims, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A block of `parts` with biases and sinks, without norms of queries and keys."""
    kept = {
        name: values for name, values in parts.items() if name[5:] not in ("q_norm.weight", "k_norm.weight")
    }
    kept["post_attention_norm.weight"] = kept.pop("ffn_norm.weight")
    width, kv_width = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    biases = {
        "attn_q.bias": width,
        "attn_k.bias": kv_width,
        "attn_v.bias": kv_width,
        "attn_output.bias": dims.hidden,
        "ffn_gate_inp.bias": dims.experts,
    }
    vectors = {name: rng.normal(0, 0.3, size) for name, size in biases.items()}
    return kept | vectors | _expert_biases(rng, dims) | {"attn_sinks.weight": rng.normal(1, 2, dims.heads)}


def _as_gemma4(
    rng: np.random.Generator, dims: Dims, parts: dict[str, np.ndarray], *, keeps_values: bool
) -> dict[str, np.ndarray]:
    """A block of `parts` with norms of outputs and a dense network beside the experts."""
    dense = _dense(rng, replace(dims, ffn=dims.shared_ffn))
    names = "post_attention_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "post_ffw_norm"
    kept = {name: values for name, values in parts.items() if keeps_values or name != "attn_v.weight"}
    kept["attn_q_norm.weight"] *= 0.12  # scores are not divided by the root of the heads' size
    return {
        **kept,
        **dense,
        **_norm(rng, dims.hidden, *names),
        "ffn_gate_inp.scale": rng.normal(1, 0.2, dims.hidden) * dims.hidden**0.5,
        "ffn_down_exps.scale": rng.normal(1, 0.2, dims.experts),
        "layer_output_scale.weight": rng.uniform(0.6, 1.2, 1),
    }


def _expert_biases(rng: np.random.Generator, dims: Dims) -> dict[str, np.ndarray]:
    sizes = {"gate": dims.expert_ffn, "up": dims.expert_ffn, "down": dims.hidden}
    return {f"ffn_{name}_exps.bias": rng.normal(0, 1, (dims.experts, size)) for name, size in sizes.items()}


def _nextn(rng: np.random.Generator, dims: Dims, arch: str) -> dict[str, np.ndarray]:
    tensors = {
        "nextn.eh_proj.weight": _matrix(rng, dims.hidden, 2 * dims.hidden),
        **_norm(rng, dims.hidden, "nextn.enorm"),
    }
    if arch != "qwen4exp":
        return tensors | _norm(rng, dims.hidden, "nextn.hnorm", "nextn.shared_head_norm")
    return (
        tensors | _norm(rng, dims.streams * dims.hidden, "nextn.hnorm") | _mixture(rng, dims, "nextn.hc_head")
    )


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}: {type(value)} is none of the types of TinyModel.metadata")
