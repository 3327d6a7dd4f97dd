"""GGUFFile: a model file, or all parts of a split one, opened, checked and read by pread.

Opening reads the headers only. Nothing is mapped here: a file that shrinks makes `read` raise
ModelChangedError and never kills the process. Code that maps weights uses `descriptor`, with its own
protection.

A split model is `NAME-00001-of-0000N.gguf` … in one directory. The parts are found by that name alone, never
by anything written in a file. Links need a rule: hub caches keep the bytes in `blobs/` and present every
file as a link to there, but a link beside a model must not make us read a file elsewhere. The part that the
user named may lie anywhere. The directory where it lies and the one where it was named are the model's
directories. Every other part must lie in one of them, which in a hub cache is `blobs/`.

`OpenFile` detects whether bytes may have changed since a file was opened. It asks for the file's status alone
as long as this stays the same, which is cheap enough for every token. It misses writes that leave no trace in
the times, through an older mapping or within one tick of the clock. It also misses changes that a network
file system has not reported yet.
"""

import hashlib
import os
import re
import stat
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import numpy as np

from coldstream.closing import Closing
from coldstream.errors import (
    DuplicateError,
    InconsistentError,
    ModelChangedError,
    ModelNotFoundError,
    UnsupportedError,
    escape_controls,
    out_of_resources,
)
from coldstream.gguf.header import Header, TensorInfo, read_header
from coldstream.gguf.messages import describe, shorten
from coldstream.gguf.metadata import Metadata, Value
from coldstream.gguf.wire import HeaderBytes
from coldstream.gguf.write_watch import ATTRIB, CLOSE_WRITE, MODIFY, OVERFLOW, WriteWatch

MAX_SHARDS: Final = 512

_PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def shard_count(metadata: Metadata) -> int:
    """In how many parts the model comes, according to one of them."""
    return metadata.integer("split.count", 0, MAX_SHARDS, 1) or 1


def part_index(path: Path) -> int:
    """The index of the part by its name, from 0; 0 for a name of any other form."""
    match = _PART_NAME.fullmatch(path.name)
    return max(int(match["number"]) - 1, 0) if match else 0


