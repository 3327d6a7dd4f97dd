"""Prefixes in files, which survive a restart: the slowest tier, under a budget of bytes.

One process uses the folder of a model at a time. Files are written whole or not at all. They belong to one
model, type of cache and version, and are checked before anything of them is used. What is damaged, foreign or
writable by others is a miss. A disk that cannot be written to ends the saving, not the requests.
"""

import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coldstream.errors import StorageError
from coldstream.files import write_file
from coldstream.kvcache.cache_bytes import Content
from coldstream.kvcache.prefix.file import (
    NAME,
    SUFFIX,
    TEMPORARY,
    DamagedFileError,
    PageContent,
    PagePlace,
    encode,
    file_bytes,
    limit_others,
    locked,
    opened,
    parse,
)
from coldstream.kvcache.prefix.pages import Array, Page, PageIndex, PageKeys, sha256
from coldstream.kvcache.prefix.tiers import PrefixSource, SavedPrefix, TierStatistics, page_bytes

PART_BYTES = 64 << 20  # of pages, from which on a file is written and another begun


@dataclass(eq=False)
class _File:
    path: Path
    root: bytes
    num_bytes: int
    keys: list[bytes] = field(default_factory=list)  # of its pages that the index has


@dataclass(frozen=True)
class _StoredPage:
    file: _File
    place: PagePlace


