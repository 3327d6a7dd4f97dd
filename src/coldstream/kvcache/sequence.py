"""Records of a sequence: the blocks of its keys and values, its recurrent state, its checkpoints.

Only `sequence_cache.py` changes them.
"""

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class PendingTree:
    """Rows of a draft tree before a commit."""

    parents: tuple[int, ...]  # by row: an earlier row, or −1 for what the sequence has committed
    kept: tuple[int, ...]  # by row: its row in `KeptInputs`


@dataclass(frozen=True)
class HeldWindow:
    """Blocks of layers with windows from number `first` on, in order of position."""

    first: int = 0
    blocks: tuple[int, ...] = ()


NO_WINDOW: Final = HeldWindow()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a sequence had at a length and may lose; `SequenceCache.restore` goes back to it."""

    length: int
    state: int | None  # None: of an empty sequence
    window: HeldWindow = NO_WINDOW


@dataclass(eq=False)
class Sequence:
    """A sequence of a `SequenceCache`; read only for others.

    Its blocks cover the committed positions and the pending rows after them.
    """

    owner: object
    length: int = 0  # committed tokens
    blocks: list[int] = field(default_factory=list)  # in order of position
    state: int | None = None  # number of the recurrent state; None until a first step
    pending: PendingTree | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)  # the oldest first
    is_released: bool = False
    # Those of layers with windows, where these are a group of their own. Before the first held one are voids.
    windows: list[int] = field(default_factory=list)
    first_held: int = 0


Forks = tuple[tuple[int, Sequence], ...]  # (rows before it, empty sequence), ascending
