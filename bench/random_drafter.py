"""Writes a random-weight DFlash 2 drafter of the published shape for Qwen3.6-35B-A3B: its steps cost what
real ones cost.

    python -m bench.random_drafter drafter.gguf           about 1.1 GB of bfloat16
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from coldstream.models.dflash.spec import (
    Dflash2Spec,
    DflashLayer,
    DflashRope,
    DflashSpec,
    is_matrix,
    tensor_shapes,
)

# incoai/Qwen3.6-35B-A3B-DFlash2
PUBLISHED = DflashSpec(
    hidden_size=2048,
    vocab_size=248_320,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=6144,
    rms_norm_eps=1e-6,
    rope=DflashRope(1e7),
    block_size=8,
    mask_id=248_070,
    aux_layers=(1, 10, 19, 28, 37),
    num_target_layers=40,
    layers=(DflashLayer(2048, is_causal=False),) * 6,
    second=Dflash2Spec(conv_kernel=2, conv_group=16, selector_rank=256, selector_top_k=16),
)


_SECOND_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def metadata(spec: DflashSpec, architecture: str = "dflash") -> dict[str, Any]:
    """What a GGUF file of the drafter says, in mainline's convention or in the older one."""
    is_mainline = architecture == "dflash"
    prefix = "" if is_mainline else "dflash."
    values: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "block_count": spec.num_layers,
        "context_length": 262_144,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.ffn_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.theta,
        f"{prefix}block_size": spec.block_size,
    }
    windows = [layer.window for layer in spec.layers]
    if any(windows):
        values["attention.sliding_window"] = next(window for window in windows if window)
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    if len({layer.is_causal for layer in spec.layers}) == 1:
        values["attention.causal"] = spec.layers[0].is_causal
    if spec.rope.yarn is not None:
        values["rope.scaling.type"] = "yarn"
        values["rope.scaling.factor"] = spec.rope.yarn.factor
        values["rope.scaling.original_context_length"] = spec.rope.yarn.original_context
        if not spec.rope.yarn.truncate:
            values["rope.scaling.yarn_truncate"] = False  # a key of ours
    if is_mainline:
        values["target_layers"] = [layer + 1 for layer in spec.aux_layers]
    else:
        values["dflash.target_layer_ids"] = list(spec.aux_layers)
        values["dflash.mask_token_id"] = spec.mask_id
        values["dflash.n_target_layers"] = len(spec.aux_layers)
    if spec.is_laguna:
        values["decoder_arch"] = "laguna"
    if spec.second is not None:
        numbers = (spec.second.conv_kernel, spec.second.conv_group)
        numbers += (spec.second.selector_rank, spec.second.selector_top_k)
        values |= {f"{prefix}{key}": number for key, number in zip(_SECOND_KEYS, numbers, strict=True)}
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    if is_mainline:
        named["tokenizer.ggml.mask_token_id"] = spec.mask_id
    return named


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a number, string or list by the type that it has here; nothing for None."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(key, value)


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms near 1 and biases as float32; other values as the bits of bfloat16, of deviation 1/√inputs."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + values / 10
    if name.endswith(".bias"):
        return values / 2
    values *= shape[-1] ** -0.5
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _encoded(bits: np.ndarray, raw_type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a type, of values as the bits of bfloat16."""
    if raw_type == gguf.GGMLQuantizationType.BF16:
        return bits.view(np.uint8).reshape(*bits.shape[:-1], 2 * bits.shape[-1])
    return gguf.quantize((bits.astype(np.uint32) << 16).view(np.float32), raw_type)


def write(path: Path, spec: DflashSpec = PUBLISHED, kind: str = "BF16") -> None:
    """The file at `path`, its matrices of a type that the `gguf` package writes."""
    writer, rng = gguf.GGUFWriter(path, "dflash", use_temp_file=False), np.random.default_rng(0)
    for key, value in metadata(spec).items():
        add_value(writer, key, value)
    for name, shape in tensor_shapes(spec).items():
        values = random_tensor(rng, name, shape)
        if values.dtype == np.float32:
            writer.add_tensor(name, values)
        else:
            raw_type = gguf.GGMLQuantizationType[kind if is_matrix(name, shape) else "BF16"]
            writer.add_tensor(name, _encoded(values, raw_type), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    write(parser.parse_args().path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
