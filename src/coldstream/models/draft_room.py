"""What a runner's memory has room for beside weights: sequences, and drafts for them."""

from dataclasses import dataclass
from typing import Final

from coldstream.kvcache.cache import CacheSize

# Of a value of what PyTorch computes drafts with: float32 on the CPU, bfloat16 on a GPU (`dflash/model.py`).
DRAFT_VALUE_BYTES: Final = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True)
class DraftRoom:
    """Beside what a runner without drafts takes."""

    num_tree_rows: int = 0  # of draft trees that are pending
    has_mtp: bool = False  # whether the file's block for multi-token prediction drafts
    drafter_bytes: int = 0  # of another drafter
    aux_layers: tuple[int, ...] = ()  # layers whose residual streams it reads


NO_DRAFTS: Final = DraftRoom()


@dataclass(frozen=True)
class Capacity:
    """What a runner can hold, on any device."""

    ctx_size: int  # tokens of a sequence, at most
    kv_type: str  # the name of a `CacheLayout`
    cache_size: CacheSize  # what all sequences share
    draft: DraftRoom = NO_DRAFTS
