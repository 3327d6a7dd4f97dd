"""Fused speculative steps on a GPU: draft, step, choice and commit, without the host in between.

A fused step is one captured graph. `kernels/fused/reference.py` defines what the device decides in it. The
host launches fused steps, follows behind, and reads which tokens were chosen. All experts are on the device.
What drafts is a `CudaFusedDrafter`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from coldstream import kvcache
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.runtime import streams
from coldstream.kernels.cuda.staged import ReadBack
from coldstream.kernels.fused.cuda import MAX_FUSED_ROWS, FusedArrays, FusedKernels
from coldstream.kernels.fused.reference import NUM_COLUMNS, FusedResult, FusedState, FusedText
from coldstream.kernels.ops import SHORT_CONTEXT, Rows
from coldstream.kernels.sample.admit import MAX_ENDS
from coldstream.kernels.sample.cuda import write_rows
from coldstream.kvcache.batch import rows_of
from coldstream.kvcache.sequence_cache import Demand, SequenceCache, WholeOrCleared
from coldstream.models.cuda.graphs import CapturedSteps
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.logits import check_order

NUM_AHEAD = ReadBack.NUM_COPIES  # fused steps whose results may wait for the host


@dataclass(frozen=True)
class FusedShape:
    """The properties of a fused step that select its captured graph."""

    num_rows: int  # of the model's step: the root and the draft
    is_deep: bool
    draws: bool  # whether tokens are drawn rather than the likeliest


class CudaFusedDrafter(Protocol):
    """What drafts in fused steps. All of it is queued, over memory that captured graphs know."""

    @property
    def most_nodes(self) -> int:
        """Tokens of a draft, at most."""

    @property
    def candidate(self) -> DeviceArray | None:
        """int32 [1], what `FusedKernels.extend_draft` takes, for a block that calls it."""

    def draft(self, kernels: FusedKernels, arrays: FusedArrays, shape: FusedShape) -> None:
        """Writes the tokens of a draft into the model's rows, behind the root."""

    def follow(self, arrays: FusedArrays, shape: FusedShape) -> None:
        """Takes in the rows that were kept of the model's step."""

    def state_of(self, row: int) -> DeviceArray | None:
        """The model's hidden state [E] of a row of its last step, if the drafter wants it."""


class FusedRows(Protocol):
    """The rows that a drafter has of a text for whose fused steps it drafts."""

    @property
    def length(self) -> int:
        """Rows before the fused steps."""

    @property
    def state_id(self) -> int:
        """Where the block's rows are, for `FusedKernels`."""

    def reserve(self, num_rows: int) -> None:
        """Takes memory for so many more rows. Raises OutOfMemoryError with nothing changed."""

    def lengthen(self, num_rows: int) -> bool:
        """As `reserve`, while fused steps run. Returns whether `write_table` has to follow."""

    def write_table(self, table: Any) -> None:
        """Writes where the rows are, as the host's copy of the table of blocks has it."""

    def keep(self, num_rows: int) -> None:
        """The fused steps have ended, after so many more rows."""

    def whole_or_cleared(self) -> AbstractContextManager[None]:
        """A context after whose failure there are no rows."""


