"""What a tier beside a model's own memory is: it holds the bytes of prefixes under a budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coldstream.kvcache.cache_bytes import Content
from coldstream.kvcache.prefix.pages import Array, Page


class PrefixSource(Protocol):
    """The bytes of a prefix to be saved."""

    position_bytes: int
    state_bytes: int

    def read_block(self, index: int) -> Content:
        """Block number `index`; of the last, the positions of the prefix."""

    def read_state(self) -> Content: ...


@dataclass(frozen=True)
class SavedPrefix:
    """The bytes of a prefix, as `SequenceCache.written` takes them."""

    length: int
    blocks: Sequence[Content]  # from some block on
    state: Content


@dataclass(frozen=True)
class TierStatistics:
    """Counts since the tier was opened, and what it holds."""

    name: str
    budget_bytes: int
    num_bytes: int = 0  # now
    pages: int = 0  # now
    saved: int = 0  # prefixes
    loaded: int = 0  # prefixes
    evicted: int = 0  # pages
    damaged: int = 0  # prefixes or files that were not as they had been written
    problem: str = ""  # why the tier saves nothing any more


class PrefixTier(Protocol):
    """Prefixes by namespace and tokens. No method raises for what is wrong with its storage: it is a miss."""

    @property
    def is_lasting(self) -> bool:
        """Whether it survives the process."""

    def longest(self, namespace: str, ids: Array, limit: int) -> int:
        """Tokens of the longest prefix of `ids` that it has, at most `limit`; 0 for none."""

    def load(self, namespace: str, ids: Array, limit: int, first_block: int) -> SavedPrefix | None:
        """That prefix, from a block on; None if it turned out to be damaged, and is not found again."""

    def save(self, namespace: str, ids: Array, source: PrefixSource) -> bool:
        """Takes a prefix, of which it reads what it lacks. False if it does not have it afterwards.

        What can't have room within the budget, whatever else went, pushes nothing out.
        """

    def clear(self, namespace: str | None) -> None:
        """Forgets a namespace, or all."""

    def statistics(self) -> TierStatistics: ...
    def close(self) -> None: ...


def page_bytes(page: Page, source: PrefixSource) -> int:
    """Bytes of a page's content and state."""
    return len(page.tokens) * source.position_bytes + (source.state_bytes if page.is_end else 0)
