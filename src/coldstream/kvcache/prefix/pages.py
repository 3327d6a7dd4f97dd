"""Prefixes in pages, for tiers beside a model's own memory. Pure: keys and what is known of pages.

A page is a whole block of keys and values, or the end of a prefix: the positions after its last whole block,
and its recurrent state. The key of a page is a hash of all tokens up to its end, so that prefixes with common
tokens have common pages. Tokens are compared all the same: an equal hash of other tokens is never a hit.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from coldstream.kernels.ops import BLOCK_POSITIONS

Array = np.ndarray[Any, Any]
Where = TypeVar("Where")
Digest = Callable[[bytes], bytes]


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@dataclass(frozen=True, eq=False)
class Page:
    """tokens: those after the parent's, BLOCK_POSITIONS or, of an end, fewer."""

    key: bytes
    parent: bytes
    tokens: Array  # int32
    is_end: bool

    def is_same(self, other: "Page") -> bool:
        """Whether it is of the same tokens after the same parent."""
        return (
            self.parent == other.parent
            and self.is_end == other.is_end
            and np.array_equal(self.tokens, other.tokens)
        )


@dataclass(frozen=True)
class Found(Generic[Where]):
    """A prefix all of whose pages are known."""

    length: int
    places: tuple[Where, ...]  # of its pages in order, the end last


class PageKeys:
    """The pages of prefixes under one root."""

    def __init__(self, root: bytes, digest: Digest = sha256) -> None:
        """root: names the model and the namespace."""
        self.root = root
        self._digest = digest

    def whole(self, parent: bytes, tokens: Array) -> Page:
        """The page of a whole block."""
        return self._page(parent, tokens, is_end=False)

    def end(self, parent: bytes, tokens: Array) -> Page:
        """The page of the tokens after the last whole block, possibly none."""
        return self._page(parent, tokens, is_end=True)

    def _page(self, parent: bytes, tokens: Array, *, is_end: bool) -> Page:
        kind = b"end" if is_end else b"block"
        key = self._digest(kind + parent + np.ascontiguousarray(tokens, "<i4").tobytes())
        return Page(key, parent, tokens, is_end)

    def pages(self, ids: Array) -> list[Page]:
        """The pages of a prefix, its end last."""
        pages: list[Page] = []
        parent = self.root
        for start in range(0, len(ids) - BLOCK_POSITIONS + 1, BLOCK_POSITIONS):
            pages.append(self.whole(parent, ids[start : start + BLOCK_POSITIONS]))
            parent = pages[-1].key
        pages.append(self.end(parent, ids[len(pages) * BLOCK_POSITIONS :]))
        return pages


class PageIndex(Generic[Where]):
    """Which pages there are, and where."""

    def __init__(self) -> None:
        self._pages: dict[bytes, tuple[Page, Where]] = {}
        self._ends: dict[bytes, dict[bytes, Page]] = {}  # by parent and key

    def __contains__(self, page: Page) -> bool:
        known = self._pages.get(page.key)
        return known is not None and known[0].is_same(page)

    def place(self, page: Page) -> Where:
        """Where a known page is."""
        return self._pages[page.key][1]

    def add(self, page: Page, where: Where) -> bool:
        """Adds a page. False, with nothing changed, if there is one with its key already."""
        if page.key in self._pages:
            return False
        self._pages[page.key] = page, where
        if page.is_end:
            self._ends.setdefault(page.parent, {})[page.key] = page
        return True

    def remove(self, key: bytes) -> None:
        """Removes a known page."""
        page, _ = self._pages.pop(key)
        if page.is_end:
            ends = self._ends[page.parent]
            del ends[key]
            if not ends:
                del self._ends[page.parent]

    def longest(self, keys: PageKeys, ids: Array, limit: int) -> Found[Where] | None:
        """The longest prefix of `ids`, of at most `limit` tokens, whose pages are all known."""
        places: list[Where] = []
        found: Found[Where] | None = None
        parent, start = keys.root, 0
        while True:
            for end in self._ends.get(parent, {}).values():
                length = start + len(end.tokens)
                is_longer = length <= limit and length > (found.length if found else 0)
                if is_longer and np.array_equal(end.tokens, ids[start:length]):
                    found = Found(length, (*places, self.place(end)))
            if start + BLOCK_POSITIONS > limit:
                return found
            page = keys.whole(parent, ids[start : start + BLOCK_POSITIONS])
            if page not in self:
                return found
            places.append(self.place(page))
            parent, start = page.key, start + BLOCK_POSITIONS
