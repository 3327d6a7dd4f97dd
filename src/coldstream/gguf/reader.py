"""GGUFFile: a model file, or all parts of a split one, opened, checked and read by pread.

Opening reads the headers only. Nothing is mapped here: a file that shrinks makes `read` raise
ModelChangedError and never kills the process. Code that maps weights uses `descriptor`, with its own
protection.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

import numpy as np

from coldstream.errors import (
    ModelChangedError,
    ModelNotFoundError,
    UnsupportedError,
    escape_controls,
    out_of_resources,
)
from coldstream.gguf.header import Header, TensorInfo, read_header
from coldstream.gguf.messages import describe, shorten
from coldstream.gguf.metadata import Metadata
from coldstream.gguf.open_file import OpenFile, state_at
from coldstream.gguf.shards import check_parts, part_index, shard_paths
from coldstream.gguf.wire import HeaderBytes
from coldstream.gguf.write_watch import WriteWatch

__all__ = ["GGUFFile", "TensorInfo"]

_MAX_READ_BYTES: Final = 1 << 30  # Linux reads at most 2 GiB at once


@dataclass(frozen=True)
class _Shard:
    path: Path
    file: OpenFile
    header: Header


class GGUFFile:
    """An open model. Use as a context manager, or call `close`; reading is safe from several threads.

    metadata     of the first part
    tensors      name → TensorInfo over all parts, in file order
    paths        of the parts, in order
    shown_paths  the same as messages show them: a path need not be text, nor printable
    shard_bytes  sizes of the files at `paths`; num_bytes is their sum
    fingerprint  32 hex digits over headers and sizes: the same model under another name has the same
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]
    shown_paths: tuple[str, ...]
    shard_bytes: tuple[int, ...]
    num_bytes: int
    fingerprint: str

    def __init__(self, shards: tuple[_Shard, ...], watch: WriteWatch) -> None:
        self._shards = shards
        # Also closes a file that is dropped.
        self._close = weakref.finalize(self, _close, [shard.file.descriptor for shard in shards], watch)
        self._close.atexit = False
        self.metadata = shards[0].header.metadata
        merged = {name: info for shard in shards for name, info in shard.header.tensors.items()}
        self.tensors = MappingProxyType(merged)
        self.paths = tuple(shard.path for shard in shards)
        self.shown_paths = tuple(escape_controls(str(path)) for path in self.paths)
        self.shard_bytes = tuple(shard.file.opened.size for shard in shards)
        self.num_bytes = sum(self.shard_bytes)
        digest = hashlib.blake2b(digest_size=16)
        for shard in shards:
            digest.update(shard.header.digest + shard.file.opened.size.to_bytes(8, "little"))
        self.fingerprint = digest.hexdigest()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens the model at `path`, which may be any part of a split one (the others must lie beside it).

        Raises ModelNotFoundError when a file is absent or unreadable, and a subclass of ModelFormatError when
        it is not a regular file or its header is not valid in every respect. OutOfMemoryError where this user
        may open no further file.
        """
        path = Path(path)
        with ExitStack() as cleanup:
            watch = WriteWatch()
            cleanup.callback(watch.close)
            named_index = part_index(path)
            named = _open_shard(path, named_index, watch, cleanup)
            paths = shard_paths(path, named.header.metadata)
            shards = tuple(
                named if index == named_index else _open_shard(part, index, watch, cleanup)
                for index, part in enumerate(paths)
            )
            if len(shards) > 1:
                check_parts([shard.header for shard in shards])
            file = cls(shards, watch)
            cleanup.pop_all()
        return file

    def descriptor(self, shard: int) -> int:
        """The open descriptor of a part, valid until `close`; do not close it or move its file position."""
        return self._shard(shard).file.descriptor

    def read(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor as a fresh uint8 [num_bytes]. Raises ModelChangedError when they are gone."""
        shard = self._shard(info.shard)
        data = np.empty(info.num_bytes, np.uint8)
        view = data.data
        done = 0
        while done < info.num_bytes:
            try:
                count = os.preadv(
                    shard.file.descriptor, [view[done : done + _MAX_READ_BYTES]], info.offset + done
                )
            except OSError as error:
                reason = f"cannot be read: {error.strerror}"
                raise ModelChangedError(
                    describe(shard.path, info.name, info.offset + done, reason)
                ) from error
            if count == 0:
                reason = f"the file ends {info.num_bytes - done} bytes early: it shrank, load it again"
                raise ModelChangedError(describe(shard.path, info.name, info.offset + done, reason))
            done += count
        return data

    def changed(self) -> tuple[Path, ...]:
        """The parts whose names no longer lead to what was opened: gone, replaced, or in `rewritten`.

        A changed part is a reason to stop trusting it, not a proof that its weights differ.
        """
        return tuple(
            shard.path
            for shard in self._shards
            if (now := state_at(shard.path)) is None
            or now.content != shard.file.opened.content
            or shard.file.is_rewritten()
        )

    def rewritten(self) -> tuple[Path, ...]:
        """The parts whose bytes may not be those that were opened; see `OpenFile`.

        Unlike `changed` it looks at the open files, whatever has their names by now: one that was replaced
        or renamed is still the same. Not for several threads at once.
        """
        return tuple(self._shard(i).path for i, shard in enumerate(self._shards) if shard.file.is_rewritten())

    def check_unchanged(self) -> None:
        """Raises ModelChangedError if there is a part in `rewritten`, now and ever after."""
        if rewritten := self.rewritten():
            raise ModelChangedError(
                f"{shorten(rewritten[0])} was written to while in use, and its weights may be others now: "
                "restore the file if that was a mistake, and load the model again"
            )

    def close(self) -> None:
        """Closes all descriptors. What `read` returned stays valid; calling twice is harmless."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shard(self, index: int) -> _Shard:
        if not self._close.alive:
            raise ValueError(f"{self.paths[0]} is closed")
        return self._shards[index]


def _close(descriptors: list[int], watch: WriteWatch) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    watch.close()


def _open_shard(path: Path, index: int, watch: WriteWatch, cleanup: ExitStack) -> _Shard:
    """Opens and checks one part; its descriptor is closed by `cleanup`."""
    try:
        # Checked before it is opened, because opening alone has effects on some devices; and again after,
        # because the path may have been replaced in between. O_NONBLOCK: opening a FIFO must not wait for a
        # writer.
        _require_regular(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        if exhausted := out_of_resources(error):
            raise exhausted from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"{shorten(path)}: {reason}. Give the path of a .gguf file") from error
    cleanup.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    _require_regular(path, status)
    header = read_header(HeaderBytes(descriptor, status.st_size, path), index)
    return _Shard(path, OpenFile(path, descriptor, status, watch), header)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
    raise UnsupportedError(f"{shorten(path)} is {what}: give the path of a .gguf file")