class PrefixDisk:
    """See `PrefixTier`. Files used longest ago go first, and never before those that continue them."""

    is_lasting = True

    def __init__(self, folder: Path, identity: bytes, budget_bytes: int) -> None:
        """Opens the folder of a model in `folder`, made if there is none.

        identity: says which model, types of cache and version wrote the bytes. Other models' files that no
        process uses stay as far as the budget allows at this moment. Raises StorageError if the folder cannot
        be used, is another user's, may be written to by others, or is used by another process.
        """
        self._identity = sha256(identity)
        self._budget_bytes = budget_bytes
        self._folder = folder / self._identity.hex()[:32]
        self._index: PageIndex[_StoredPage] = PageIndex()
        self._files: OrderedDict[Path, _File] = OrderedDict()  # latest used last
        self._num_bytes = 0
        self._saved = self._loaded = self._evicted = self._damaged = 0
        self._problem = ""
        self._last_use_ns = 0
        self._lock = locked(self._folder)
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock)
            raise StorageError(f"{self._folder} cannot be read: {error.strerror}; choose another") from error

    def longest(self, namespace: str, ids: Array, limit: int) -> int:
        """See `PrefixTier`."""
        found = self._index.longest(self._keys(namespace), ids, limit)
        return found.length if found else 0

    def load(self, namespace: str, ids: Array, limit: int, first_block: int) -> SavedPrefix | None:
        """See `PrefixTier`."""
        found = self._index.longest(self._keys(namespace), ids, limit)
        if found is None:
            return None
        blocks: list[Content] = []
        state: Content = b""
        for each in found.places[first_block:]:
            try:
                with opened(each.file.path) as (read_at, _):
                    page = each.place.read(read_at)
            except (OSError, DamagedFileError):
                self._damaged += 1
                self._remove(each.file)
                return None
            if len(each.place.page.tokens):
                blocks.append(page.content)
            state = page.state
        self._touch(each.file for each in found.places)
        self._loaded += 1
        return SavedPrefix(found.length, blocks, state)

    def save(self, namespace: str, ids: Array, source: PrefixSource) -> bool:
        """See `PrefixTier`."""
        if self._problem:
            return False
        keys = self._keys(namespace)
        pages = keys.pages(ids)
        needed = {self._index.place(page).file.path for page in pages if page in self._index}
        parts = self._parts([page for page in pages if page not in self._index], source)
        new_bytes = sum(file_bytes(part, source) for part in parts)
        if sum(self._files[path].num_bytes for path in needed) + new_bytes > self._budget_bytes:
            return False
        self._touch(self._index.place(page).file for page in pages if page in self._index)
        numbers = {page.key: number for number, page in enumerate(pages)}
        try:
            for part in parts:
                self._make_room(file_bytes(part, source), needed)
                contents = [
                    PageContent(
                        page,
                        source.read_block(numbers[page.key]) if len(page.tokens) else b"",
                        source.read_state() if page.is_end else b"",
                    )
                    for page in part
                ]
                path = self._write(keys.root, contents)
                if path is None:
                    return False
                needed.add(path)
        finally:
            self._touch(self._index.place(page).file for page in pages if page in self._index)
        self._saved += 1
        return True

    def clear(self, namespace: str | None) -> None:
        """See `PrefixTier`; the files are removed."""
        root = None if namespace is None else self._keys(namespace).root
        for file in [each for each in self._files.values() if root in (None, each.root)]:
            self._remove(file)

    def statistics(self) -> TierStatistics:
        """See `PrefixTier`."""
        return TierStatistics(
            "disk",
            self._budget_bytes,
            num_bytes=self._num_bytes,
            pages=sum(len(file.keys) for file in self._files.values()),
            saved=self._saved,
            loaded=self._loaded,
            evicted=self._evicted,
            damaged=self._damaged,
            problem=self._problem,
        )

    def close(self) -> None:
        """Lets another process use the folder; files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _keys(self, namespace: str) -> PageKeys:
        return PageKeys(sha256(self._identity + namespace.encode()))

    def _scan(self) -> None:
        found: list[tuple[int, str, _File, tuple[PagePlace, ...]]] = []
        for entry in sorted(self._folder.iterdir()):
            if TEMPORARY.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
            elif entry.name.endswith(SUFFIX):
                try:
                    with opened(entry) as (read_at, status):
                        header = parse(read_at, status.st_size, self._identity)
                except (OSError, DamagedFileError):
                    self._damaged += 1
                    if NAME.fullmatch(
                        entry.name.removesuffix(SUFFIX)
                    ):  # another's file is not ours to remove
                        with suppress(OSError):
                            entry.unlink()
                    continue
                file = _File(entry, header.root, status.st_size)
                found.append((status.st_mtime_ns, entry.name, file, header.places))
        for used_ns, _, file, places in sorted(found, key=lambda each: each[:2]):
            self._last_use_ns = max(self._last_use_ns, used_ns)
            self._add(file, places)
        self._make_room(0, set())
        limit_others(self._folder, max(0, self._budget_bytes - self._num_bytes))
        os.utime(self._lock)

    def _add(self, file: _File, places: Collection[PagePlace]) -> None:
        file.keys = [
            place.page.key for place in places if self._index.add(place.page, _StoredPage(file, place))
        ]
        self._files[file.path] = file
        self._num_bytes += file.num_bytes

    def _parts(self, pages: list[Page], source: PrefixSource) -> list[list[Page]]:
        """The pages of each file."""
        parts: list[list[Page]] = []
        size = PART_BYTES
        for page in pages:
            if size >= PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(page)
            size += page_bytes(page, source)
        return parts

    def _write(self, root: bytes, pages: list[PageContent]) -> Path | None:
        """Writes a file of pages. None after a problem, which then ends all writing."""
        content, places = encode(self._identity, root, pages)
        path = self._folder / (secrets.token_hex(16) + SUFFIX)
        try:
            write_file(path, content)
            path.chmod(0o600)
        except (StorageError, OSError) as error:
            self._problem = str(error)
            return None
        self._add(_File(path, root, len(content)), places)
        return path

    def _make_room(self, num_bytes: int, needed: set[Path]) -> None:
        """Removes files, but those needed, until so many bytes are left."""
        while self._num_bytes + num_bytes > self._budget_bytes:
            oldest = next(file for path, file in self._files.items() if path not in needed)
            self._evicted += len(oldest.keys)
            self._remove(oldest)

    def _touch(self, files: Iterable[_File]) -> None:
        """Notes that a prefix was used. The file of its first page counts as used last, so it goes last."""
        for file in reversed(list(dict.fromkeys(files))):
            self._files.move_to_end(file.path)
            # Own times: a file system's clock may stand still between two files.
            self._last_use_ns = max(time.time_ns(), self._last_use_ns + 1)
            with suppress(OSError):
                os.utime(file.path, ns=(self._last_use_ns, self._last_use_ns), follow_symlinks=False)

    def _remove(self, file: _File) -> None:
        with suppress(OSError):
            file.path.unlink(missing_ok=True)
        for key in file.keys:
            self._index.remove(key)
        del self._files[file.path]
        self._num_bytes -= file.num_bytes
