"""A file of pages, and the folder of such files that one process uses.

    magic 8 | version u32 | bytes of the header u32 | SHA-256 of the header
    header: identity 32 | root 32 | pages u32 | of each page:
        parent 32 | SHA-256 of content and state 32 | content bytes u64 | state bytes u64 | end u32 |
        tokens u32 | token ids i32 …
    of each page: content, state

All numbers are little-endian. A page's key is not stored: it is computed from its tokens. Only its user may
write to the folder. What is read is checked before anything of it is used.
"""

import fcntl
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coldstream.errors import StorageError
from coldstream.files import cannot_write
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache_bytes import Content
from coldstream.kvcache.prefix.pages import Page, PageKeys, sha256
from coldstream.kvcache.prefix.tiers import PrefixSource, page_bytes

MAGIC = b"CSPREFIX"
VERSION = 1  # of this layout and of the arithmetic whose results the pages are
MAX_HEADER_BYTES = 64 << 20
HASH_BYTES = 32
_START = struct.Struct(f"<8sII{HASH_BYTES}s")
_HEADER = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sI")
_PAGE = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sQQII")

ReadAt = Callable[[int, int], bytes]  # (offset, bytes); fewer at the file's end


class DamagedFileError(ValueError):
    """A file that is not as it was written, or of another model, version or kind."""


@dataclass(frozen=True)
class PageContent:
    """A page with its bytes. Only the end of a prefix has bytes of a state.

    Where all layers that attend have windows, these have the bytes of all positions, and a block has none.
    """

    page: Page
    content: Content
    state: Content


@dataclass(frozen=True)
class PagePlace:
    """Where a page's bytes are in a file, and what they were."""

    page: Page
    offset: int
    content_bytes: int
    state_bytes: int
    digest: bytes

    def read(self, read_at: ReadAt) -> PageContent:
        """Raises DamagedFileError for other bytes than were written."""
        both = read_at(self.offset, self.content_bytes + self.state_bytes)
        if sha256(both) != self.digest:
            raise DamagedFileError("a page's bytes have changed")
        return PageContent(self.page, both[: self.content_bytes], both[self.content_bytes :])


@dataclass(frozen=True)
class FileHeader:
    """What a file says of itself. root: of its pages' keys; names the namespace."""

    root: bytes
    places: tuple[PagePlace, ...]


def encode(identity: bytes, root: bytes, pages: Sequence[PageContent]) -> tuple[bytes, tuple[PagePlace, ...]]:
    """The bytes of a file, and where its pages are. identity: a hash of the model and the cache's types."""
    digests = [sha256(b"".join((each.content, each.state))) for each in pages]
    parts = [_HEADER.pack(identity, root, len(pages))]
    for each, digest in zip(pages, digests, strict=True):
        page, sizes = each.page, (len(each.content), len(each.state))
        parts.append(_PAGE.pack(page.parent, digest, *sizes, page.is_end, len(page.tokens)))
        parts.append(page.tokens.astype("<i4").tobytes())
    header = b"".join(parts)
    start = _START.pack(MAGIC, VERSION, len(header), sha256(header))
    places, offset = [], len(start) + len(header)
    for each, digest in zip(pages, digests, strict=True):
        places.append(PagePlace(each.page, offset, len(each.content), len(each.state), digest))
        offset += len(each.content) + len(each.state)
    content = b"".join([start, header, *(part for each in pages for part in (each.content, each.state))])
    return content, tuple(places)


def file_bytes(pages: Sequence[Page], source: PrefixSource) -> int:
    """Bytes of a file of pages."""
    of_pages = sum(_PAGE.size + 4 * len(page.tokens) + page_bytes(page, source) for page in pages)
    return _START.size + _HEADER.size + of_pages


