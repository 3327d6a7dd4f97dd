"""Sequences that a step leaves behind within a chain of rows, so that a prefix can be kept without a pause.

A branch gets the state in its slot, as the rows after it go on into another; nothing is copied. Until the
step has ended, the slot that a branch holds is that of the rows *after* it, and the sequence that goes on has
the first one: so whatever fails, clearing the sequence and its branches frees each slot once.
"""

from coldstream.errors import InvalidRequestError
from coldstream.kernels.ops import MIN_BRANCH_ROWS
from coldstream.kvcache.cache import num_blocks_of
from coldstream.kvcache.pool import BlockPool
from coldstream.kvcache.sequence import Sequence

Branches = tuple[tuple[int, Sequence], ...]  # (rows before it, empty sequence), ascending


def check_branches(branches: Branches, num_rows: int, *, is_chain: bool) -> None:
    """Raises InvalidRequestError if a segment of so many rows cannot leave these behind."""
    if branches and not is_chain:
        raise InvalidRequestError("only a chain of known tokens can leave branches behind")
    before = MIN_BRANCH_ROWS - 1
    for border, branch in branches:
        if not before < border < num_rows:
            raise InvalidRequestError(
                f"a branch after {border} of {num_rows} rows: they ascend, from {MIN_BRANCH_ROWS} on, and at "
                "least one row comes after the last"
            )
        if branch.length or branch.blocks or branch.state is not None:
            raise InvalidRequestError(
                f"a branch that holds {branch.length} tokens already: make an empty one with new_sequence()"
            )
        before = border


def leave_branches(sequence: Sequence, branches: Branches, blocks: BlockPool) -> None:
    """Gives each branch its tokens: blocks, which the sequence shares then, and the state in its slot.

    The sequence has blocks for all rows of the step, of which it has not committed any.
    """
    states = [sequence.state, *(branch.state for _, branch in branches)]
    for (border, branch), state in zip(branches, states, strict=False):
        length = sequence.length + border
        held = sequence.blocks[: num_blocks_of(length)]
        blocks.share(held)
        branch.blocks, branch.length, branch.state = held, length, state
    sequence.state = states[-1]
