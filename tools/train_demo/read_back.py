"""The weights that a GGUF file holds, dequantised by the `gguf` package: what its readers see."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gguf
from tools.train_demo.model import DemoConfig


def dequantised_state(path: Path, config: DemoConfig) -> dict[str, Tensor]:
    """The state dict that `path` holds, float32."""
    reader = gguf.GGUFReader(str(path))
    parts = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    out: dict[str, Tensor] = {}
    nextn = f"blk.{config.num_layers}."
    for name, values in parts.items():
        if name.startswith(nextn + "nextn."):
            out["nextn_" + name.removeprefix(nextn + "nextn.")] = torch.from_numpy(values)
            continue
        if not name.startswith("blk."):
            out[name] = torch.from_numpy(values)
            continue
        prefix = "nextn_block." if name.startswith(nextn) else ".".join(name.split(".")[:2]) + "."
        for key, tensor in _state_entries(name.split(".", 2)[2], values, parts, name):
            out[prefix + key] = tensor
    return out


def _state_entries(
    suffix: str, values: np.ndarray, parts: Mapping[str, np.ndarray], name: str
) -> Iterator[tuple[str, Tensor]]:
    """The state dict's (key, value) for one block tensor."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if suffix == "ffn_up_exps.weight":
        return
    if suffix == "ffn_gate_exps.weight":
        up = torch.from_numpy(parts[name.replace("gate_exps", "up_exps")])
        yield "ffn.ffn_gate_up_exps", torch.cat((tensor, up), dim=1)
    elif suffix == "ffn_down_exps.weight":
        yield "ffn.ffn_down_exps", tensor
    elif suffix == "ffn_gate_inp_shexp.weight":
        yield "ffn.ffn_gate_inp_shexp.weight", tensor.reshape(1, -1)
    elif suffix == "ssm_a":
        yield "mixer.ssm_a_log", (-tensor).log()
    elif suffix == "ssm_dt.bias":
        yield "mixer.ssm_dt", tensor
    elif suffix == "ssm_conv1d.weight":
        yield "mixer.ssm_conv1d", tensor
    elif suffix in ("attn_norm.weight", "post_attention_norm.weight"):
        yield suffix, tensor
    else:
        yield ("ffn." if suffix.startswith("ffn_") else "mixer.") + suffix, tensor
