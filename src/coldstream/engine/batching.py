"""Chooses the sequences of the next step, their rows, and the finished sequences to keep.

Pure functions over numbers; `side_by_side.py` runs the steps. Sequences are served in order: as many from the
first on as fit into the blocks together. The first always fits, so that every sequence is computed at some
time. If new tokens need more blocks than there are, the last sequences lose theirs and are computed again
later, with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coldstream.kvcache import num_blocks_of


@dataclass(frozen=True)
class Room:
    """Capacity for all sequences together."""

    num_blocks: int
    num_sequences: int
    num_rows: int  # per step


@dataclass(frozen=True)
class Need:
    """An unfinished sequence."""

    length: int  # of its tokens, computed or not
    num_computed: int  # less than length
    cut: int = 0  # a step ends after this many tokens, where other sequences branch off
    is_waiting: bool = False  # until another sequence reaches its cut


@dataclass(frozen=True)
class Turn:
    """The sequences with memory in the next step."""

    num_running: int  # sequences in the step, from the first on
    num_kept: int


def next_turn(needs: Sequence[Need], kept_lengths: Sequence[int], room: Room) -> Turn:
    """How many of `needs`, in order, fit into the next step. The first must not be waiting.

    kept_lengths: lengths of finished sequences that others may continue, the most valuable first; as many are
    kept as then still fit.
    """
    num_running, free_blocks = 0, room.num_blocks
    for need in needs[: min(room.num_sequences, room.num_rows)]:
        if need.is_waiting or num_blocks_of(need.length) > free_blocks:
            break
        free_blocks -= num_blocks_of(need.length)
        num_running += 1
    assert num_running, "the first sequence has room"
    num_kept = 0
    for length in kept_lengths[: room.num_sequences - num_running]:
        if num_blocks_of(length) > free_blocks:
            break
        free_blocks -= num_blocks_of(length)
        num_kept += 1
    return Turn(num_running, num_kept)


def share_rows(running: Sequence[Need], num_rows: int) -> list[int]:
    """Rows of each sequence in a step of up to `num_rows` rows.

    At least one each, so that no prompt keeps others from decoding; the remaining rows go to the first ones.
    """
    left = num_rows - len(running)
    shares = []
    for need in running:
        end = need.cut if need.num_computed < need.cut else need.length
        more = min(end - need.num_computed - 1, left)
        left -= more
        shares.append(1 + more)
    return shares
