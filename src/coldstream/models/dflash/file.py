"""DflashFile: an open DFlash drafter, checked in full before any of its weights is read.

Either a folder with config.json and model.safetensors, or several safetensors files and their index, or one
GGUF file. Tensors have the names of mainline GGUF (`tensor_shapes`), whatever the file calls them. A file has
exactly the tensors of its spec: further ones belong to parts that are not computed here.

Weights are read by pread: a file that shrinks meanwhile is an error and does not kill the process.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.reader import GGUFFile
from coldstream.models.dflash.config import read_config
from coldstream.models.dflash.gguf import spec_of_metadata
from coldstream.models.dflash.safetensors_names import FILE_NAME, INDEX_NAME
from coldstream.models.dflash.spec import DflashSpec, tensor_shapes

if TYPE_CHECKING:
    import torch

CONFIG_NAME: Final = "config.json"

_HF_NAMES: Final = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_HF_LAYER_NAMES: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
# Names of GGUF files older than mainline's architecture.
_OLDER_NAMES: Final = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
}
# Parts that drafters have elsewhere, by what the names of their tensors contain.
_FOREIGN_PARTS: Final = {
    "markov": "a DSpark head",
    "conf_proj": "a DSpark head",
    "domino": "a Domino head",
    "mask_embedding": "an embedding of the mask of its own",
    "d2t": "a vocabulary of its own",
    "t2d": "a vocabulary of its own",
    "embed_tokens": "an embedding of its own",
    "token_embd": "an embedding of its own",
    "lm_head": "a head of its own",
    "output.weight": "a head of its own",
    "sinks": "attention sinks",
    "aux_hidden_norm": "norms of every tapped layer",
    "post_attention_norm": "norms behind its sublayers",
    "ffn_post_norm": "norms behind its sublayers",
    "bias": "biases",
}


class _Tensors(Protocol):
    """A file's tensors by its own names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> "torch.Tensor": ...


class DflashFile:
    """An open drafter. Use as a context manager, or call `close`.

    path  as it was given, of a folder the folder itself
    spec  what config.json or the metadata says
    """

    def __init__(
        self, path: Path, spec: DflashSpec, tensors: _Tensors, names: Mapping[str, str], cleanup: ExitStack
    ) -> None:
        """names: the file's names of tensors by those of `tensor_shapes`. cleanup: closes the file."""
        self.path, self.spec = path, spec
        self._tensors, self._names, self._cleanup = tensors, names, cleanup

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a folder, which a file of it may stand for, or a GGUF file.

        Raises ModelNotFoundError if a file is absent or unreadable, and otherwise a subclass of
        ModelFormatError if it is not valid in every respect.
        """
        path = Path(path)
        if path.name in (CONFIG_NAME, FILE_NAME, INDEX_NAME):
            path = path.parent
        with ExitStack() as cleanup:
            tensors: _Tensors
            if path.is_dir():
                spec = read_config(path / CONFIG_NAME)
                # Imported here because it needs PyTorch, which a machine without a GPU need not have.
                from coldstream.models.dflash.safetensors_file import SafetensorsFile

                tensors = cleanup.enter_context(SafetensorsFile.open(path))
                known = _hf_names(spec)
            else:
                file = cleanup.enter_context(GGUFFile.open(path))
                spec = spec_of_metadata(file.metadata)
                tensors = _GgufTensors(file)
                known = {name: name for name in tensor_shapes(spec)} | _OLDER_NAMES
            names = _matched(spec, tensors.shapes, known, path)
            return cls(path, spec, tensors, names, cleanup.pop_all())

    def read(self, name: str) -> "torch.Tensor":
        """A tensor of `tensor_shapes` on the CPU: as it is in the file if it is float, else float32.

        Raises ModelChangedError if the file shrank.
        """
        return self._tensors.read(self._names[name])

    @property
    def gguf(self) -> GGUFFile | None:
        """The GGUF file; None for a folder."""
        return self._tensors.file if isinstance(self._tensors, _GgufTensors) else None

    def name_of(self, name: str) -> str:
        """What the file calls a tensor of `tensor_shapes`."""
        return self._names[name]

    def close(self) -> None:
        """Closes all files; calling twice is harmless."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _GgufTensors:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.shapes = {name: info.shape for name, info in file.tensors.items()}

    def read(self, name: str) -> "torch.Tensor":
        import torch

        from coldstream.kernels.dequantize.reference import dequantize
        from coldstream.kernels.quant_tensor import QuantTensor

        info = self.file.tensors[name]
        blocks = torch.from_numpy(self.file.read(info)).view(*info.shape[:-1], -1)
        return dequantize(QuantTensor(blocks, info.quant_type, info.shape))


def _hf_names(spec: DflashSpec) -> dict[str, str]:
    """Canonical names by those of a safetensors file."""
    layers = {
        f"layers.{i}.{name}": f"blk.{i}.{canonical}"
        for i in range(spec.num_layers)
        for name, canonical in _HF_LAYER_NAMES.items()
    }
    return _HF_NAMES | layers


def _matched(
    spec: DflashSpec, found: Mapping[str, tuple[int, ...]], known: Mapping[str, str], path: Path
) -> dict[str, str]:
    """The file's names by canonical names, if it has exactly the tensors of the spec, in their shapes."""
    shapes = tensor_shapes(spec)
    names: dict[str, str] = {}
    for name, shape in found.items():
        canonical = known.get(name)
        if canonical not in shapes:
            raise UnsupportedError(
                f"{shorten(path)}: the tensor {name:.80} belongs to {_part_of(name)}, which is not "
                "supported: choose another drafter"
            )
        if canonical in names:
            raise InconsistentError(
                f"{shorten(path)}: {name:.80} and {names[canonical]:.80} are the same tensor: {RECONVERT}"
            )
        if shape != shapes[canonical]:
            raise InconsistentError(
                f"{shorten(path)}: the tensor {name:.80} has the shape {list(shape)!s:.60}, expected "
                f"{list(shapes[canonical])}: {RECONVERT}"
            )
        names[canonical] = name
    missing = [name for name in shapes if name not in names]
    if missing:
        raise InconsistentError(
            f"{shorten(path)}: {len(missing)} tensors are missing, {missing[0]} first: {INCOMPLETE}"
        )
    return names


def _part_of(name: str) -> str:
    parts = (part for fragment, part in _FOREIGN_PARTS.items() if fragment in name)
    return next(parts, "a part that is not known")
