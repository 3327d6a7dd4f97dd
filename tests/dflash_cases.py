"""Tiny DFlash drafters with random weights: their numbers, and files of every kind that hold them.

The configurations are config.json contents. Weights come from numpy alone, so that what another program has
computed from them can be recorded; see `record_dflash.py`.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import gguf
from bench.random_drafter import add_value, metadata
from builders import Dims
from coldstream.kernels import _csrc
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.models.cpu.dflash import CpuDflash
from coldstream.models.dflash.config import spec_of_config
from coldstream.models.dflash.convert import convert
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import DflashSpec, is_matrix, tensor_shapes
from dflash_reference import DflashModel
from tensor_encoding import encode

VOCAB, WIDTH = 50, 64
ANCHOR = 3
CHUNKS = (20, 10, 7)  # rows that are committed between drafts
NUM_ROWS = 6  # of a block

SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
TINY: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "num_target_layers": 8,
    "block_size": 8,
    "max_position_embeddings": 262144,
    "dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": 49},
}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
# As gpt-oss has it, and its drafters: the first and the last dimension that are blended are no whole numbers.
GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
MIXED = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
ALL_SLIDING = MIXED | {"layer_types": ["sliding_attention"] * 3}


def config(second: bool = False, **changes: Any) -> dict[str, Any]:
    """`TINY` with other or further keys; of the second kind with `SECOND`."""
    values = deepcopy(TINY) | changes
    if second:
        values["architectures"] = ["DFlash2DraftModel"]
        values["dflash_config"] |= SECOND
    return values


# As Laguna's are published, with other sizes.
LAGUNA: dict[str, Any] = config(
    **ALL_SLIDING,
    architectures=["DFlashLagunaForCausalLM"],
    model_type="laguna",
    gating="per-head",
    draft_vocab_size=VOCAB,
    num_experts=0,
    num_target_layers=None,
    block_size=None,
    dflash_config={
        "target_layer_ids": [1, 3, 6], "mask_token_id": 49, "block_size": 8, "num_target_layers": 8,
        "causal": True,
    },
)  # fmt: skip
del LAGUNA["use_sliding_window"]
# As those of gpt-oss are published, with other sizes.
GPT_OSS: dict[str, Any] = config(
    attention_bias=True, rms_norm_eps=1e-5, rope_theta=150000, rope_scaling=GPT_OSS_YARN
)
# What drafters do differently; each is compared with other programs.
CASES: dict[str, dict[str, Any]] = {
    "full": config(),
    "yarn": config(rope_scaling=YARN),
    "mixed": config(**MIXED),
    "mixed, bidirectional": config(**MIXED, is_causal=False),
    "mixed, causal": config(**MIXED, is_causal=True),
    "second": config(True, **ALL_SLIDING, is_causal=False),
    "second, full": config(True, is_causal=False),
    # A window that is shorter than a block ends on both sides; in llama.cpp only on the left.
    "second, narrow": config(True, **ALL_SLIDING | {"sliding_window": 4}, is_causal=False),
    "gpt-oss": GPT_OSS,
    "second, biases": config(True, is_causal=False, attention_bias=True),
}


FULL, SLIDING = "full_attention", "sliding_attention"
_PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_target_layers": 40,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 10, 19, 28, 37], "mask_token_id": 48},
}
_JULY: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "use_sliding_window": True,
    "block_size": None,
}
_JULY_SECTION = {"target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37], "mask_token_id": 49}
# The published revisions of drafters, with their kinds, layers, ratios of heads, rotary embeddings, windows,
# blocks and numbers of layers; rows, windows and vocabularies are smaller.
REVISIONS: dict[str, dict[str, Any]] = {
    "35B, April preview": config(**_PUBLISHED | {"rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1}}),
    "35B, April": config(**_PUBLISHED | {"use_sliding_window": False, "layer_types": [FULL] * 8}),
    "35B, July": config(
        **_PUBLISHED
        | _JULY
        | {
            "layer_types": [SLIDING] * 5 + [FULL],
            "sliding_window": 20,
            "dflash_config": _JULY_SECTION | {"block_size": 16},
        }
    ),
    "35B, DFlash 2": config(
        **_PUBLISHED
        | _JULY
        | {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "layer_types": [SLIDING] * 6,
            "sliding_window": 12,
            "dflash_config": _JULY_SECTION | SECOND | {"block_size": 8},
        }
    ),
    "27B": config(
        **_PUBLISHED
        | {
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "num_target_layers": 64,
            "layer_types": [SLIDING] * 4 + [FULL],
            "sliding_window": 12,
            "dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 48},
        }
    ),
}


# The kinds that are published for models of a family, for `for_target`.
PUBLISHED_KINDS: dict[str, tuple[str, ...]] = {
    "qwen35moe": ("first", "second"),
    "qwen35": ("first", "second"),
    "qwen3next": ("first",),
    "qwen3moe": ("first",),
    "laguna": ("Laguna",),
    "gpt-oss": ("gpt-oss",),
    "gemma4": ("first",),
}


def for_target(kind: str, dims: Dims, target_layer_ids: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """A drafter of the "first", "second", "Laguna" or "gpt-oss" kind for a model of these sizes."""
    sizes: dict[str, Any] = {"hidden_size": dims.hidden, "vocab_size": dims.vocab}
    section = {"target_layer_ids": list(target_layer_ids), "mask_token_id": dims.vocab - 1}
    section["num_target_layers"] = dims.layers
    if kind == "Laguna":
        section["block_size"] = 8
        return LAGUNA | sizes | {"draft_vocab_size": dims.vocab, "dflash_config": section}
    if kind == "gpt-oss":
        return GPT_OSS | sizes | {"num_target_layers": dims.layers, "dflash_config": section}
    values = config(**MIXED, **sizes, num_target_layers=dims.layers) | {"dflash_config": section}
    if kind == "second":
        values["dflash_config"] |= SECOND
        values["architectures"] = ["DFlash2DraftModel"]
    return values


def spec_of(values: dict[str, Any]) -> DflashSpec:
    return spec_of_config(values, Path("config.json"))


def random_tensors(spec: DflashSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by the names of `tensor_shapes`."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        values = rng.normal(0, 1, shape)
        if name.endswith("norm.weight"):
            values = 1 + values / 10
        elif name.endswith(("_base", ".bias")):
            values /= 2
        elif "predecessor" not in name and "successor" not in name:
            values *= shape[-1] ** -0.5
        tensors[name] = values.astype(np.float32)
    return tensors


def target_tables(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An embedding and a head of a target: float32 [VOCAB, WIDTH] both."""
    rng = np.random.default_rng([seed, 1])
    embedding = rng.normal(0, 1, (VOCAB, WIDTH))
    return embedding.astype(np.float32), (3 * rng.normal(0, WIDTH**-0.5, (VOCAB, WIDTH))).astype(np.float32)


