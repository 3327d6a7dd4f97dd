"""Tiers beside a model's own memory, which hold the bytes of prefixes under budgets.

A `PrefixTier` is RAM (`ram_tier.py`) or files (`disk_tier.py`). `PrefixTiers` are those of one cache. It
finds which has the longest prefix, and moves sequences to and from their bytes.
"""

from collections.abc import Collection
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache_bytes import Content, block_bytes
from coldstream.kvcache.prefix.pages import Array, Page
from coldstream.kvcache.sequence import Sequence
from coldstream.kvcache.sequence_cache import SequenceCache


class PrefixSource(Protocol):
    """The bytes of a prefix to be saved."""

    position_bytes: int
    state_bytes: int

    def read_block(self, index: int) -> Content:
        """Block number `index`; of the last block only the prefix's positions."""

    def read_state(self) -> Content: ...


@dataclass(frozen=True)
class SavedPrefix:
    """The bytes of a prefix, as `SequenceCache.written` takes them."""

    length: int
    blocks: Listed[Content]  # from some block on
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
        """The prefix that `longest` found, from a block on. None, now and later, if it is damaged."""

    def save(self, namespace: str, ids: Array, source: PrefixSource) -> bool:
        """Takes a prefix, and reads what it lacks of it. False if the tier does not have it afterwards.

        A prefix that is larger than the budget evicts nothing.
        """

    def clear(self, namespace: str | None) -> None:
        """Forgets a namespace, or all."""

    def statistics(self) -> TierStatistics: ...
    def close(self) -> None: ...


def page_bytes(page: Page, source: PrefixSource) -> int:
    """Bytes of a page's content and state."""
    return len(page.tokens) * source.position_bytes + (source.state_bytes if page.is_end else 0)


class CacheAccess(Protocol):
    """The part of a `ModelRunner` that tiers need."""

    def contents(self) -> AbstractContextManager[SequenceCache]: ...


class _Source:
    """See `PrefixSource`."""

    def __init__(self, cache: SequenceCache, sequence: Sequence) -> None:
        self._cache, self._sequence = cache, sequence
        self.position_bytes = block_bytes(cache.tensors, 1)
        self.state_bytes = cache.state_bytes(sequence.length)

    def read_block(self, index: int) -> Content:
        return self._cache.read_block(self._sequence, index)

    def read_state(self) -> Content:
        return self._cache.read_state(self._sequence)


class PrefixTiers:
    """Tiers in order, the fastest first. It owns them."""

    def __init__(self, memory: CacheAccess, tiers: Collection[PrefixTier]) -> None:
        self._memory = memory
        self._tiers = tuple(tiers)
        self.has_lasting = any(tier.is_lasting for tier in tiers)
        self.out_of_memory = 0  # prefixes not saved or restored as the machine's memory had run out
        self.is_fast = bool(tiers) and not self._tiers[0].is_lasting  # `take` writes no file

    def longest(self, namespace: str, ids: Array, limit: int) -> int:
        """Tokens of the longest prefix of `ids` that a tier has, at most `limit`; 0 for none."""
        return max((tier.longest(namespace, ids, limit) for tier in self._tiers), default=0)

    def restored(self, namespace: str, ids: Array, start: int, base: Sequence | None) -> Sequence | None:
        """A sequence with the longest prefix of all but the last of `ids`, at least a block beyond `start`.

        base: a sequence that begins with `start` tokens of the prefix, and whose whole blocks of them it
        shares. There has to be room. None if all that tiers have turns out to be damaged or too short. Raises
        DeviceError.
        """
        limit = len(ids) - 1
        first_block = start // BLOCK_POSITIONS if base else 0
        least = start + BLOCK_POSITIONS
        order = sorted(self._tiers, key=lambda tier: -tier.longest(namespace, ids, limit))  # stable
        for tier in order:
            if tier.longest(namespace, ids, limit) < least:
                continue
            try:
                saved = tier.load(namespace, ids, limit, first_block)
                if saved is not None:
                    with self._memory.contents() as cache:
                        return cache.written(saved.length, saved.blocks, saved.state, base)
            except MemoryError:
                self.out_of_memory += 1
        return None

    def take(self, namespace: str, ids: Array, sequence: Sequence) -> None:
        """Gives the fastest tier an evicted prefix. Slower tiers would delay steps."""
        self._save(self._tiers[:1], namespace, ids, sequence)

    def save(self, namespace: str, ids: Array, sequence: Sequence) -> None:
        """Gives a prefix that is a sequence's to the tiers that last."""
        self._save([tier for tier in self._tiers if tier.is_lasting], namespace, ids, sequence)

    def _save(self, tiers: Collection[PrefixTier], namespace: str, ids: Array, sequence: Sequence) -> None:
        if len(ids) < BLOCK_POSITIONS or not tiers:
            return
        with self._memory.contents() as cache:
            source = _Source(cache, sequence)
            for tier in tiers:
                try:
                    tier.save(namespace, ids, source)
                except MemoryError:
                    self.out_of_memory += 1

    def clear(self, namespace: str | None) -> None:
        """Forgets a namespace, or all."""
        for tier in self._tiers:
            tier.clear(namespace)

    def statistics(self) -> tuple[TierStatistics, ...]:
        """By tier, in order."""
        return tuple(tier.statistics() for tier in self._tiers)

    def close(self) -> None:
        """Closes the tiers."""
        for tier in self._tiers:
            tier.close()
