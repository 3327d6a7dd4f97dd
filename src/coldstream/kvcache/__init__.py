"""Keys, values and recurrent states of the sequences in flight. Knows nothing of sampling."""

from coldstream.kvcache.batch import Batch, ChosenToken, Segment
from coldstream.kvcache.cache import (
    AttentionState,
    CacheSize,
    DeltaNetState,
    LayerState,
    ModelCache,
    num_blocks_of,
    state_bytes,
)
from coldstream.kvcache.prefix.cache import Pin, Prefix, PrefixCache, PrefixStatistics
from coldstream.kvcache.prefix.disk_tier import PrefixDisk
from coldstream.kvcache.prefix.ram_tier import PrefixRam
from coldstream.kvcache.prefix.tiers import PrefixTier, TierStatistics
from coldstream.kvcache.sequence import Checkpoint, Sequence
from coldstream.kvcache.sequence_cache import Demand, SequenceCache

__all__ = [
    "AttentionState",
    "Batch",
    "CacheSize",
    "Checkpoint",
    "ChosenToken",
    "DeltaNetState",
    "Demand",
    "LayerState",
    "ModelCache",
    "Pin",
    "Prefix",
    "PrefixCache",
    "PrefixDisk",
    "PrefixRam",
    "PrefixStatistics",
    "PrefixTier",
    "Segment",
    "Sequence",
    "SequenceCache",
    "TierStatistics",
    "num_blocks_of",
    "state_bytes",
]
