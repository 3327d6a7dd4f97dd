"""The weights of a DFlash drafter on any device: matrices in the file's own types, vectors as float32.

`DflashWeights.load` is the only reader of a drafter's tensors. `models/cpu/dflash.py` and
`models/cuda/dflash_block.py` compute with what it returns.
"""

from dataclasses import dataclass
from typing import Self

from coldstream.kernels.ops import Array, Ops, Weight
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import DflashLayer


@dataclass(frozen=True)
class DynamicConvolution:
    """A short causal convolution of noise rows, whose weights depend on the row.

    The same row gives the weights before a sublayer and behind it.
    """

    base: Array  # [2, kernel, E]
    proj: Weight  # [2 · kernel · groups, E]


@dataclass(frozen=True)
class DflashLayerWeights:
    """Of one layer: matrices [out, in], and float32 vectors of norms."""

    layer: DflashLayer
    attn_norm: Array
    attn_q: Weight
    attn_k: Weight
    attn_v: Weight
    attn_output: Weight
    attn_q_norm: Array
    attn_k_norm: Array
    ffn_norm: Array
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight
    attn_gate: Weight | None  # [heads, E]: the softplus of its product gates a head's output
    q_bias: Array  # [heads · d], added to queries before norms; None with the other three: no biases
    k_bias: Array  # [kv heads · d]
    v_bias: Array  # [kv heads · d]
    output_bias: Array  # [E]
    attn_conv: DynamicConvolution | None
    ffn_conv: DynamicConvolution | None


@dataclass(frozen=True)
class SelectorWeights:
    """Scores of a candidate after the one before it, with codebooks that are gathered row by row."""

    predecessor: Weight  # [V, rank]
    successor: Weight  # [V, rank]
    hidden: Weight  # [rank, E]


@dataclass(frozen=True)
class DflashWeights:
    """All weights of a drafter."""

    fc: Weight
    aux_norms: Array | None  # [auxiliary layers, E]: norms of features before `fc`
    hidden_norm: Array
    output_norm: Array
    layers: tuple[DflashLayerWeights, ...]
    selector: SelectorWeights | None

    @classmethod
    def load(cls, file: DflashFile, ops: Ops) -> Self:
        """Copies them into the memory of `ops`, which may still have to finish loading.

        Raises UnsupportedError for a type that no kernel multiplies, ModelChangedError if the file shrank.
        """
        reader, spec = _Reader(file, ops), file.spec
        selector = None
        if spec.second is not None:
            parts = ("predecessor", "successor", "hidden")
            selector = SelectorWeights(*(reader.matrix(f"selector_{part}") for part in parts))
        return cls(
            fc=reader.matrix("fc"),
            aux_norms=reader.values("enc.aux_norm.weight") if spec.is_laguna else None,
            hidden_norm=reader.values("enc.output_norm.weight"),
            output_norm=reader.values("output_norm.weight"),
            layers=tuple(reader.layer(index) for index in range(spec.num_layers)),
            selector=selector,
        )


class _Reader:
    """Reads tensors by their names in mainline GGUF."""

    def __init__(self, file: DflashFile, ops: Ops) -> None:
        self._file, self._ops = file, ops

    def matrix(self, name: str) -> Weight:
        return self._ops.load_weight(self._file.gguf, self._file.tensor(f"{name}.weight"))

    def values(self, name: str) -> Array:
        return self._ops.float_array(self._ops.read_values(self._file.gguf, self._file.tensor(name)))

    def layer(self, index: int) -> DflashLayerWeights:
        prefix = f"blk.{index}."
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        norms = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")
        return DflashLayerWeights(
            layer=self._file.spec.layers[index],
            **{name: self.matrix(prefix + name) for name in matrices},
            **{name: self.values(f"{prefix}{name}.weight") for name in norms},
            attn_gate=self.matrix(f"{prefix}attn_gate") if self._file.spec.is_laguna else None,
            **{f"{name}_bias": self._bias(f"{prefix}attn_{name}") for name in ("q", "k", "v", "output")},
            attn_conv=self._convolution(f"{prefix}attn_conv"),
            ffn_conv=self._convolution(f"{prefix}ffn_conv"),
        )

    def _bias(self, name: str) -> Array:
        return self.values(f"{name}.bias") if self._file.spec.has_attention_bias else None

    def _convolution(self, name: str) -> DynamicConvolution | None:
        if self._file.spec.second is None:
            return None
        return DynamicConvolution(self.values(f"{name}_base"), self.matrix(f"{name}_proj"))
