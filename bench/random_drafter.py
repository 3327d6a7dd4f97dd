"""Writes a random-weight DFlash 2 drafter of the published shape for Qwen3.6-35B-A3B: its steps cost what
real ones cost.

    python bench/random_drafter.py drafter.gguf           about 1.1 GB of bfloat16
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gguf
from coldstream.models.dflash_rope import DflashRope
from coldstream.models.dflash_spec import Dflash2Spec, DflashLayer, DflashSpec, tensor_shapes

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
    taps=(1, 10, 19, 28, 37),
    num_target_layers=40,
    layers=(DflashLayer(2048, is_causal=False),) * 6,
    second=Dflash2Spec(conv_kernel=2, conv_group=16, selector_rank=256, selector_top_k=16),
)


def metadata(spec: DflashSpec) -> dict[str, Any]:
    """As mainline's converter writes it, for a spec whose layers all have the same window."""
    assert spec.second is not None
    windows = [layer.window for layer in spec.layers]
    return {
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
        "attention.sliding_window": windows[0],
        "attention.sliding_window_pattern": [window is not None for window in windows],
        "attention.causal": spec.layers[0].is_causal,
        "rope.freq_base": spec.rope.theta,
        "block_size": spec.block_size,
        "target_layers": [tap + 1 for tap in spec.taps],
        "conv_kernel_size": spec.second.conv_kernel,
        "conv_group_size": spec.second.conv_group,
        "selector_rank": spec.second.selector_rank,
        "selector_top_k": spec.second.selector_top_k,
    }


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms near 1 as float32; other values as the bits of bfloat16, of deviation 1/√inputs."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + values / 10
    values *= shape[-1] ** -0.5
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write(path: Path, spec: DflashSpec = PUBLISHED) -> None:
    """The file at `path`."""
    writer, rng = gguf.GGUFWriter(path, "dflash", use_temp_file=False), np.random.default_rng(0)
    for key, value in metadata(spec).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(f"dflash.{key}", value)
    writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask_id)
    for name, shape in tensor_shapes(spec).items():
        values = random_tensor(rng, name, shape)
        if values.dtype == np.float32:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, values.view(np.uint8).reshape(*shape[:-1], 2 * shape[-1]), raw_dtype=kind)
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
