"""The sequences and drafts that a runner has memory for, on any device."""

from dataclasses import dataclass
from typing import Final

from coldstream.kvcache.cache import CacheSize

# Bytes of a key or value that a DFlash drafter keeps. On a GPU the features that it reads take as many.
DRAFT_VALUE_BYTES: Final = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True)
class DraftMemory:
    """What drafts add to a runner's memory."""

    num_tree_rows: int = 0  # rows of draft trees that are pending
    has_mtp: bool = False  # whether the file's block for multi-token prediction drafts
    drafter_bytes: int = 0  # bytes of another drafter
    aux_layers: tuple[int, ...] = ()  # layers whose residual streams that drafter reads


NO_DRAFTS: Final = DraftMemory()


@dataclass(frozen=True)
class RunnerCapacity:
    """What a plan counts a runner's memory for, beside weights."""

    ctx_size: int  # tokens of a sequence, at most
    kv_type: str  # the name of a `CacheLayout`
    cache_size: CacheSize  # what all sequences share
    draft: DraftMemory = NO_DRAFTS
