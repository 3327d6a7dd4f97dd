"""SafetensorsFile: tensors in the safetensors format, of one file or of several in a folder with an index.

The library checks the structure of each file: tensors lie inside it, side by side, in sizes that suit their
types. What it lets pass is checked here: names that appear twice, types that are no weights, and an index
that says something else than the files. Weights are read by pread and never mapped.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelChangedError,
    UnsupportedError,
)
from coldstream.gguf.messages import DAMAGED, INCOMPLETE, shorten
from coldstream.models.dflash.safetensors_names import FILE_NAME, INDEX_NAME
from coldstream.models.dflash.strict_json import open_regular, parse_object, read_object

MAX_HEADER_BYTES: Final = 1 << 24
MAX_FILES: Final = 256
DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ADVICE: Final = "Give a folder with the drafter's weights and config.json"
_MAX_READ_BYTES: Final = 1 << 30  # Linux reads at most 2 GiB at once


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    path: Path
    descriptor: int
    offset: int  # in the file
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFile:
    """Open files. Use as a context manager, or call `close`.

    shapes  by name
    """

    def __init__(self, places: dict[str, _Place], cleanup: ExitStack) -> None:
        self._places, self._cleanup = places, cleanup
        self.shapes = {name: place.shape for name, place in places.items()}

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
            places: dict[str, _Place] = {}
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

    def read(self, name: str) -> torch.Tensor:
        """A copy in the file's own type, on the CPU. Raises ModelChangedError if the file shrank."""
        place = self._places[name]
        values = torch.empty(place.shape, dtype=place.dtype)
        view = values.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(
                    place.descriptor, [view[done : done + _MAX_READ_BYTES]], place.offset + done
                )
            except OSError as error:
                raise ModelChangedError(
                    f"{shorten(place.path)}: {name:.80} cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise ModelChangedError(
                    f"{shorten(place.path)}: the file ends within {name:.80}: it shrank, load it again"
                )
            done += count
        return values

    def close(self) -> None:
        """Closes all files; calling twice is harmless."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def _places(path: Path, cleanup: ExitStack) -> dict[str, _Place]:
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
    places: dict[str, _Place] = {}
    for name in names:
        dtype = header[name]["dtype"]
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{shorten(path)}: {name:.80} has the type {dtype:.20}, supported are {', '.join(DTYPES)}: "
                "choose another drafter"
            )
        offset = data_start + header[name]["data_offsets"][0]
        places[name] = _Place(path, descriptor, offset, DTYPES[dtype], shapes[name])
    return places


def _header(path: Path, descriptor: int) -> tuple[dict[str, Any], int]:
    """The table of tensors, and where the data begins; the library checks what they say."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size > MAX_HEADER_BYTES:
        raise LimitError(
            f"{shorten(path)}: a header of {size} bytes, the limit is {MAX_HEADER_BYTES}: {DAMAGED}"
        )
    return parse_object(os.pread(descriptor, size, 8), path), 8 + size
