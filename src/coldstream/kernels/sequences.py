"""The sequences of a batch's rows, and the positions that each row sees."""

from collections.abc import Iterator

import torch

from coldstream.kernels.ops import BLOCK_POSITIONS, Rows

CacheIndices = tuple[torch.Tensor, torch.Tensor]  # int64 indices into the first two dimensions of a cache


def sequences(rows: Rows) -> Iterator[tuple[int, slice]]:
    """The first state and the rows of each sequence in a batch, in order; nothing for an empty batch."""
    groups = rows.state_ids if rows.batch is None else rows.batch.segments
    _, counts = torch.unique_consecutive(groups, return_counts=True)
    start = 0
    for count in counts.tolist():
        yield int(rows.state_ids[start]), slice(start, start + count)
        start += count


def parts_of_states(rows: Rows, part: slice) -> Iterator[tuple[int, slice]]:
    """The rows of one sequence by the state in whose slot they leave theirs; see `BatchRows`."""
    _, counts = torch.unique_consecutive(rows.state_ids[part], return_counts=True)
    start = part.start
    for count in counts.tolist():
        yield int(rows.state_ids[start]), slice(start, start + count)
        start += count


def is_tree(rows: Rows, part: slice) -> bool:
    """Whether the rows of one sequence are a draft tree, which changes no state."""
    return rows.batch is not None and int(rows.batch.kept[part.start]) >= 0


def path(rows: Rows, row: int) -> list[int]:
    """A row of a batch and its ancestors in it, the first one first."""
    assert rows.batch is not None
    result = [row]
    while (parent := int(rows.batch.parents[result[0]])) >= 0:
        result.insert(0, parent)
    return result


def written(rows: Rows) -> CacheIndices:
    """Cache indices to which keys and values of all rows are written."""
    if rows.batch is None:
        return rows.state_ids.long(), rows.positions.long()
    indices = rows.batch.indices.long()
    return rows.batch.tables[
        rows.batch.segments.long(), indices // BLOCK_POSITIONS
    ].long(), indices % BLOCK_POSITIONS


def seen(rows: Rows, row: int) -> CacheIndices:
    """Cache indices of keys and values of positions 0 … its own of a row, in order of position."""
    if rows.batch is None:
        positions = torch.arange(int(rows.positions[row]) + 1)
        return torch.full_like(positions, int(rows.state_ids[row])), positions
    ancestors = path(rows, row)
    committed = torch.arange(int(rows.positions[ancestors[0]]))
    indices = torch.cat((committed, rows.batch.indices[ancestors].long()))
    table = rows.batch.tables[int(rows.batch.segments[row])].long()
    return table[indices // BLOCK_POSITIONS], indices % BLOCK_POSITIONS
