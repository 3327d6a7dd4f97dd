"""What a prefix cache needs, gives, counts and keeps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.prefix.tier import TierStatistics
from coldstream.kvcache.prefix.tiers import Contents
from coldstream.kvcache.prefix.tree import Node
from coldstream.kvcache.sequence import Sequence


class SequenceMemory(Contents, Protocol):
    """The part of a `ModelRunner` that the cache needs."""

    def new_sequence(self) -> Sequence: ...
    def branch(self, sequence: Sequence) -> Sequence: ...
    def release(self, sequence: Sequence) -> None: ...
    @property
    def free(self) -> CacheSize: ...
    def freed_by(self, sequences: Collection[Sequence]) -> CacheSize: ...


@dataclass(frozen=True)
class Prefix:
    """What a prompt begins with."""

    sequence: Sequence  # the caller's, who releases it
    length: int  # tokens of the prompt that it holds; at least one is left to compute
    cuts: tuple[int, ...]  # longer lengths at which a step is to end and `PrefixCache.keep` to be called


@dataclass(frozen=True)
class PrefixStatistics:
    """Counts since the cache was made, and what it holds."""

    prompts: int = 0
    hits: int = 0  # prompts of which something was kept
    prompt_tokens: int = 0
    reused_tokens: int = 0
    repeated_tokens: int = 0  # known from prompts before, and yet to be computed again
    keeps: int = 0
    refused: int = 0  # prefixes not kept as all that is kept is pinned
    evictions: int = 0
    restored: int = 0  # prefixes that came back from a tier
    kept: int = 0  # now
    pinned: int = 0  # now
    remembered_tokens: int = 0  # now, of prompts of which nothing is kept
    out_of_memory: int = 0  # prefixes that tiers lacked RAM to take or to give back
    tiers: tuple[TierStatistics, ...] = ()


@dataclass(eq=False)
class Kept:
    """A kept prefix, whose sequence is the cache's."""

    node: "Node[Kept]"
    namespace: str
    sequence: Sequence
    uses: float  # decayed, as of prompt number `last_use`
    last_use: int
    num_pins: int = 0
    is_saved: bool = False  # or refused, by the tiers that last
    is_gone: bool = False


class Pin:
    """A prefix that stays until `PrefixCache.unpin` or `clear`."""

    def __init__(self, kept: Kept) -> None:
        self._kept: Kept | None = kept
        self.length = kept.node.length

    def take(self) -> Kept | None:
        """What is pinned, once."""
        kept, self._kept = self._kept, None
        return kept