class CudaFusedSteps:
    """Runs fused steps of a model and a drafter.

    begin, make_room: as `CudaMtp` has them.
    """

    kind = "fused"  # of captured steps

    def __init__(
        self,
        loaded: Loaded,
        block: CudaFusedDrafter,
        steps: CapturedSteps,
        begin: Callable[[], None],
        make_room: Callable[[], bool],
    ) -> None:
        assert loaded.fused is not None
        self.memory, self.loaded, self.block = loaded.fused, loaded, block
        self._steps, self._begin, self._make_room = steps, begin, make_room

    def start(self, sequence: kvcache.Sequence, rows: FusedRows, text: FusedText) -> "CudaFusedRun | None":
        """Fused steps of a text whose tokens but the root are in `sequence`.

        rows: what the drafter has of it.
        The sequence has a pending tree until `CudaFusedRun.end`. None, with nothing changed, if there is no
        room, or the text has more end tokens than the device takes. Raises DeviceError, with both empty.
        """
        if len(text.end_ids) > MAX_ENDS or text.left < 2:
            return None
        run = CudaFusedRun(self, sequence, rows, text)
        try:
            run.reserve()
        except OutOfMemoryError:
            return None
        with (
            device_errors(),
            WholeOrCleared(self.loaded.sequences, [sequence]),
            rows.whole_or_cleared(),
        ):
            run.write()
        return run

    def launch(self, shape: FusedShape) -> None:
        """Queues a fused step. Raises DeviceError, OutOfMemoryError."""
        check_order()
        self._begin()
        if (reader := self.loaded.ops.ngram_reader) is not None:
            reader.begin()
        key = (self.kind, (self.block, shape))
        self._steps.run(key, partial(self.compute, shape), lambda nothing: nothing, self._make_room)

    def compute(self, shape: FusedShape) -> None:
        """A fused step, over what the one before it left."""
        loaded, arrays = self.loaded, self.memory.arrays
        num_rows = shape.num_rows
        kernels = FusedKernels(arrays, num_rows, self.block.candidate)
        if num_rows > 1:
            self.draft(kernels, shape)
        kernels.write_model_rows()
        columns = arrays.model_columns[: NUM_COLUMNS * num_rows].reshape(NUM_COLUMNS, num_rows)
        step = StepShape(num_rows, has_trees=True, is_deep=shape.is_deep)
        logits = loaded.logits_after(*shaped_rows(columns, arrays.table, step, arrays.window_table))
        chosen = arrays.chosen[:num_rows]
        loaded.sampler.choose(logits, arrays.settings[:num_rows], chosen, draws=shape.draws)
        kernels.accept_rows()
        loaded.model.commit(self.memory.path, loaded.sequences.tensors)
        self.block.follow(arrays, shape)

    def draft(self, kernels: FusedKernels, shape: FusedShape) -> None:
        """The block's draft, into the model's rows."""
        self.block.draft(kernels, self.memory.arrays, shape)


def shaped_rows(
    columns: DeviceArray, table: DeviceArray, step: StepShape, window_table: DeviceArray | None = None
) -> tuple[DeviceArray, Rows]:
    """The rows of a step of this shape, and their tokens; see `kvcache.batch.rows_of`."""
    windows = None if window_table is None else window_table.reshape(1, -1)
    token_ids, rows = rows_of(columns, table.reshape(1, -1), windows)
    assert rows.batch is not None
    batch = replace(
        rows.batch,
        has_trees=step.has_trees,
        is_branching=step.is_branching,
        has_prompts=step.has_prompts,
        has_several=step.has_several,
        is_deep=step.is_deep,
    )
    return token_ids, replace(rows, batch=batch)


