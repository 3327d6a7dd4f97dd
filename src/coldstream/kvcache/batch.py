"""What a step computes: chains and draft trees of one or several sequences, one segment each."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.kernels.ops import BLOCK_POSITIONS, MAX_TREE_ROWS, BatchRows, Ops, Rows
from coldstream.kvcache.sequence import Sequence
from coldstream.kvcache.sequence_cache import Demand, SequenceCache

Array = np.ndarray[Any, Any]

_NONE_WANTED = np.empty(0, np.int64)


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence, one for each of `token_ids`.

    Without parents they are a chain behind what is committed, and committed by the step. With them they are a
    draft tree: parents[i] is an earlier row of the segment, or −1 for what is committed; the rows wait for a
    commit. wanted: rows whose logits are wanted, by default a chain's last and all of a tree.
    """

    sequence: Sequence
    token_ids: Collection[int]
    parents: Collection[int] | None = None
    wanted: Collection[int] | None = None


@dataclass(frozen=True)
class Batch:
    """The segments of a step, each of another sequence."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BatchLimits:
    """What a model takes."""

    vocab_size: int
    context_length: int
    num_rows: int  # of a step


@dataclass(frozen=True)
class CheckedSegment:
    """A segment that can be computed."""

    sequence: Sequence
    token_ids: Array  # int32 [rows]
    parents: tuple[int, ...] | None
    wanted: Array  # int64
    depths: Array | None  # int32 [rows], of each row of a tree behind what is committed

    @classmethod
    def chain(cls, sequence: Sequence, token_ids: Array) -> Self:
        """Of int32 ids that are known to be good and to fit, of which no logits are wanted here."""
        return cls(sequence, token_ids, None, _NONE_WANTED, None)

    @property
    def demand(self) -> Demand:
        return Demand(self.sequence, len(self.token_ids), self.parents)


def check_batch(batch: Batch, cache: SequenceCache, limits: BatchLimits) -> list[CheckedSegment]:
    """Raises InvalidRequestError for what cannot be computed, naming the segment."""
    if not batch.segments:
        raise InvalidRequestError("a batch needs at least one segment")
    if len({id(segment.sequence) for segment in batch.segments}) < len(batch.segments):
        raise InvalidRequestError("two segments of a batch are of one sequence: put their rows into one")
    checked = [_check_segment(segment, cache, limits) for segment in batch.segments]
    num_rows = sum(len(segment.token_ids) for segment in checked)
    if num_rows > limits.num_rows:
        raise InvalidRequestError(
            f"a batch of {num_rows} rows, but a step takes {limits.num_rows}: make several steps of it"
        )
    return checked


def _check_segment(segment: Segment, cache: SequenceCache, limits: BatchLimits) -> CheckedSegment:
    cache.check(segment.sequence)
    ids = _integers(segment.token_ids, "token ids")
    count, length = len(ids), segment.sequence.length
    if not 0 < count <= limits.context_length - length:
        raise InvalidRequestError(
            f"{count} rows, but between 1 and {limits.context_length - length} fit: the context holds "
            f"{limits.context_length} and {length} are in use; try a larger --ctx-size"
        )
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        raise InvalidRequestError(
            f"token ids must be in 0 … {limits.vocab_size - 1}, found {ids.min()} … {ids.max()}"
        )
    wanted = segment.wanted
    if segment.parents is None:
        parents = depths = None
        wanted = (count - 1,) if wanted is None else wanted
    else:
        parents = tuple(_integers(segment.parents, "parents").tolist())
        depths = _depths(parents, count)
        wanted = range(count) if wanted is None else wanted
    rows = _integers(wanted, "wanted rows")
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise InvalidRequestError(
            f"wanted rows must be in 0 … {count - 1}, found {rows.min()} … {rows.max()}"
        )
    return CheckedSegment(segment.sequence, ids.astype(np.int32), parents, rows, depths)


def _integers(values: Collection[int], what: str) -> Array:
    """int64 [len(values)]."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(f"{what} must be a list of integers")
    return array.astype(np.int64)


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


class BatchInputs:
    """The arrays that a captured forward pass reads a batch from: int32 [num_rows] each, and block tables."""

    def __init__(self, ops: Ops, limits: BatchLimits) -> None:
        size = limits.num_rows
        self._values: Array = ops.zeros((7, size), "int32")
        self._numbers = np.arange(-1, size, dtype=np.int32)
        self._tables: Array = ops.zeros((size, -(-limits.context_length // BLOCK_POSITIONS)), "int32")
        self.token_ids, positions, slots, segments, indices, parents, kept = self._values
        self.rows = Rows(positions, slots, BatchRows(segments, self._tables, indices, parents, kept))

    def write(self, segments: list[CheckedSegment]) -> int:
        """Puts the rows there, after their memory was reserved. Returns how many there are."""
        start = 0
        for number, segment in enumerate(segments):
            sequence, count = segment.sequence, len(segment.token_ids)
            rows = self._values[:, start : start + count]
            indices = self._numbers[1 : count + 1] + sequence.length
            rows[0] = segment.token_ids
            rows[1] = indices if segment.depths is None else sequence.length + segment.depths
            rows[2] = sequence.state
            rows[3] = number
            rows[4] = indices
            if sequence.pending is None:
                rows[5] = self._numbers[start : start + count]
                rows[5, 0] = -1
                rows[6] = -1
            else:
                parents = np.array(sequence.pending.parents)
                rows[5] = np.where(parents < 0, -1, start + parents)
                rows[6] = sequence.pending.kept
            self._tables[number, : len(sequence.blocks)] = sequence.blocks
            start += count
        return start
