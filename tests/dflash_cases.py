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
from coldstream.models.dflash.config import spec_of_config
from coldstream.models.dflash.model import DflashModel
from coldstream.models.dflash.spec import DflashSpec, tensor_shapes

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
}


def spec_of(values: dict[str, Any]) -> DflashSpec:
    return spec_of_config(values, Path("config.json"))


def random_tensors(spec: DflashSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by the names of `tensor_shapes`."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(spec).items():
        values = rng.normal(0, 1, shape)
        if len(shape) == 1:
            values = 1 + values / 10
        elif name.endswith("_base"):
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


def write_folder(
    folder: Path, values: dict[str, Any], tensors: dict[str, np.ndarray], num_files: int = 1
) -> Path:
    """config.json, and the tensors in float32 in one file or in several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    named = {hf_name(name): torch.from_numpy(value) for name, value in tensors.items()}
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
    for name, value in tensors.items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
