"""The batch of a step: chains and draft trees of one or several sequences, one segment each."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.kernels.ops import (
    MAX_SHORT_CHAIN,
    MAX_TREE_ROWS,
    MIN_FORK_ROWS,
    BatchRows,
    CommittedPath,
    Rows,
)
from coldstream.kvcache.sequence import Forks, Sequence
from coldstream.kvcache.sequence_cache import AcceptedPath, Demand, SequenceCache

Array = np.ndarray[Any, Any]

_COLUMNS = 7  # of `BatchArrays`: token ids and the six arrays of `Rows`


def rows_of(columns: Any, tables: Any, window_tables: Any = None) -> tuple[Any, Rows]:
    """Token ids and `Rows` over the columns of a batch, int32 [_COLUMNS, rows], and its tables of blocks."""
    token_ids, positions, state_ids, segments, indices, parents, kept = columns
    batch = BatchRows(segments, tables, indices, parents, kept, window_tables=window_tables)
    return token_ids, Rows(positions, state_ids, batch)


def rows_in_windows(rows: Rows) -> Rows:
    """The same rows for layers with windows, where these are a group of their own."""
    assert rows.batch is not None, "groups have blocks"
    return replace(rows, batch=replace(rows.batch, tables=rows.batch.window_tables))


def path_in_windows(path: CommittedPath) -> CommittedPath:
    """The same path for layers with windows, where these are a group of their own."""
    return replace(path, table=path.window_table)


@dataclass(frozen=True)
class ChosenToken:
    """A token that the device has chosen, or will have before the step, and the host does not know yet.

    index: among the device's results. The token may turn out to be one of `end_ids`, or there may be none to
    choose. Then the step leaves the row out: its logits mean nothing, and the sequence's memory is as it was.
    The caller has to call `ModelRunner.take_back`.
    """

    index: int
    end_ids: frozenset[int]


@dataclass
class Segment:
    """Rows of one sequence, one for each of `token_ids`. Not frozen, as making one is part of a token's time.

    Without parents the rows are a chain after the committed positions, and the step commits them. With
    parents they are a draft tree, and stay pending until a commit. parents[i] is an earlier row of the
    segment, or −1 for the last committed position. wanted: rows whose logits are wanted, by default the last
    of a chain and all of a tree. A `ChosenToken` is a chain of one row.

    forks: (rows, empty sequence) of a chain, ascending. After the step such a sequence holds the tokens up to
    so many rows of the segment. It shares their blocks, and only slots of states change hands. At least
    MIN_FORK_ROWS rows come before the first fork, and a row after the last. If the step fails, forks stay
    empty.
    """

    sequence: Sequence
    token_ids: Collection[int] | ChosenToken
    parents: Collection[int] | None = None
    wanted: Collection[int] | None = None
    forks: Forks = ()


@dataclass(frozen=True)
class Batch:
    """The segments of a step, of different sequences."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BatchLimits:
    """The largest batch that a model takes."""

    vocab_size: int
    context_length: int
    num_rows: int  # of a step
    num_segments: int
    num_chosen: int = 0  # results that a `ChosenToken` may name; 0 if the device takes none