def features(spec: DflashSpec, num_rows: int, seed: int = 0) -> np.ndarray:
    """float32 [num_rows, feature_size]."""
    return np.random.default_rng([seed, 2]).normal(0, 1, (num_rows, spec.feature_size)).astype(np.float32)


def open_model(
    values: dict[str, Any], seed: int = 0, tensors: dict[str, np.ndarray] | None = None
) -> DflashModel:
    """A model in float32 with `random_tensors` and `target_tables`."""
    spec = spec_of(values)
    embedding, head = target_tables(seed)
    weights = random_tensors(spec, seed) if tensors is None else tensors
    return DflashModel(
        spec,
        {name: torch.from_numpy(value) for name, value in weights.items()},
        lambda token_ids: embedding[list(token_ids)],
        lambda hidden: np.asarray(hidden) @ head.T,
    )


def float_weight(values: np.ndarray) -> _csrc.Weight:
    return _csrc.Weight.from_array(values.reshape(-1).view(np.uint8), 0, *values.shape)


def load_cpu(file: DflashFile) -> CpuDflash:
    """On the CPU, beside `target_tables`."""
    return CpuDflash(file, CpuOps(1), *(float_weight(table) for table in target_tables()))


HF_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_gate": "self_attn.g_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}


def hf_name(name: str) -> str:
    """What a Hugging Face folder calls a tensor."""
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, rest = name.split(".", 2)
    base, dot, suffix = rest.partition(".")
    return f"layers.{layer}.{HF_LAYER_NAMES[base]}{dot}{suffix}"


