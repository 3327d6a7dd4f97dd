"""One sequence of tokens: which blocks its keys and values lie in, and where its recurrent state is.

Plain records; `sequence_cache.py` alone changes them.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PendingTree:
    """Rows of a draft tree that wait for a commit."""

    parents: tuple[int, ...]  # by row: an earlier row, or −1 for what the sequence has committed
    kept: tuple[int, ...]  # by row: where the layers keep its inputs to the recurrence


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The recurrent state that a sequence had at a length; `SequenceCache.restore` goes back to it."""

    length: int
    state: int | None  # None: of an empty sequence


@dataclass(eq=False)
class Sequence:
    """A sequence of a `SequenceCache`; to be looked at, not to be changed.

    Its blocks cover what is committed and, behind it, the rows that are pending.
    """

    owner: object
    length: int = 0  # tokens that are committed
    blocks: list[int] = field(default_factory=list)  # in order of position
    state: int | None = None  # number of the recurrent state; None until a first step
    pending: PendingTree | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)  # in the order in which they were made
    is_released: bool = False