def parse(read_at: ReadAt, num_bytes: int, identity: bytes) -> FileHeader:
    """Reads and checks the header of a file of `num_bytes`. Raises DamagedFileError."""
    start = read_at(0, _START.size)
    if len(start) < _START.size:
        raise DamagedFileError("the file ends in its first bytes")
    magic, version, header_bytes, digest = _START.unpack(start)
    if magic != MAGIC or version != VERSION:
        raise DamagedFileError("the file is of another kind or version")
    if not _HEADER.size <= header_bytes <= min(MAX_HEADER_BYTES, num_bytes - _START.size):
        raise DamagedFileError("the header is longer than the file, or too short")
    header = read_at(_START.size, header_bytes)
    if sha256(header) != digest:
        raise DamagedFileError("the header has changed")
    own_identity, root, num_pages = _HEADER.unpack_from(header)
    if own_identity != identity:
        raise DamagedFileError("the file is of another model or type of cache")
    places = tuple(_places(header, root, num_pages, _START.size + header_bytes))
    end = places[-1].offset + places[-1].content_bytes + places[-1].state_bytes if places else 0
    if end != num_bytes:
        raise DamagedFileError("the file is shorter or longer than its pages, or has none")
    return FileHeader(root, places)


def _places(header: bytes, root: bytes, num_pages: int, offset: int) -> list[PagePlace]:
    keys, at = PageKeys(root), _HEADER.size
    places: list[PagePlace] = []
    for _ in range(num_pages):
        if len(header) - at < _PAGE.size:
            raise DamagedFileError("the header ends within a page")
        parent, digest, content_bytes, state_bytes, is_end, num_tokens = _PAGE.unpack_from(header, at)
        at += _PAGE.size
        if is_end > 1 or num_tokens > BLOCK_POSITIONS or len(header) - at < 4 * num_tokens:
            raise DamagedFileError("a page has more tokens than a block or the header")
        if (num_tokens == BLOCK_POSITIONS) == bool(is_end) or (content_bytes and not num_tokens):
            raise DamagedFileError("a page is neither a whole block nor an end")
        tokens = np.frombuffer(header, "<i4", num_tokens, at).astype(np.int32)
        at += 4 * num_tokens
        page = keys.end(parent, tokens) if is_end else keys.whole(parent, tokens)
        places.append(PagePlace(page, offset, content_bytes, state_bytes, digest))
        offset += content_bytes + state_bytes
    if at != len(header):
        raise DamagedFileError("the header is longer than its pages")
    return places


LOCK = "lock"
SUFFIX = ".prefix"
NAME = re.compile(r"[0-9a-f]{32}")  # of a folder, and of a file before its suffix
TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")  # what `write_file` leaves if the machine goes down


def locked(folder: Path) -> int:
    """A descriptor that keeps other processes from using the folder, which is made if there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_is_ours(folder.lstat(), folder, stat.S_ISDIR)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder / LOCK, flags, 0o600)
    except DamagedFileError as error:
        raise StorageError(f"{error}: choose a folder that only you may write to") from error
    except OSError as error:
        raise cannot_write(folder, error, 0) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{folder} is in use by another process: give each server a folder of its own"
        ) from error
    return descriptor


def limit_others(own: Path, num_bytes: int) -> None:
    """Removes files in the folders beside `own` until they have at most so many bytes.

    The folder used longest ago goes first. One that another process uses stays, and what cannot be removed.
    """
    folders = [each for each in own.parent.iterdir() if each != own and NAME.fullmatch(each.name)]
    found: list[tuple[int, Path, list[tuple[Path, int]]]] = []
    for folder in folders:
        with suppress(OSError):
            files = [(file, file.lstat().st_size) for file in folder.glob("*" + SUFFIX)]
            found.append(((folder / LOCK).lstat().st_mtime_ns, folder, files))
    total = sum(size for _, _, files in found for _, size in files)
    for _, folder, files in sorted(found, key=lambda each: each[:2]):
        if total <= num_bytes:
            return
        try:
            lock = locked(folder)
        except StorageError:
            continue
        try:
            for file, size in files:
                with suppress(OSError):
                    file.unlink()
                    total -= size
        finally:
            os.close(lock)


def _check_is_ours(status: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise DamagedFileError(f"{path} is a link, another user's, or may be written to by others")


@contextmanager
def opened(path: Path) -> Iterator[tuple[ReadAt, os.stat_result]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _check_is_ours(status, path, stat.S_ISREG)
        yield lambda offset, count: os.pread(descriptor, count, offset), status
    finally:
        os.close(descriptor)
