"""What a device decides within a fused speculative step, in plain Python.

A *fused step* drafts a chain of k tokens with a block for multi-token prediction. It computes the last chosen
token (the *root*) and the draft in one step of the model, R = k + 1 rows. It keeps as many of them as agree
with the tokens that are chosen after them. The block then computes the kept rows too, so that the next fused
step drafts after the last of them. Nothing of this waits for the host.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coldstream.kernels.sample.settings import RowSettings

NUM_COLUMNS = 7  # of a row: token, position, state, segment, index, parent, kept
NO_ROW = (0, *[-1] * (NUM_COLUMNS - 1))  # a row that belongs to no sequence
RowColumns = tuple[int, ...]  # the NUM_COLUMNS numbers of a row, as `kvcache.batch.BatchArrays` has them
Result = tuple[int, int]  # a chosen token, and 0 or the reason why there is none


@dataclass(frozen=True)
class FusedState:
    """Where a text is between two fused steps."""

    length: int  # positions of the model's sequence
    block_length: int  # rows of the block's sequence
    left: int  # tokens that may still be chosen; 0: the text has ended, and fused steps do nothing
    root: int  # the token that was chosen last, whose row is not computed yet


@dataclass(frozen=True)
class FusedResult:
    """What came of the rows of a fused step."""

    token_ids: tuple[int, ...]  # chosen after the first rows, which are kept
    fault: int  # why there is no token after the next row, which is not kept; 0 if that was not the end
    num_drafted: int  # rows beside the root that could have been kept
    is_last: bool  # whether the text has ended


@dataclass(frozen=True)
class FusedText:
    """What the fused steps of a text begin with."""

    most_nodes: int  # tokens of a draft, at least one
    root: int  # the token that was chosen last
    left: int  # tokens that may be chosen after it, at least two
    settings: RowSettings  # of the token after the root, without penalties
    end_ids: frozenset[int]


def model_rows(
    state: FusedState, draft: Sequence[int], state_id: int, kept: Sequence[int]
) -> list[RowColumns]:
    """The rows of the model's step: the root and the draft. Those that could not be kept are left out.

    kept: by row, its row of what layers keep of a draft's rows.
    """
    rows = []
    for row, token in enumerate((state.root, *draft)):
        at = state.length + row
        is_used = row < state.left
        rows.append((token, at, state_id, 0, at, row - 1, kept[row]) if is_used else NO_ROW)
    return rows


def link_row(state: FusedState, num_rows: int, depth: int, token: int, state_id: int) -> RowColumns:
    """The row of the block after token number `depth` of the draft, for the next one; NO_ROW if the model's
    step has no row for that.
    """
    at = state.block_length + depth
    has_next = depth + 2 < min(num_rows, state.left)
    return (token, at, state_id, 0, at, -1, -1) if has_next else NO_ROW


def accept(
    state: FusedState, draft: Sequence[int], chosen: Sequence[Result], end_ids: Collection[int]
) -> tuple[FusedResult, FusedState]:
    """The tokens that a fused step gives, and the state after it. chosen: after each of the rows.

    The row after a token is kept if it was drafted. A text ends with a token of `end_ids`, with the last one
    that is left, and where no token can be chosen.
    """
    token_ids: list[int] = []
    left, fault = state.left, 0
    for row in range(min(1 + len(draft), state.left)):
        token, fault = chosen[row]
        if fault:
            left = 0
            break
        token_ids.append(token)
        left = 0 if token in end_ids else left - 1
        if left == 0 or row == len(draft) or draft[row] != token:
            break
    count = len(token_ids)
    root = token_ids[-1] if token_ids else state.root
    after = FusedState(state.length + count, state.block_length + count, left, root)
    num_drafted = max(0, min(len(draft), state.left - 1))
    return FusedResult(tuple(token_ids), fault, num_drafted, after.left == 0), after


def block_rows(state: FusedState, token_ids: Sequence[int], num_rows: int, state_id: int) -> list[RowColumns]:
    """The block's rows after a fused step: the accepted tokens, behind the rows of `state`.

    Each follows the state of the row before it. The others are left out.
    """
    rows = []
    for row in range(num_rows):
        at = state.block_length + row
        is_used = row < len(token_ids)
        rows.append((token_ids[row], at, state_id, 0, at, row - 1, -1) if is_used else NO_ROW)
    return rows