def hf_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a Hugging Face folder has them: those of a drafter of Laguna have parts joined or divided."""
    rest = dict(tensors)
    found: dict[str, np.ndarray] = {}
    norms = rest.pop("enc.aux_norm.weight", None)
    if norms is not None:
        found |= {f"aux_hidden_norms.{i}.weight": norm for i, norm in enumerate(norms)}
        for layer in range(sum(name.endswith("attn_gate.weight") for name in rest)):
            parts = [rest.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            found[f"layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
    return found | {hf_name(name): value for name, value in rest.items()}


def write_folder(
    folder: Path,
    values: dict[str, Any],
    tensors: dict[str, np.ndarray],
    num_files: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """config.json, and the tensors in one file or in several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    named = {name: torch.from_numpy(value).to(dtype) for name, value in hf_tensors(tensors).items()}
    if num_files == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    index = {}
    for part in range(num_files):
        name = f"model-{part + 1:05}-of-{num_files:05}.safetensors"
        names = list(named)[part::num_files]
        save_file({each: named[each] for each in names}, folder / name)
        index |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_converted(folder: Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A folder as `write_folder` has it, and the GGUF file in it that it was converted to."""
    path = write_folder(folder, values, tensors) / "drafter.gguf"
    convert(folder, path)
    return path


def write_drafter(folder: Path, dims: Dims) -> Path:
    """A GGUF file of random weights, for a model of these sizes, of which it reads two layers."""
    sizes = {"hidden_size": dims.hidden, "vocab_size": dims.vocab, "num_target_layers": dims.layers}
    values = config(**MIXED, **sizes)
    values["dflash_config"] = {"target_layer_ids": [0, 1], "mask_token_id": dims.vocab - 1}
    return write_converted(folder, values, random_tensors(spec_of(values)))


def types_of(spec: DflashSpec, name: str) -> dict[str, str]:
    """A type for all matrices; for those whose rows are no whole blocks of it Q8_0 or F16."""
    sizes = {
        each: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[each]][0] for each in (name, "Q8_0", "F16")
    }
    matrices = {each: shape for each, shape in tensor_shapes(spec).items() if is_matrix(each, shape)}
    return {
        each: next(kind for kind, size in sizes.items() if shape[1] % size == 0)
        for each, shape in matrices.items()
    }


def as_in_gguf(spec: DflashSpec) -> DflashSpec:
    """The spec as a file with this metadata gives it."""
    return replace(spec, rms_norm_eps=float(np.float32(spec.rms_norm_eps)), num_target_layers=None)


def write_gguf_drafter(
    path: Path,
    spec: DflashSpec,
    tensors: dict[str, np.ndarray],
    architecture: str = "dflash",
    *,
    changes: dict[str, Any] | None = None,
    types: dict[str, str] | None = None,
) -> Path:
    """A GGUF file; changes: of the metadata, None to leave a key out; types: of tensors, F32 unless given."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata(spec, architecture) | (changes or {})).items():
        add_value(writer, key, value)
    rng = np.random.default_rng(0)
    for name, value in tensors.items():
        kind = (types or {}).get(name, "F32")
        raw_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, encode(value, kind, rng), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
