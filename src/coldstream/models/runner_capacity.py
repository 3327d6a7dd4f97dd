"""RunnerCapacity: the sequences and drafts that a runner has memory for, on any device."""

from dataclasses import dataclass

from coldstream.kvcache.cache import CacheSize
from coldstream.models.draft_room import NO_DRAFTS, DraftRoom


@dataclass(frozen=True)
class RunnerCapacity:
    """What a plan counts a runner's memory for, beside weights."""

    ctx_size: int  # tokens of a sequence, at most
    kv_type: str  # the name of a `CacheLayout`
    cache_size: CacheSize  # what all sequences share
    draft: DraftRoom = NO_DRAFTS
