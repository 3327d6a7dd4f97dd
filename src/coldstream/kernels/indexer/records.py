"""What indexers read and give; `reference.py` says what they do. Arrays are those of `kernels/ops.py`."""

from dataclasses import dataclass
from typing import Any, Final

Array = Any
INDEXED_BLOCK_SIZES: Final = (4, 8, 16, 32, 64)  # positions of a block that may be chosen


@dataclass(frozen=True)
class IndexerInputs:
    """Projections of new rows for an indexer: float32, unit stride along the last dimension."""

    query: Array  # [T, n·d]
    key: Array  # [T, d]
    angles: Array  # [T, rope dimensions / 2, 2], contiguous, as that of attention
    block_angles: Array  # the same of the first position of the block that a row is in


@dataclass(frozen=True)
class IndexerHeads:
    """How an indexer of `n` heads of `d` values chooses blocks; see `kernels/indexer/reference.py`."""

    q_norm: Array  # [d]
    k_norm: Array  # [d]
    eps: float
    top_k: int  # positions of complete blocks that a row sees at most
    block_size: int

    def num_words(self, num_positions: int) -> int:
        """Of a row, for sequences of so many positions at most."""
        return -(-num_positions // (32 * self.block_size))


@dataclass(frozen=True)
class ChosenBlocks:
    """The blocks of positions that rows see: bit b of word w is block 32·w + b."""

    words: Array  # int32 [T, words], contiguous
    block_size: int
