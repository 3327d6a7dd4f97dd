"""Safetensors files of any origin: tensors of one file, or of several in a folder with an index.

The library checks the structure of each file: tensors lie inside it, side by side, in sizes that suit their
types. This module checks the rest: names that appear twice, types that are no weights, and an index that
contradicts the files. Weights are read by pread and never mapped.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from safetensors import SafetensorError, safe_open

from coldstream.closing import Closing
from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelChangedError,
    ModelNotFoundError,
    UnsupportedError,
)
from coldstream.gguf.messages import DAMAGED, INCOMPLETE, shorten
from coldstream.gguf.quant_types import QuantType

FILE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 1 << 24
MAX_FILES: Final = 256
DTYPES: Final = {"F32": QuantType.F32, "F16": QuantType.F16, "BF16": QuantType.BF16}
_ADVICE: Final = "Give a folder with the drafter's weights and config.json"
_PIECE_BYTES: Final = 1 << 24  # of a tensor, read at once


@dataclass(frozen=True)
class _TensorSource:
    """Where a tensor lies."""

    path: Path
    descriptor: int
    offset: int  # in the file
    quant_type: QuantType
    shape: tuple[int, ...]
    num_bytes: int


class SafetensorsFile(Closing):
    """Open files. Use as a context manager, or call `close`.

    shapes  by name
    types   by name: F32, F16 or BF16
    paths   of the files
    """

    def __init__(self, places: Mapping[str, _TensorSource], cleanup: ExitStack) -> None:
        self._places, self._cleanup = places, cleanup
        self.shapes = {name: place.shape for name, place in places.items()}
        self.types = {name: place.quant_type for name, place in places.items()}
        self.paths = tuple(dict.fromkeys(place.path for place in places.values()))

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens `model.safetensors` in a folder, or the files of its index.

        Raises ModelNotFoundError if a file is absent or unreadable, and a subclass of ModelFormatError if it
        is not valid.
        """
        index = folder / INDEX_NAME
        listed = _listed(index) if index.exists() else None
        names = [FILE_NAME] if listed is None else sorted(set(listed.values()))
        with ExitStack() as cleanup:
            places: dict[str, _TensorSource] = {}
            for name in names:
                for tensor, place in _places(folder / name, cleanup).items():
                    if tensor in places:
                        raise DuplicateError(
                            f"{shorten(folder / name)}: {tensor:.80} is in {places[tensor].path.name} too: "
                            "download the folder again"
                        )
                    places[tensor] = place
            if listed is not None and listed != {name: place.path.name for name, place in places.items()}:
                raise InconsistentError(
                    f"{shorten(index)} lists other tensors than there are in the files: {INCOMPLETE}"
                )
            return cls(places, cleanup.pop_all())

    def pieces(self, name: str, rows: slice = slice(None)) -> Iterator[bytes]:
        """The bytes of these rows of a tensor in order, some at a time.

        Raises ModelChangedError if the file shrank.
        """
        place = self._places[name]
        num_rows = place.shape[0] if place.shape else 1
        first, end, _ = rows.indices(num_rows)
        done, end_byte = (each * (place.num_bytes // max(1, num_rows)) for each in (first, end))
        while done < end_byte:
            wanted = min(_PIECE_BYTES, end_byte - done)
            try:
                piece = os.pread(place.descriptor, wanted, place.offset + done)
            except OSError as error:
                raise ModelChangedError(
                    f"{shorten(place.path)}: {name:.80} cannot be read: {error.strerror}"
                ) from error
            if not piece:
                raise ModelChangedError(
                    f"{shorten(place.path)}: the file ends within {name:.80}: it shrank, load it again"
                )
            done += len(piece)
            yield piece

    def close(self) -> None:
        """Closes all files; calling twice is harmless."""
        self._cleanup.close()


def _listed(index: Path) -> dict[str, str]:
    """The file of every tensor by an index."""
    listed = read_object(index, MAX_HEADER_BYTES, _ADVICE).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise InconsistentError(f"{shorten(index)}: weight_map: expected the file of every tensor: {DAMAGED}")
    for name in listed.values():
        # Files of the folder only: no path may lead out of it.
        is_plain = isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        if not is_plain or "\0" in name:
            raise InconsistentError(
                f"{shorten(index)}: weight_map: {name!r:.80} is not a file of the folder: {DAMAGED}"
            )
    if len(set(listed.values())) > MAX_FILES:
        raise LimitError(f"{shorten(index)}: more than {MAX_FILES} files: {DAMAGED}")
    return listed


def _places(path: Path, cleanup: ExitStack) -> dict[str, _TensorSource]:
    """Where the tensors of one file lie; `cleanup` closes it."""
    descriptor = open_regular(path, _ADVICE)
    cleanup.callback(os.close, descriptor)
    header, data_start = _header(path, descriptor)
    try:
        # By the descriptor, so that it is the same file whatever has its name by now.
        with safe_open(f"/proc/self/fd/{descriptor}", "numpy") as checked:
            names = list(checked.keys())
            shapes = {name: tuple(checked.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise InconsistentError(f"{shorten(path)}: {error!s:.120}: {DAMAGED}") from error
    places: dict[str, _TensorSource] = {}
    for name in names:
        dtype = header[name]["dtype"]
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{shorten(path)}: {name:.80} has the type {dtype:.20}, supported are {', '.join(DTYPES)}: "
                "choose another drafter"
            )
        first, end = header[name]["data_offsets"]
        places[name] = _TensorSource(
            path, descriptor, data_start + first, DTYPES[dtype], shapes[name], end - first
        )
    return places


def _header(path: Path, descriptor: int) -> tuple[dict[str, Any], int]:
    """The table of tensors, and where the data begins; the library checks what they say."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size > MAX_HEADER_BYTES:
        raise LimitError(
            f"{shorten(path)}: a header of {size} bytes, the limit is {MAX_HEADER_BYTES}: {DAMAGED}"
        )
    return parse_object(os.pread(descriptor, size, 8), path), 8 + size


def open_regular(path: Path, advice: str) -> int:
    """A descriptor of a regular file to read.

    Raises ModelNotFoundError, with `advice`, if it cannot be opened, and UnsupportedError if it is something
    else: a pipe, say, which would be waited for.
    """
    try:
        # Before it is opened, because opening alone has effects on some devices.
        if stat.S_ISREG(os.stat(path).st_mode):
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ModelNotFoundError(f"{shorten(path)}: {error.strerror}. {advice}") from error
    raise UnsupportedError(f"{shorten(path)} is not a regular file. {advice}")


def read_object(path: Path, max_bytes: int, advice: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises as `open_regular` and `parse_object`, and LimitError if the file has more than max_bytes.
    """
    with open(open_regular(path, advice), "rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise LimitError(f"{shorten(path)} has more than {max_bytes} bytes: {DAMAGED}")
    return parse_object(text, path)


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`; `path` is for messages.

    Raises DuplicateError for a name that appears twice in an object, and InconsistentError for what is not
    JSON, NaN and infinities included, or nested deeper than Python follows.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateError(f"{shorten(path)}: {twice:.80} appears twice: {DAMAGED}")
        return values

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number")

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InconsistentError(f"{shorten(path)} is not valid JSON ({error!s:.80}): {DAMAGED}") from error
    if not isinstance(values, dict):
        raise InconsistentError(f"{shorten(path)} is not a JSON object: {DAMAGED}")
    return values
