"""What a step of a GPU's runner reads, in memory that captured graphs know."""

from dataclasses import dataclass, replace
from typing import Any, Self

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.staged import ReadBack, StagedMemory, StagedRing
from coldstream.kernels.fused.cuda import FusedArrays
from coldstream.kernels.ops import MAX_SHORT_CHAIN, CommittedPath, Ops, Rows
from coldstream.kvcache.batch import BatchArrays, BatchSize, PathArrays
from coldstream.kvcache.cache import num_blocks_of

MAX_SEGMENTS = 64
MAX_DECODE_ROWS = 64  # rows of a step whose graph includes the head


@dataclass(frozen=True)
class StepShape:
    """The properties of a step that select its captured graph: equal for all steps that share one."""

    num_rows: int
    has_trees: bool = False  # whether there may be rows of draft trees
    is_branching: bool = False  # whether a row of a tree may follow another one than that before it
    has_prompts: bool = False  # whether a chain may be a long one
    has_several: bool = False  # whether a long chain may have rows of other sequences beside it
    is_deep: bool = False  # whether there may be positions of SHORT_CONTEXT and beyond

    @classmethod
    def prompt(cls, num_rows: int) -> Self:
        """The shape of a step with one chain."""
        return cls(num_rows, has_prompts=num_rows > MAX_SHORT_CHAIN)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a step, in memory that captured graphs read.

    The arrays of a step of any size are adjacent, so that one copy transfers them.
    """

    memory: StagedRing
    num_blocks: int  # of a sequence, at most
    has_windows: bool  # whether layers with windows have blocks of their own

    @classmethod
    def into(cls, ops: Ops, num_rows: int, context_length: int, *, has_windows: bool = False) -> Self:
        """For steps of up to `num_rows` rows."""
        num_blocks = num_blocks_of(context_length)
        size = BatchSize(num_rows, min(num_rows, MAX_SEGMENTS), num_blocks, has_windows)
        return cls(StagedRing(ops.zeros((size.num_values,), "int32")), num_blocks, has_windows)

    def _size(self, num_rows: int) -> BatchSize:
        return BatchSize(num_rows, min(num_rows, MAX_SEGMENTS), self.num_blocks, self.has_windows)

    def on_host(self, num_rows: int) -> BatchArrays:
        """Inputs of the next step of `num_rows` rows, to be written before `copy`."""
        return BatchArrays(self.memory.next_on_host(), self._size(num_rows))

    def copy(self, num_rows: int) -> None:
        """Queues the copy of the inputs that were written last, of a step of `num_rows` rows."""
        self.memory.copy(self._size(num_rows).num_values)

    def columns(self, num_rows: int) -> DeviceArray:
        """The columns on the device that each row of a step of `num_rows` rows has a number in."""
        columns: DeviceArray = BatchArrays(self.memory.values, self._size(num_rows)).columns
        return columns

    def take(self, shape: StepShape) -> tuple[DeviceArray, Rows]:
        """The token ids [rows] and their `Rows` on the device."""
        arrays = BatchArrays(self.memory.values, self._size(shape.num_rows))
        rows = arrays.rows
        assert rows.batch is not None
        batch = replace(
            rows.batch,
            has_trees=shape.has_trees,
            is_branching=shape.is_branching,
            has_prompts=shape.has_prompts,
            has_several=shape.has_several,
            is_deep=shape.is_deep,
        )
        return arrays.token_ids, replace(rows, batch=batch)


@dataclass(frozen=True)
class Commits:
    """The path of a draft tree to commit, in memory that a captured graph reads."""

    memory: StagedMemory
    num_blocks: int
    has_windows: bool  # whether layers with windows have blocks of their own

    @classmethod
    def into(cls, ops: Ops, context_length: int, *, has_windows: bool) -> Self:
        """For sequences of up to `context_length` positions."""
        num_blocks = num_blocks_of(context_length)
        num_values = PathArrays.num_values(num_blocks, has_windows=has_windows)
        return cls(StagedMemory(ops.zeros((num_values,), "int32")), num_blocks, has_windows)

    @property
    def on_host(self) -> PathArrays:
        """To be written when the last step has ended."""
        return self._arrays(self.memory.on_host)

    def take(self) -> CommittedPath:
        """Queues the copy of `on_host`; the path on the device."""
        self.memory.copy(PathArrays.num_values(self.num_blocks, has_windows=self.has_windows))
        return self._arrays(self.memory.values).path

    def _arrays(self, memory: Any) -> PathArrays:
        return PathArrays(memory, self.num_blocks, has_windows=self.has_windows)


@dataclass(frozen=True)
class FusedMemory:
    """What fused steps read and write, in memory that captured graphs know."""

    staged: StagedRing
    arrays: FusedArrays  # on the device
    results: ReadBack
    num_blocks: int  # of a sequence, at most
    has_windows: bool  # whether layers with windows have blocks of their own

    @classmethod
    def into(cls, ops: Ops, context_length: int, *, has_windows: bool) -> Self:
        """For sequences of up to `context_length` positions."""
        num_blocks = num_blocks_of(context_length)
        num_values = FusedArrays.num_values(num_blocks, has_windows=has_windows)
        staged = StagedRing(ops.zeros((num_values,), "int32"))
        arrays = FusedArrays(staged.values, num_blocks, has_windows=has_windows)
        return cls(staged, arrays, ReadBack(arrays.result), num_blocks, has_windows)

    def on_host(self) -> tuple[Any, FusedArrays]:
        """The host's memory of the next copy, and what it has in it."""
        host = self.staged.next_on_host()
        return host, FusedArrays(host, self.num_blocks, has_windows=self.has_windows)

    @property
    def path(self) -> CommittedPath:
        """What a fused step keeps: its first rows, as many as agree."""
        arrays = self.arrays
        one = (arrays.state_id, arrays.count, arrays.first)
        return CommittedPath(*one, arrays.sources, arrays.kept, arrays.table, arrays.window_table)