class CudaFusedRun:
    """The fused steps of one text; see `CudaFusedSteps.start`. Implements decoding's `FusedRun`."""

    def __init__(
        self,
        steps: CudaFusedSteps,
        sequence: kvcache.Sequence,
        block_rows: FusedRows,
        text: FusedText,
    ) -> None:
        self._steps, self._text = steps, text
        self._sequence, self._block_rows = sequence, block_rows
        self._cache: SequenceCache = steps.loaded.sequences
        self._first, self._block_first = sequence.length, block_rows.length
        most_nodes = min(text.most_nodes, steps.block.most_nodes)
        self._most_rows = min(1 + most_nodes, text.left, MAX_FUSED_ROWS)
        self._num_held = 0  # rows that were kept, as far as the host knows
        self._left = text.left  # tokens that may be chosen after those
        self._last_row: int | None = None  # of the last step that was taken, if it kept any
        self._in_flight: list[tuple[int, Any, streams.Event]] = []  # rows, results, when they are there

    def launch(self, num_nodes: int) -> None:
        """Queues a fused step with a draft of so many tokens, at most those of the text, behind those before.

        Raises DeviceError, OutOfMemoryError.
        """
        assert len(self._in_flight) < NUM_AHEAD, "a result would be overwritten before it was read"
        num_rows = min(1 + num_nodes, self._most_rows)
        num_more = min(num_rows + sum(rows for rows, _, _ in self._in_flight), self._left)
        is_longer = self._cache.lengthen(self._sequence, self._num_held + num_more, self._num_held)
        with device_errors():
            is_longer |= self._block_rows.lengthen(self._num_held + num_more)
            if is_longer:
                arrays = self._steps.memory.on_host()[1]
                self._write_tables(arrays)
                self._steps.memory.staged.copy(arrays.num_table_values)
            end = max(self._first, self._block_first) + self._num_held + num_more
            draws = self._text.settings.temperature != 0
            self._steps.launch(FusedShape(num_rows, end > SHORT_CONTEXT, draws))
            results, ended = self._steps.memory.results.copy(), streams.Event()
            ended.record(streams.current_stream())
        self._in_flight.append((num_rows, results, ended))

    def take(self) -> FusedResult:
        """Waits for the oldest fused step in flight. Returns its outcome.

        Raises DeviceError, and as `NgramReader.ended`.
        """
        num_rows, results, ended = self._in_flight.pop(0)
        with device_errors():
            ended.synchronize()
        if (reader := self._steps.loaded.ops.ngram_reader) is not None:
            reader.ended(len(self._in_flight))
        count, fault, *token_ids = results.tolist()
        num_nodes = max(0, min(num_rows, self._left) - 1)
        self._num_held += count
        self._last_row = count - 1 if count else None
        is_over = fault != 0 or (count > 0 and token_ids[count - 1] in self._text.end_ids)
        self._left = 0 if is_over else self._left - count
        return FusedResult(tuple(token_ids[:count]), fault, num_nodes, self._left == 0)

    def end(self) -> tuple[int, DeviceArray | None]:
        """Waits for all fused steps. The sequences have the kept rows then.

        Returns the number of these rows, and the model's hidden state [E] of the last one, unless a later
        step has overwritten it.
        """
        while self._in_flight:
            self.take()
        self._cache.settle(self._sequence, self._num_held)
        self._block_rows.keep(self._num_held)
        row = self._last_row
        return self._num_held, None if row is None else self._steps.block.state_of(row)

    def reserve(self) -> None:
        """Takes memory for a fused step, with room for a state that nobody shares.

        Raises OutOfMemoryError with nothing changed.
        """
        parents = tuple(range(-1, self._most_rows - 1))
        demand = Demand(self._sequence, self._most_rows)
        tree = replace(demand, parents=parents)
        self._cache.states.check(self._cache.need_of([demand]).num_states)
        self._cache.check_room([tree])
        self._block_rows.reserve(self._most_rows)
        self._cache.reserve([tree])

    def write(self) -> None:
        """Queues what the first fused step reads."""
        path = self._cache.accept(self._sequence, range(self._most_rows))
        memory, text = self._steps.memory, self._text
        host, arrays = memory.on_host()
        self._write_tables(arrays)
        state = FusedState(self._first, self._block_first, self._left, text.root)
        arrays.write_state(state, path.state, self._block_rows.state_id, len(text.end_ids))
        arrays.kept[: self._most_rows] = path.kept
        arrays.sources[: self._most_rows] = path.rows
        settings = [text.settings] * self._most_rows
        write_rows(settings, range(self._most_rows), arrays.settings[: self._most_rows], host[:0])
        arrays.ends[: len(text.end_ids)] = list(text.end_ids)
        memory.staged.copy(arrays.num_written)

    def _write_tables(self, arrays: FusedArrays) -> None:
        arrays.table[: len(self._sequence.blocks)] = self._sequence.blocks
        if arrays.window_table is not None:
            arrays.window_table[: len(self._sequence.windows)] = self._sequence.windows
        self._block_rows.write_table(arrays.block_table)