def shard_paths(path: Path, metadata: Metadata) -> tuple[Path, ...]:
    """The paths of all parts of the model of which `path` is one, in order; `path` alone if it is not split.

    Raises InconsistentError when name and metadata disagree, or when a part is a link that leaves the model's
    directories. Does not check whether the parts exist.
    """
    count = shard_count(metadata)
    match = _PART_NAME.fullmatch(path.name)
    if match is None and count == 1:
        return (path,)
    if match is None:
        problem = f"{count}, but the name is not …-00001-of-{count:05}.gguf: the other parts can't be found"
        raise metadata.error(InconsistentError, "split.count", problem)
    if int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        problem = f"{count}, but the file is named {path.name}: give it the name it was published under"
        raise metadata.error(InconsistentError, "split.count", problem)
    paths = tuple(path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    _check_links(path, paths)
    return paths


def _check_links(named: Path, paths: Sequence[Path]) -> None:
    home = os.path.realpath(named.parent)
    homes = {home, os.path.dirname(os.path.realpath(named))}
    for path in paths:
        target = os.path.realpath(path)
        if os.path.dirname(target) not in homes:
            raise InconsistentError(
                f"{shorten(path)}: links to another directory than {named.name}: put all parts into one"
            )


def check_parts(headers: Sequence[Header]) -> None:
    """Raises InconsistentError or DuplicateError unless `headers` are parts 0 … n−1 of one model."""
    first = headers[0].metadata
    architecture = first.get("general.architecture")
    names: dict[str, TensorInfo] = {}
    for index, header in enumerate(headers):
        metadata = header.metadata
        if shard_count(metadata) != len(headers):
            problem = f"{shard_count(metadata)}, but {len(headers)} in {first.path.name}: from another model"
            raise metadata.error(InconsistentError, "split.count", problem)
        number = metadata.integer("split.no", 0, MAX_SHARDS)
        if number != index:
            problem = f"{number}, expected {index}: the parts were renamed or copied over each other"
            raise metadata.error(InconsistentError, "split.no", problem)
        if metadata.get("general.architecture", architecture) != architecture:
            problem = f"differs from {first.path.name}: a part of another model"
            raise metadata.error(InconsistentError, "general.architecture", problem)
        _merge(names, header.tensors, metadata)
    for header in headers:
        total = header.metadata.integer("split.tensors.count", 0, 1 << 31)
        if total != len(names):
            problem = f"{total}, but the parts hold {len(names)} tensors together: a part of another model"
            raise header.metadata.error(InconsistentError, "split.tensors.count", problem)


def _merge(names: dict[str, TensorInfo], more: Mapping[str, TensorInfo], metadata: Metadata) -> None:
    for name, info in more.items():
        if name in names:
            problem = f"also in part {names[name].shard + 1}: from another model, or copied over another part"
            raise metadata.error(DuplicateError, name, problem)
        names[name] = info


# Of a file of up to 16 MiB these are all bytes. A disk reads them in some 50 ms, a spinning one in 3 s.
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class FileState:
    """What changes with the bytes (content), without them (others), and with or without them (ctime_ns)."""

    content: tuple[int, int, int, int]  # device, inode, size, mtime_ns
    ctime_ns: int
    others: tuple[int, int, int, int]  # number of names, mode, owner, group

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """From the result of `os.stat` or `os.fstat`."""
        return cls(
            (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns),
            status.st_ctime_ns,
            (status.st_nlink, status.st_mode, status.st_uid, status.st_gid),
        )

    @property
    def size(self) -> int:
        return self.content[2]

    @property
    def written_ns(self) -> int:
        return self.content[3]


class OpenFile:
    """A descriptor, and the state in which its file was when it was opened by the name `path`.

    Another size or time of writing means that bytes may have changed. A change of the inode alone (ctime) may
    be a write after which the time of writing was put back, or a change of attributes. Evidence decides, the
    cheapest first:

    1. What `watch` heard since the file was opened: a write, or a change of attributes and nothing else.
    2. Without such news, the number of names, the mode, the owner, or whether `path` names the file: linking,
       renaming, deleting and chmod explain the change.
    3. Otherwise bytes: samples from all over the file are compared with what they were at the first check.
       This alone misses a write between the samples whose time was put back.
    """

    def __init__(self, path: Path, descriptor: int, status: os.stat_result, watch: WriteWatch) -> None:
        self.path = Path(os.path.abspath(path))
        self.descriptor = descriptor
        self.opened = self._seen = FileState.of(status)
        self._watch = watch
        self._watched = watch.add(descriptor)
        self._samples: bytes | None = None  # a digest
        self._status = status  # the status that was compared last
        self._was_named = True
        self._is_rewritten = False

    def is_rewritten(self) -> bool:
        """Whether bytes may not be those that were opened. Once they may not, they never are again."""
        if not self._is_rewritten:
            status = os.fstat(self.descriptor)
            if status[:-3] != self._status[:-3] or _times(status) != _times(self._status):
                self._status = status
                self._is_rewritten = self._may_differ(FileState.of(status))
            if self._samples is None and not self._is_rewritten:
                self._keep_samples()
        return self._is_rewritten

    def _may_differ(self, now: FileState) -> bool:
        if now.content != self.opened.content:
            return True
        before, was_named = self._seen, self._was_named
        self._seen, self._was_named = now, self._is_named()
        if now.ctime_ns == before.ctime_ns:
            return False
        heard = self._watch.take(self._watched)
        if heard & MODIFY:
            return True
        if heard & ATTRIB and not heard & (CLOSE_WRITE | OVERFLOW):
            return False
        is_explained = now.others != before.others or was_named != self._was_named
        if is_explained and not heard & CLOSE_WRITE:
            return False
        return self._samples is None or self._digest() != self._samples

    def _keep_samples(self) -> None:
        """Takes the samples, unless the file changes meanwhile: then the next check tries again."""
        samples = self._digest()
        status = os.fstat(self.descriptor)
        if FileState.of(status) == self._seen:
            self._samples = samples

    def _digest(self) -> bytes | None:
        """Of samples at equal distances, the first and the last bytes among them. None if reading fails."""
        digest = hashlib.blake2b(digest_size=16)
        last = max(0, self.opened.size - _SAMPLE_BYTES)
        step = max(_SAMPLE_BYTES, -(-last // (_NUM_SAMPLES - 1)))
        try:
            for offset in (*range(0, last, step), last):
                digest.update(os.pread(self.descriptor, _SAMPLE_BYTES, offset))
        except OSError:
            return None
        return digest.digest()

    def _is_named(self) -> bool:
        """Whether `path` names this file."""
        state = state_at(self.path)
        return state is not None and state.content[:2] == self.opened.content[:2]


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_ctime_ns


def state_at(path: Path) -> FileState | None:
    """The state of the file that `path` names now; None if it cannot be determined."""
    try:
        return FileState.of(os.stat(path))
    except OSError:
        return None


__all__ = ["GGUFFile", "TensorInfo"]

_MAX_READ_BYTES: Final = 1 << 30  # Linux reads at most 2 GiB at once


@dataclass(frozen=True)
class _Shard:
    path: Path
    file: OpenFile
    header: Header


class GGUFFile(Closing):
    """An open model. Use as a context manager, or call `close`; reading is safe from several threads.

    metadata     of the first part
    tensors      name → TensorInfo over all parts, in file order
    paths        of the parts, in order
    shown_paths  the same as messages show them: a path need not be text, nor printable
    shard_bytes  sizes of the files at `paths`; num_bytes is their sum
    written_ns   times of writing of the files, as they were opened
    num_parts    of the model itself; parts of files that were joined to it lie behind
    fingerprint  32 hex digits over headers and sizes: the same model under another name has the same
    joined       the fingerprint of the file that was joined to it, or nothing
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]
    shown_paths: tuple[str, ...]
    shard_bytes: tuple[int, ...]
    num_bytes: int
    written_ns: tuple[int, ...]
    num_parts: int
    fingerprint: str
    joined: str

    def __init__(self, shards: tuple[_Shard, ...], watches: tuple[WriteWatch, ...]) -> None:
        """The shards that `open` opened, with what watches them."""
        self._hold(shards, watches)
        self.metadata = shards[0].header.metadata
        merged = {name: info for shard in shards for name, info in shard.header.tensors.items()}
        self.tensors = MappingProxyType(merged)
        self.num_parts, self.joined = len(shards), ""
        digest = hashlib.blake2b(digest_size=16)
        for shard in shards:
            digest.update(shard.header.digest + shard.file.opened.size.to_bytes(8, "little"))
        self.fingerprint = digest.hexdigest()

    def _hold(self, shards: tuple[_Shard, ...], watches: tuple[WriteWatch, ...]) -> None:
        """Takes over open shards, with all that is known of their files."""
        self._shards, self._watches = shards, watches
        self._kept: dict[str, np.ndarray] = {}  # by the name of a tensor
        # Also closes a file that is dropped.
        self._close = weakref.finalize(self, _close, [shard.file.descriptor for shard in shards], watches)
        self._close.atexit = False
        self.paths = tuple(shard.path for shard in shards)
        self.shown_paths = tuple(escape_controls(str(path)) for path in self.paths)
        self.shard_bytes = tuple(shard.file.opened.size for shard in shards)
        self.num_bytes = sum(self.shard_bytes)
        self.written_ns = tuple(shard.file.opened.written_ns for shard in shards)

    def join(self, other: "GGUFFile", names: Iterable[str], values: Mapping[str, Value]) -> None:
        """Adds tensors of another open file, which belongs to this one from now on, and changes metadata.

        The tensors keep their names, which must be new here. The model's identity, its fingerprint, stays.
        """
        assert self.num_parts == len(self._shards), "one file is joined at most"
        added = {
            name: replace(other.tensors[name], shard=other.tensors[name].shard + self.num_parts)
            for name in names
        }
        assert not added.keys() & self.tensors.keys(), "names are new"
        for file in (self, other):
            file._kept.clear()
            file._close.detach()
        self._hold(self._shards + other._shards, self._watches + other._watches)
        self.tensors = MappingProxyType({**self.tensors, **added})
        self.metadata = self.metadata.with_values(values)
        self.joined = other.fingerprint

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens the model at `path`, which may be any part of a split one (the others must lie beside it).

        Raises ModelNotFoundError when a file is absent or unreadable. Raises a subclass of ModelFormatError
        when it is not a regular file or its header is not valid in every respect. OutOfMemoryError where this
        user may open no further file.
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
            file = cls(shards, (watch,))
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

    def read_kept(self, info: TensorInfo) -> np.ndarray:
        """`read`, from memory after the first time. The result is not to be written, and kept until `close`.

        For small tensors that are looked at several times. Each read lets other threads have the
        interpreter's lock, and waits until they give it back.
        """
        if (data := self._kept.get(info.name)) is None:
            data = self._kept[info.name] = self.read(info)
            data.flags.writeable = False
        return data

    def changed(self) -> tuple[Path, ...]:
        """The parts whose names no longer lead to what was opened: gone, replaced, or in `rewritten`.

        A changed part is a reason to load it again, not a proof that its weights differ.
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
        self._kept.clear()
        self._close()

    def _shard(self, index: int) -> _Shard:
        if not self._close.alive:
            raise ValueError(f"{self.paths[0]} is closed")
        return self._shards[index]


def _close(descriptors: list[int], watches: Iterable[WriteWatch]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    for watch in watches:
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
