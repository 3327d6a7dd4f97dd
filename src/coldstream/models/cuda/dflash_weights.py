"""The weights of a DFlash drafter on a GPU, with those side by side that read the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from coldstream.models.cuda.features import FEATURE_TYPE
from coldstream.models.dflash.convolution import Convolution
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.model import Selector
from coldstream.models.dflash.spec import DflashLayer


@dataclass(frozen=True)
class LayerMatrices:
    """The weights of a layer: matrices [out, in], norms float32."""

    layer: DflashLayer
    qkv: torch.Tensor  # queries, keys, values
    gate_up: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor]  # of queries and keys
    output: torch.Tensor
    down: torch.Tensor
    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attn_conv: Convolution | None
    ffn_conv: Convolution | None


@dataclass(frozen=True)
class DflashMatrices:
    """All weights of a drafter; as many bytes as the file's tensors have in these types."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    output_norm: torch.Tensor
    context_kv: torch.Tensor  # [layers, 2 · kv_dim, E], a view of those of the layers
    key_norms: torch.Tensor  # float32 [layers, head_dim]
    layers: tuple[LayerMatrices, ...]
    selector: Selector | None

    @classmethod
    def read(cls, file: DflashFile, device: torch.device) -> Self:
        """Copies them. Raises ModelChangedError if the file shrank, torch.OutOfMemoryError."""
        return cls(**_Reader(file, device).all())


class _Reader:
    def __init__(self, file: DflashFile, device: torch.device) -> None:
        self._file, self._device, self._spec = file, device, file.spec

    def all(self) -> dict[str, Any]:
        """The fields of `DflashMatrices`."""
        spec = self._spec
        qkv = self._empty(spec.num_layers, spec.query_dim + 2 * spec.kv_dim, spec.hidden_size)
        gate_up = self._empty(spec.num_layers, 2 * spec.ffn_size, spec.hidden_size)
        key_norms = self._empty(spec.num_layers, spec.head_dim, dtype=torch.float32)
        layers = zip(qkv, gate_up, key_norms, strict=True)
        selector = None
        if spec.second is not None:
            names = ("predecessor", "successor", "hidden")
            selector = Selector(*(self._read(f"selector_{name}.weight") for name in names))
        return {
            "fc": self._read("fc.weight"),
            "hidden_norm": self._read("enc.output_norm.weight"),
            "output_norm": self._read("output_norm.weight"),
            "context_kv": qkv[:, spec.query_dim :],
            "key_norms": key_norms,
            "layers": tuple(self._layer(index, *parts) for index, parts in enumerate(layers)),
            "selector": selector,
        }

    def _layer(
        self, index: int, qkv: torch.Tensor, gate_up: torch.Tensor, key_norm: torch.Tensor
    ) -> LayerMatrices:
        prefix = f"blk.{index}."
        self._fill(qkv, [f"{prefix}{name}.weight" for name in ("attn_q", "attn_k", "attn_v")])
        self._fill(gate_up, [f"{prefix}{name}.weight" for name in ("ffn_gate", "ffn_up")])
        key_norm.copy_(self._file.read(f"{prefix}attn_k_norm.weight"))
        return LayerMatrices(
            layer=self._spec.layers[index],
            qkv=qkv,
            gate_up=gate_up,
            head_norms=(self._read(f"{prefix}attn_q_norm.weight"), key_norm),
            output=self._read(f"{prefix}attn_output.weight"),
            down=self._read(f"{prefix}ffn_down.weight"),
            attn_norm=self._read(f"{prefix}attn_norm.weight"),
            ffn_norm=self._read(f"{prefix}ffn_norm.weight"),
            attn_conv=self._convolution(f"{prefix}attn_conv"),
            ffn_conv=self._convolution(f"{prefix}ffn_conv"),
        )

    def _convolution(self, name: str) -> Convolution | None:
        if self._spec.second is None:
            return None
        return Convolution(self._read(f"{name}_base"), self._read(f"{name}_proj.weight"))

    def _fill(self, joined: torch.Tensor, names: Sequence[str]) -> None:
        """Tensors of the file one behind the other."""
        at = 0
        for name in names:
            part = self._file.read(name)
            joined[at : at + len(part)].copy_(part)
            at += len(part)

    def _read(self, name: str) -> torch.Tensor:
        values = self._file.read(name)
        kept = torch.float32 if name.endswith("norm.weight") else FEATURE_TYPE
        return self._empty(*values.shape, dtype=kept).copy_(values)

    def _empty(self, *shape: int, dtype: torch.dtype = FEATURE_TYPE) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
