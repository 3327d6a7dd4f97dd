"""What the next step of several sequences holds: who takes part, with how many rows, and what is kept.

Pure functions over numbers; `side_by_side.py` runs the steps. Sequences are served in order. Those whose
tokens fit together in blocks take part, and the first of them always fits, so that every sequence gets its
turn. When tokens that were chosen need more blocks than there are, the last ones give theirs back and wait
for their turn again; a step computes the same bits whether it reads a state or makes it anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coldstream.kvcache import num_blocks_of


@dataclass(frozen=True)
class Room:
    """What there is for all sequences together."""

    num_blocks: int
    num_sequences: int
    num_rows: int  # of a step


@dataclass(frozen=True)
class Need:
    """A sequence that is not finished."""

    length: int  # of its tokens, computed or not
    num_computed: int  # less than length
    cut: int = 0  # a step ends where this many are computed, for others to branch off there
    is_waiting: bool = False  # for another one's cut


@dataclass(frozen=True)
class Turn:
    """Who has memory in the next step."""

    num_running: int  # sequences that take part, from the first on
    num_kept: int


def next_turn(needs: Sequence[Need], kept_lengths: Sequence[int], room: Room) -> Turn:
    """Who of `needs`, at least one, of which the first is not waiting, takes part in the next step.

    As many as there is room for. kept_lengths: of finished sequences that may serve as beginnings of others,
    the dearest first; as many of them are kept as the others leave room for.
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
    """How many of the next tokens of each sequence a step of up to `num_rows` rows computes.

    One row at least each, so that no prompt keeps others from decoding; the first ones get what is left.
    """
    left = num_rows - len(running)
    shares = []
    for need in running:
        end = need.cut if need.num_computed < need.cut else need.length
        more = min(end - need.num_computed - 1, left)
        left -= more
        shares.append(1 + more)
    return shares
