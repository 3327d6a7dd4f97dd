"""A trained drafter to a GGUF file of mainline's architecture `dflash`.

Matrices are Q8_0. The selector's codebooks are gathered row by row and stay F16; what is small stays F32.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gguf
from tools.llama_cpp import quantize
from tools.train_demo.drafter_model import DrafterConfig, gguf_name
from tools.train_demo.drafter_train import STATE_FILE
from tools.train_demo.model import EPS

GGMLType = gguf.GGMLQuantizationType
ARCHITECTURE = "dflash"
CONTEXT_LENGTH = 4096
MAX_FILE_BYTES = 8_000_000  # 40 MB with the model


def stored_type(name: str) -> gguf.GGMLQuantizationType:
    """The type of the tensor called `name` in the file."""
    if "norm" in name or "conv" in name:
        return GGMLType.F32
    return GGMLType.F16 if "cessor" in name else GGMLType.Q8_0


def _write_metadata(writer: gguf.GGUFWriter, config: DrafterConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_sliding_window(config.window)
    writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", [True] * config.num_layers)
    writer.add_bool(f"{ARCHITECTURE}.attention.causal", config.is_causal)
    writer.add_uint32(f"{ARCHITECTURE}.block_size", config.block_size)
    # Layers before which the target's residual stream is read.
    writer.add_array(f"{ARCHITECTURE}.target_layers", [layer + 1 for layer in config.aux_layers])
    writer.add_mask_token_id(config.mask_id)
    if config.is_second:
        for name, value in (
            ("conv_kernel_size", config.conv_kernel),
            ("conv_group_size", config.conv_group),
            ("selector_rank", config.selector_rank),
            ("selector_top_k", config.selector_top_k),
        ):
            writer.add_uint32(f"{ARCHITECTURE}.{name}", value)


def write_drafter(
    path: Path, state: Mapping[str, Tensor], config: DrafterConfig, quantised: bool = True
) -> int:
    """Write the drafter to `path` and return the file's bytes.

    `quantised=False` stores everything as F32 (for comparisons). ValueError if the file exceeds the limit.
    """
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    writer.add_name("coldstream demo drafter")
    writer.add_description(
        "A DFlash drafter for the coldstream demo model, trained on that model's own continuations of the "
        "source of Python's standard library (PSF licence)."
    )
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_metadata(writer, config)
    for source, value in state.items():
        name = gguf_name(source)
        values = value.detach().float().cpu().contiguous().numpy()
        kind = stored_type(name) if quantised else GGMLType.F32
        if kind == GGMLType.Q8_0:
            writer.add_tensor(name, quantize(values, int(kind)), raw_dtype=kind)
        else:
            writer.add_tensor(name, values.astype(np.float16 if kind == GGMLType.F16 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    size = path.stat().st_size
    if size > MAX_FILE_BYTES and quantised:
        raise ValueError(f"{path} has {size} bytes, the limit is {MAX_FILE_BYTES}: shrink the drafter")
    return size


def load_drafter(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Shape and weights of the drafter that was trained in `folder`."""
    saved = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    shape = saved["shape"]
    return DrafterConfig(**{**shape, "aux_layers": tuple(shape["aux_layers"])}), saved["model"]


def convert_drafter(folder: Path, out: Path) -> None:
    """Write the drafter trained in `folder` to `out`, by way of a temporary file beside it.

    It is checked by opening it as the engine does.
    """
    from coldstream.models.dflash.file import DflashFile

    config, state = load_drafter(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    size = write_drafter(unfinished, state, config)
    with DflashFile.open(unfinished):
        pass
    unfinished.replace(out)
    print(f"{out}: {size} bytes")
