"""What drafts take of a runner's memory."""

from dataclasses import dataclass
from typing import Final

# Of a key or value that a DFlash drafter keeps: float32 on the CPU, bfloat16 on a GPU, where features and
# weights are bfloat16 too.
DRAFT_VALUE_BYTES: Final = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True)
class DraftRoom:
    """Beside what a runner without drafts takes."""

    num_tree_rows: int = 0  # of draft trees that are pending
    has_mtp: bool = False  # whether the file's block for multi-token prediction drafts
    drafter_bytes: int = 0  # of another drafter
    aux_layers: tuple[int, ...] = ()  # layers whose residual streams it reads


NO_DRAFTS: Final = DraftRoom()