@dataclass(eq=False)
class CheckedSegment:
    """A segment that was found valid. Not frozen, because making one is part of the time of every token."""

    sequence: Sequence
    token_ids: Array  # integers [rows]
    parents: tuple[int, ...] | None
    wanted: Array  # int64
    depths: Array | None  # int32 [rows] of a tree, 0 directly after the committed positions
    chosen: ChosenToken | None = None  # determines the only row's token; `token_ids` has 0 for it
    forks: Forks = ()
    demand: Demand = field(init=False)

    def __post_init__(self) -> None:
        left = [fork for _, fork in self.forks] if self.forks else ()
        self.demand = Demand(self.sequence, len(self.token_ids), self.parents, left)

    @classmethod
    def chain(cls, sequence: Sequence, token_ids: Array, wanted: Array) -> Self:
        """A chain of ids that the caller has checked."""
        return cls(sequence, token_ids, None, wanted, None)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All that a step with it changes."""
        return (self.sequence, *self.demand.forks)

    @property
    def is_prompt(self) -> bool:
        """Whether it is a long chain."""
        return self.parents is None and len(self.token_ids) > MAX_SHORT_CHAIN

    @property
    def end(self) -> int:
        """The index in the sequence behind its rows."""
        return self.sequence.length + len(self.token_ids)

    @property
    def is_branching(self) -> bool:
        """Whether it is a draft tree with a row that does not follow the one before it."""
        return self.parents is not None and self.parents != tuple(range(-1, len(self.parents) - 1))


def check_batch(batch: Batch, cache: SequenceCache, limits: BatchLimits) -> list[CheckedSegment]:
    """Raises InvalidRequestError, naming the problem, for a batch that cannot be computed."""
    if not batch.segments:
        raise InvalidRequestError("a batch needs at least one segment")
    sequences = {id(segment.sequence) for segment in batch.segments}
    if len(sequences) < len(batch.segments):
        raise InvalidRequestError("two segments of a batch are of one sequence: put their rows into one")
    forks = [id(fork) for segment in batch.segments for _, fork in segment.forks]
    if forks and len({*forks, *sequences}) < len(forks) + len(sequences):
        raise InvalidRequestError("a fork is named twice in a batch: make each with new_sequence()")
    if len(batch.segments) > limits.num_segments:
        raise InvalidRequestError(
            f"a batch of {len(batch.segments)} segments, but a step takes {limits.num_segments}: make several"
            " steps of it"
        )
    checked = [check_segment(segment, cache, limits) for segment in batch.segments]
    num_rows = sum([segment.demand.num_rows for segment in checked])
    if num_rows > limits.num_rows:
        raise InvalidRequestError(
            f"a batch of {num_rows} rows, but a step takes {limits.num_rows}: make several steps of it"
        )
    return checked


def check_segment(segment: Segment, cache: SequenceCache, limits: BatchLimits) -> CheckedSegment:
    """Checks a segment of any number of rows. Raises InvalidRequestError if it cannot be computed."""
    cache.check(segment.sequence)
    chosen = segment.token_ids if isinstance(segment.token_ids, ChosenToken) else None
    if chosen is not None and not 0 <= chosen.index < limits.num_chosen:
        raise InvalidRequestError(
            f"a token that is result {chosen.index} of {limits.num_chosen} on this device: give its id"
        )
    if chosen is not None and segment.parents is not None:
        raise InvalidRequestError("a token that the host does not know is in a draft tree: give its id")
    ids = _integers((0,) if isinstance(segment.token_ids, ChosenToken) else segment.token_ids, "token ids")
    count, length = len(ids), segment.sequence.length
    if not 0 < count <= limits.context_length - length:
        raise InvalidRequestError(
            f"{count} rows, but between 1 and {limits.context_length - length} fit: the context holds "
            f"{limits.context_length} and {length} are in use; try a larger --ctx-size"
        )
    _check_range(ids, limits.vocab_size, "token ids")
    parents = depths = None
    first_wanted = count - 1
    if segment.parents is not None:
        parents = tuple(_integers(segment.parents, "parents").tolist())
        depths = _depths(parents, count)
        first_wanted = 0
    if segment.wanted is None:
        rows = np.arange(first_wanted, count)
    else:
        rows = _integers(segment.wanted, "wanted rows")
        _check_range(rows, count, "wanted rows")
    for _, fork in segment.forks:
        cache.check(fork)
    _check_forks(segment.forks, count, is_chain=parents is None and chosen is None)
    return CheckedSegment(segment.sequence, ids, parents, rows, depths, chosen, segment.forks)


def _check_forks(forks: Forks, num_rows: int, *, is_chain: bool) -> None:
    """Raises InvalidRequestError if a segment of so many rows cannot leave these behind."""
    if forks and not is_chain:
        raise InvalidRequestError("only a chain of known tokens can leave forks behind")
    before = MIN_FORK_ROWS - 1
    for num_before, fork in forks:
        if not before < num_before < num_rows:
            raise InvalidRequestError(
                f"a fork after {num_before} of {num_rows} rows: they ascend, from {MIN_FORK_ROWS} on, and at "
                "least one row comes after the last"
            )
        if fork.length or fork.blocks or fork.state is not None:
            raise InvalidRequestError(
                f"a fork that holds {fork.length} tokens already: make an empty one with new_sequence()"
            )
        before = num_before


def _integers(values: Collection[int], what: str) -> Array:
    """int64 [len(values)]."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"{what} must be a list of integers")
    return array if array.dtype == np.int64 else array.astype(np.int64)


def _check_range(values: Array, end: int, what: str) -> None:
    """Raises InvalidRequestError for values that are not in 0 … end − 1."""
    if not len(values):
        return
    # NumPy's reductions take longer than one number takes Python.
    least, most = (int(values[0]),) * 2 if len(values) == 1 else (int(values.min()), int(values.max()))
    if least < 0 or most >= end:
        raise InvalidRequestError(f"{what} must be in 0 … {end - 1}, found {least} … {most}")


def _depths(parents: tuple[int, ...], count: int) -> Array:
    if len(parents) != count or count > MAX_TREE_ROWS:
        raise InvalidRequestError(
            f"a draft tree of {count} rows with {len(parents)} parents: each row needs one, and there may be "
            f"{MAX_TREE_ROWS} rows"
        )
    depths: list[int] = []
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise InvalidRequestError(
                f"the parent of row {row} of a draft tree is {parent}: it must be an earlier row, or -1"
            )
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(depths, np.int32)


