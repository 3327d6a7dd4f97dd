"""Sidecars as publishers make them: a model's block for multi-token prediction in a file of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from builders import TinyModel, make_model, write_model

# Of the families whose models have such a block.
FAMILIES = ("qwen35moe", "qwen35", "qwen3next", "qwen4exp")


def split(model: TinyModel, *, shares: bool = False) -> tuple[TinyModel, TinyModel]:
    """The trunk of a model with a block, and its sidecar.

    The metadata of the sidecar are those of the whole model. It has copies of the trunk's tensors outside the
    layers, but for several residual streams, or unless it `shares` them.
    """
    last = model.metadata[f"{model.arch}.block_count"] - 1
    block = {name: each for name, each in model.tensors.items() if name.startswith(f"blk.{last}.")}
    trunk = {name: each for name, each in model.tensors.items() if name not in block}
    copied = ("token_embd.weight", "output.weight", "output_norm.weight")
    copies = {} if shares else {name: trunk[name] for name in copied if name in trunk}
    metadata = {name: _of_trunk(name, value, last) for name, value in model.metadata.items()}
    del metadata[f"{model.arch}.nextn_predict_layers"]
    metadata[f"{model.arch}.block_count"] = last
    of_sidecar = dict(model.metadata)
    if shares:
        of_sidecar[f"{model.arch}.nextn_shared_target_tensors"] = True
    return (
        replace(model, metadata=metadata, tensors=trunk),
        replace(model, metadata=of_sidecar, tensors=copies | block),
    )


def _of_trunk(name: str, value: Any, num_layers: int) -> Any:
    """A key of the whole model for its trunk alone, as an array may have a value for each layer."""
    is_per_layer = isinstance(value, list) and len(value) == num_layers + 1
    return value[:num_layers] if is_per_layer and name.endswith("compress_ratios") else value


def write_split(folder: Path, model: TinyModel, *, shares: bool = False) -> tuple[str, str, str]:
    """The paths of the whole model, of its trunk and of its sidecar."""
    trunk, sidecar = split(model, shares=shares)
    parts = {"whole.gguf": model, "trunk.gguf": trunk, "sidecar.gguf": sidecar}
    whole, of_trunk, of_sidecar = (str(write_model(folder / name, each)[0]) for name, each in parts.items())
    return whole, of_trunk, of_sidecar


def make_whole(arch: str = "qwen35moe", **options: Any) -> TinyModel:
    """A model with a block."""
    return make_model(arch, nextn=True, **options)
