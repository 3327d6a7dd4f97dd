"""RoutingTrace: the experts that a model's routers chose in each step, and its file format.

A trace belongs to one model, known by its fingerprint. It feeds policies of residency offline and ranks
experts for the start. Knows nothing of tensors or text.

The file is little-endian:

- 8 bytes of magic with the version
- `_HEADER`
- the ids in the order [step, layer, rank], compressed by zlib; one byte each up to 256 experts, two beyond
- a BLAKE2b-128 hash of everything before it

Length and hash are checked before anything else is used.
"""

import hashlib
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final, Self

import numpy as np

from coldstream.errors import (
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.files import write_file
from coldstream.gguf.messages import describe, shorten

Array = np.ndarray[Any, Any]

MAGIC: Final = b"CSROUTE1"
MAX_IDS: Final = 1 << 27  # 256 MiB in memory; 420,000 tokens of 40 layers and 8 experts each

# Bytes of the file, fingerprint, steps, layers, experts, experts a token.
_HEADER: Final = Struct("<Q16sQIII")
_FIXED_BYTES: Final = len(MAGIC) + _HEADER.size
_HASH_BYTES: Final = 16
_MAX_RATIO: Final = 1040  # zlib cannot compress further
_MAX_FILE_BYTES: Final = 2 * MAX_IDS + (1 << 20)
_AGAIN: Final = "record it again with `coldstream profile`"


@dataclass(frozen=True)
class RoutedModel:
    """The model that a trace must match. `fingerprint` is `GGUFFile.fingerprint`."""

    fingerprint: str
    num_layers: int
    num_experts: int
    num_experts_per_tok: int

    @property
    def ids_per_step(self) -> int:
        """Ids that one token has."""
        return self.num_layers * self.num_experts_per_tok


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """uint16 `topk_ids` [steps, layers, K]: experts of each layer in falling order of weight, token by token.

    Creation raises ValueError for ids that no router of `model` gives.
    """

    model: RoutedModel
    topk_ids: Array

    def __post_init__(self) -> None:
        problem = _problem(self.model, self.topk_ids)
        if problem:
            raise ValueError(problem)

    @property
    def num_steps(self) -> int:
        return int(self.topk_ids.shape[0])

    def counts(self) -> Array:
        """How often each expert was chosen: int64 [layers, experts]."""
        model = self.model
        keys = self.topk_ids + np.arange(model.num_layers)[:, None] * model.num_experts
        counts = np.bincount(keys.ravel(), minlength=model.num_layers * model.num_experts)
        return counts.reshape(model.num_layers, model.num_experts)

    def save(self, path: Path) -> None:
        """Writes the file at once: there is the old one or the whole new one. Raises StorageError."""
        ids = self.topk_ids.astype(_stored_type(self.model.num_experts))
        payload = zlib.compress(ids.tobytes(), level=6)
        content = _header(self.model, self.num_steps, len(payload)) + payload
        write_file(path, content + _hash(content))

    @classmethod
    def load(cls, path: Path, model: RoutedModel) -> Self:
        """The trace of `model` in the file at `path`.

        Raises ModelNotFoundError for a file that cannot be read, and a subclass of ModelFormatError for a
        trace that is damaged, incomplete or of another model.
        """
        content = _read(path)
        num_steps, payload = _open(path, content, model)
        stored = _stored_type(model.num_experts)
        num_bytes = num_steps * model.ids_per_step * stored.itemsize
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(payload, num_bytes + 1)
        except zlib.error as error:
            raise _error(InconsistentError, path, "ids", _FIXED_BYTES, f"not zlib: {error}") from error
        if len(raw) != num_bytes or not unpacker.eof or unpacker.unused_data:
            raise _error(InconsistentError, path, "ids", _FIXED_BYTES, f"not {num_bytes} bytes unpacked")
        shape = (num_steps, model.num_layers, model.num_experts_per_tok)
        topk_ids = np.frombuffer(raw, stored).astype(np.uint16).reshape(shape)
        try:
            return cls(model, topk_ids)
        except ValueError as error:
            raise _error(InconsistentError, path, "ids", _FIXED_BYTES, str(error)) from error


def _problem(model: RoutedModel, topk_ids: Array) -> str | None:
    """What is wrong with the ids of a trace, if anything."""
    shape = (model.num_layers, model.num_experts_per_tok)
    if topk_ids.dtype != np.uint16 or topk_ids.shape[1:] != shape:
        return f"ids must be uint16 [steps, {shape[0]}, {shape[1]}], not {topk_ids.dtype} {topk_ids.shape}"
    if not 0 < topk_ids.size <= MAX_IDS:
        return f"{topk_ids.size} ids, a trace has between 1 and {MAX_IDS}"
    if topk_ids.max() >= model.num_experts:
        return f"expert {topk_ids.max()} of {model.num_experts}"
    ordered = np.sort(topk_ids, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        return "an expert is chosen twice for one token"
    return None


def _stored_type(num_experts: int) -> np.dtype[Any]:
    return np.dtype("u1") if num_experts <= 256 else np.dtype("<u2")


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()


def _header(model: RoutedModel, num_steps: int, payload_bytes: int) -> bytes:
    return MAGIC + _HEADER.pack(
        _FIXED_BYTES + payload_bytes + _HASH_BYTES,
        bytes.fromhex(model.fingerprint),
        num_steps,
        model.num_layers,
        model.num_experts,
        model.num_experts_per_tok,
    )


def _error(
    kind: type[ModelFormatError], path: Path, field: str, offset: int, problem: str
) -> ModelFormatError:
    return kind(describe(path, field, offset, f"{problem}: {_AGAIN}"))


def _read(path: Path) -> bytes:
    try:
        # A pipe would be waited for, so it is not opened.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _error(UnsupportedError, path, "file", 0, "not a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            problem = f"{status.st_size} bytes, a trace has at most {_MAX_FILE_BYTES}"
            raise _error(LimitError, path, "file", 0, problem)
        with open(path, "rb") as file:
            return file.read(status.st_size)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"{shorten(path)}: {reason}. Give the path of a routing trace") from error


def _open(path: Path, content: bytes, model: RoutedModel) -> tuple[int, memoryview]:
    """(steps, compressed ids) of a file that is whole, undamaged and of this model."""
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        known = content[: len(MAGIC) - 1] == MAGIC[:-1]
        what = "a version that this program does not know" if known else "this is not a routing trace"
        raise _error(UnsupportedError, path, "magic", 0, f"{content[: len(MAGIC)]!r}, not {MAGIC!r}: {what}")
    if len(content) < _FIXED_BYTES + _HASH_BYTES:
        problem = f"{len(content)} bytes, a trace has more than {_FIXED_BYTES + _HASH_BYTES}"
        raise _error(TruncatedError, path, "header", len(content), problem)
    num_bytes, fingerprint, num_steps, *numbers = _HEADER.unpack_from(content, len(MAGIC))
    if num_bytes != len(content):
        kind = TruncatedError if num_bytes > len(content) else InconsistentError
        problem = f"{len(content)} bytes, written were {num_bytes}"
        raise _error(kind, path, "length", len(MAGIC), problem)
    if _hash(content[:-_HASH_BYTES]) != content[-_HASH_BYTES:]:
        problem = "the hash does not fit the content: the file is damaged"
        raise _error(InconsistentError, path, "hash", len(content) - _HASH_BYTES, problem)
    if fingerprint.hex() != model.fingerprint:
        problem = f"{fingerprint.hex()}, this model has {model.fingerprint}: the trace is another model's"
        raise _error(InconsistentError, path, "fingerprint", len(MAGIC) + 8, problem)
    expected = [model.num_layers, model.num_experts, model.num_experts_per_tok]
    if numbers != expected:
        problem = f"layers, experts and experts a token are {numbers}, this model has {expected}"
        raise _error(InconsistentError, path, "shape", len(MAGIC) + 32, problem)
    payload = memoryview(content)[_FIXED_BYTES:-_HASH_BYTES]
    _check_size(path, num_steps, len(payload), model)
    return num_steps, payload


def _check_size(path: Path, num_steps: int, payload_bytes: int, model: RoutedModel) -> None:
    """Refuses a number of steps that no trace has, or that so few bytes cannot hold."""
    num_ids = num_steps * model.ids_per_step
    offset = len(MAGIC) + 24
    if not 0 < num_ids <= MAX_IDS:
        raise _error(LimitError, path, "steps", offset, f"{num_steps}, a trace has 1 to {MAX_IDS} ids")
    if num_ids * _stored_type(model.num_experts).itemsize > payload_bytes * _MAX_RATIO:
        problem = f"{num_steps} steps cannot lie in {payload_bytes} bytes"
        raise _error(InconsistentError, path, "steps", offset, problem)