@dataclass(frozen=True)
class BatchSize:
    """Capacity in rows, segments, and blocks of a sequence."""

    num_rows: int
    num_segments: int
    num_blocks: int
    has_windows: bool = False  # whether layers with windows have blocks of their own

    @property
    def num_values(self) -> int:
        """int32 values of a `BatchArrays`."""
        num_tables = 1 + self.has_windows
        return _COLUMNS * self.num_rows + num_tables * self.num_segments * self.num_blocks


class BatchArrays:
    """A batch as a forward pass reads it: int32 arrays in one piece of memory.

    The memory, [size.num_values], is the host's or a device's; `write` and `pad` need the host's.
    """

    def __init__(self, memory: Any, size: BatchSize) -> None:
        self._memory, self._size = memory, size
        num_values = _COLUMNS * size.num_rows
        self.columns = memory[:num_values].reshape(_COLUMNS, size.num_rows)  # token ids first

    @cached_property
    def _tables(self) -> Any:
        return self._table(0)

    @cached_property
    def _window_tables(self) -> Any:
        return self._table(1) if self._size.has_windows else None

    def _table(self, number: int) -> Any:
        size = self._size
        count = size.num_segments * size.num_blocks
        first = _COLUMNS * size.num_rows + number * count
        return self._memory[first : first + count].reshape(size.num_segments, size.num_blocks)

    @property
    def token_ids(self) -> Any:
        """Of all rows."""
        return self.columns[0]

    @property
    def rows(self) -> Rows:
        """What else there is of them. Its views take longer to make than all else of a decoded token."""
        return rows_of(self.columns, self._tables, self._window_tables)[1]

    def write(self, segments: Collection[CheckedSegment]) -> int:
        """Writes the rows of segments, whose memory must be reserved. Returns their number."""
        start = 0
        for number, segment in enumerate(segments):
            sequence, count = segment.sequence, len(segment.token_ids)
            self._tables[number, : len(sequence.blocks)] = sequence.blocks
            if self._size.has_windows:
                self._window_tables[number, : len(sequence.windows)] = sequence.windows
            if count == 1 and sequence.pending is None:  # a decoded token: its time counts
                length, token_id = sequence.length, segment.token_ids[0]
                self.columns[:, start] = token_id, length, sequence.state, number, length, -1, -1
                start += 1
                continue
            rows = self.columns[:, start : start + count]
            indices = np.arange(sequence.length, sequence.length + count, dtype=np.int32)
            rows[0] = segment.token_ids
            rows[1] = indices if segment.depths is None else sequence.length + segment.depths
            rows[2] = sequence.state
            for num_before, fork in segment.forks:
                rows[2, num_before:] = fork.state
            rows[3] = number
            rows[4] = indices
            if sequence.pending is None:
                rows[5] = np.arange(start - 1, start + count - 1, dtype=np.int32)
                rows[5, 0] = -1
                rows[6] = -1
            else:
                parents = np.array(sequence.pending.parents)
                rows[5] = np.where(parents < 0, -1, start + parents)
                rows[6] = sequence.pending.kept
            start += count
        return start

    def pad(self, count: int) -> None:
        """Gives all rows from `count` on to no sequence: position −1 and state −1."""
        self.columns[1:, count:] = -1
        self.token_ids[count:] = 0


_SINGLE_VALUES = 3  # of a path


class PathArrays:
    """An accepted path as a commit reads it: int32 arrays in one piece of memory, [`num_values`]."""

    def __init__(self, memory: Any, num_blocks: int, *, has_windows: bool = False) -> None:
        """has_windows: whether layers with windows have blocks of their own."""
        state_id, count, first = (memory[i : i + 1] for i in range(_SINGLE_VALUES))
        rows = memory[_SINGLE_VALUES : _SINGLE_VALUES + 2 * MAX_TREE_ROWS].reshape(2, MAX_TREE_ROWS)
        start = _SINGLE_VALUES + 2 * MAX_TREE_ROWS
        table, window_table = memory[start : start + num_blocks], None
        if has_windows:
            window_table = memory[start + num_blocks : start + 2 * num_blocks]
        self.path = CommittedPath(state_id, count, first, rows[0], rows[1], table, window_table)

    @staticmethod
    def num_values(num_blocks: int, *, has_windows: bool = False) -> int:
        """int32 values for sequences of up to `num_blocks` blocks."""
        return _SINGLE_VALUES + 2 * MAX_TREE_ROWS + (1 + has_windows) * num_blocks

    def write(self, accepted: AcceptedPath) -> None:
        """Writes the path; only to memory of the host."""
        count = len(accepted.rows)
        self.path.state_id[0], self.path.count[0], self.path.first[0] = accepted.state, count, accepted.first
        self.path.sources[:count] = accepted.rows
        self.path.kept[:count] = accepted.kept
        self.path.table[: len(accepted.blocks)] = accepted.blocks
        if self.path.window_table is not None:
            self.path.window_table[: len(accepted.windows)] = accepted.windows
