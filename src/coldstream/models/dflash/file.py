"""DflashFile: an open DFlash drafter, a GGUF file that is checked in full before any of its weights is read.

Tensors have the names of mainline GGUF (`tensor_shapes`), whatever the file calls them. A file has exactly
the tensors of its spec: further ones belong to parts that are not computed here. A folder of safetensors is
converted first (`convert.py`).
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from coldstream.closing import Closing
from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.models.dflash.metadata import spec_of_metadata
from coldstream.models.dflash.spec import DflashSpec, tensor_shapes

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
    "aux_hidden_norm": "norms of every auxiliary layer",
    "aux_norm": "norms of every auxiliary layer",
    "g_proj": "gates of heads",
    "attn_gate": "gates of heads",
    "post_attention_norm": "norms behind its sublayers",
    "ffn_post_norm": "norms behind its sublayers",
    "bias": "biases",
}


class DflashFile(Closing):
    """An open drafter. Use as a context manager, or call `close`.

    gguf  the file
    spec  what its metadata says
    """

    def __init__(self, gguf: GGUFFile, spec: DflashSpec, names: Mapping[str, str]) -> None:
        """names: the file's names of tensors by those of `tensor_shapes`."""
        self.gguf, self.spec = gguf, spec
        self._names = names

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a GGUF file.

        Raises ModelNotFoundError if it is absent or unreadable, and otherwise a subclass of ModelFormatError
        if it is not valid in every respect.
        """
        with ExitStack() as cleanup:
            gguf = cleanup.enter_context(GGUFFile.open(path))
            spec = _spec_of(gguf)
            shapes = {name: info.shape for name, info in gguf.tensors.items()}
            known = {name: name for name in tensor_shapes(spec)} | _OLDER_NAMES
            names = matched_names(spec, shapes, known, Path(path))
            cleanup.pop_all()
            return cls(gguf, spec, names)

    def tensor(self, name: str) -> TensorInfo:
        """Where a tensor of `tensor_shapes` lies."""
        return self.gguf.tensors[self._names[name]]

    def close(self) -> None:
        """Closes the file; calling twice is harmless."""
        self.gguf.close()


def _spec_of(gguf: GGUFFile) -> DflashSpec:
    """What metadata say, with the biases that no key states if there is one. Raises as `spec_of_metadata`."""
    spec = spec_of_metadata(gguf.metadata)
    biased = replace(spec, has_attention_bias=True)
    biases = tensor_shapes(biased).keys() - tensor_shapes(spec).keys()
    return spec if biases.isdisjoint(gguf.tensors) else biased


def matched_names(
    spec: DflashSpec, found: Mapping[str, tuple[int, ...]], known: Mapping[str, str], path: Path
) -> dict[str, str]:
    """The file's names by those of `tensor_shapes`, if it has exactly the tensors of the spec.

    found: the file's shapes by its own names. known: names of `tensor_shapes` by those that files may have.
    path: for messages. Raises UnsupportedError for a tensor of another part, and InconsistentError for one
    that is missing, twice or of another shape.
    """
    shapes = tensor_shapes(spec)
    names: dict[str, str] = {}
    for name, shape in found.items():
        canonical = known.get(name)
        if canonical not in shapes:
            raise UnsupportedError(
                f"{shorten(path)}: the tensor {name:.80} belongs to {_part_of(name)}, which is not "
                "supported: choose another drafter, or draft by --spec-type ngram"
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
