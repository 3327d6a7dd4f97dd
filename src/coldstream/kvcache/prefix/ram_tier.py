"""Prefixes in RAM, for models whose own memory is a GPU's, under a budget of bytes."""

from collections import OrderedDict

from coldstream.kvcache.cache_bytes import Content
from coldstream.kvcache.prefix.pages import Array, Digest, Page, PageIndex, PageKeys, sha256
from coldstream.kvcache.prefix.tiers import PrefixSource, SavedPrefix, TierStatistics, page_bytes

PAGE_OVERHEAD = 1024  # bytes of Python's objects for a page; its tokens are counted with its content


class PrefixRam:
    """See `PrefixTier`. Pages used longest ago go first, and never before those that continue them."""

    is_lasting = False

    def __init__(self, budget_bytes: int, digest: Digest = sha256) -> None:
        self._budget_bytes = budget_bytes
        self._digest = digest
        self._index: PageIndex[tuple[Page, Content, Content]] = PageIndex()  # content, state of an end
        self._used: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # namespace and bytes, latest last
        self._num_bytes = 0
        self._saved = self._loaded = self._evicted = 0

    def longest(self, namespace: str, ids: Array, limit: int) -> int:
        """See `PrefixTier`."""
        found = self._index.longest(self._keys(namespace), ids, limit)
        return found.length if found else 0

    def load(self, namespace: str, ids: Array, limit: int, first_block: int) -> SavedPrefix | None:
        """See `PrefixTier`."""
        found = self._index.longest(self._keys(namespace), ids, limit)
        if found is None:
            return None
        self._touch([page for page, _, _ in found.places])
        self._loaded += 1
        blocks = [content for page, content, _ in found.places[first_block:] if len(page.tokens)]
        return SavedPrefix(found.length, blocks, found.places[-1][2])

    def save(self, namespace: str, ids: Array, source: PrefixSource) -> bool:
        """See `PrefixTier`."""
        pages = self._keys(namespace).pages(ids)
        if any(page.key in self._used and page not in self._index for page in pages):
            return False  # equal hashes of different tokens
        sizes = [page_bytes(page, source) + page.tokens.nbytes + PAGE_OVERHEAD for page in pages]
        if sum(sizes) > self._budget_bytes:
            return False
        self._touch([page for page in pages if page in self._index])
        needed = {page.key for page in pages}
        try:
            for number, (page, size) in enumerate(zip(pages, sizes, strict=True)):
                if page in self._index:
                    continue
                self._make_room(size, needed)
                content = source.read_block(number) if len(page.tokens) else b""
                state = source.read_state() if page.is_end else b""
                own = Page(page.key, page.parent, page.tokens.copy(), page.is_end)
                self._index.add(own, (own, content, state))
                self._used[own.key] = namespace, size
                self._num_bytes += size
        finally:
            self._touch([page for page in pages if page.key in self._used])
        self._saved += 1
        return True

    def clear(self, namespace: str | None) -> None:
        """See `PrefixTier`."""
        for key in [key for key, (owner, _) in self._used.items() if namespace in (None, owner)]:
            self._remove(key)

    def statistics(self) -> TierStatistics:
        """See `PrefixTier`."""
        return TierStatistics(
            "ram",
            self._budget_bytes,
            num_bytes=self._num_bytes,
            pages=len(self._used),
            saved=self._saved,
            loaded=self._loaded,
            evicted=self._evicted,
        )

    def close(self) -> None:
        """Frees the memory."""
        self.clear(None)

    def _keys(self, namespace: str) -> PageKeys:
        return PageKeys(self._digest(namespace.encode()), self._digest)

    def _touch(self, pages: list[Page]) -> None:
        """Notes that a prefix was used. Its first page counts as used last, so that it goes last."""
        for page in reversed(pages):
            self._used.move_to_end(page.key)

    def _make_room(self, num_bytes: int, needed: set[bytes]) -> None:
        """Lets pages go, but those needed, until so many bytes are left."""
        while self._num_bytes + num_bytes > self._budget_bytes:
            self._remove(next(key for key in self._used if key not in needed))
            self._evicted += 1

    def _remove(self, key: bytes) -> None:
        _, size = self._used.pop(key)
        self._num_bytes -= size
        self._index.remove(key)
