"""Drafts of an MTP block on a GPU: a chain without the host between its steps."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from coldstream import kvcache
from coldstream.kernels.cuda.contents import copy_parts, joined
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.fused.cuda import MAX_FUSED_ROWS, FusedArrays, FusedKernels
from coldstream.kernels.fused.reference import NUM_COLUMNS, FusedText
from coldstream.kernels.ops import MAX_SHORT_CHAIN, SHORT_CONTEXT
from coldstream.kvcache.batch import CheckedSegment
from coldstream.kvcache.sequence_cache import Demand, SequenceCache, WholeOrCleared
from coldstream.models.cuda.fused_draft import CudaFusedRun, CudaFusedSteps, FusedShape, shaped_rows
from coldstream.models.cuda.graphs import CapturedSteps
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.mtp_block import BRANCHING, MAX_MTP_ROWS, LoadedMtp, run_shape
from coldstream.models.mtp.model import MtpRows

TokenIds = np.ndarray[tuple[int], np.dtype[np.int32]]
MAX_CHAIN = 64  # steps of a chain, whose candidates reach the host together


class CudaMtp:
    """The block of a runner, whose memory and captured steps it uses.

    begin: called before each step of the block. A step overwrites the outputs of the runner's last step.
    make_room: as `CapturedSteps.run` has it.
    """

    def __init__(
        self,
        loaded: Loaded,
        context_length: int,
        steps: CapturedSteps,
        begin: Callable[[], None],
        make_room: Callable[[], bool],
    ) -> None:
        assert loaded.mtp is not None, "the runner was loaded with its block"
        self.context_length = context_length
        self._loaded, self._steps = loaded.mtp, steps
        self.fused = None
        if loaded.fused is not None:
            self.fused = CudaFusedSteps(loaded, MtpFusedDrafter(loaded.mtp), steps, begin, make_room)
        self._begin, self._make_room = begin, make_room
        self._found = allocations.page_locked((MAX_CHAIN, 2, BRANCHING), "int32")

    def new_sequence(self) -> "CudaMtpSequence":
        """An empty sequence. It takes no memory before its first row."""
        return CudaMtpSequence(self, self._loaded.sequences.new())

    def append(self, sequence: kvcache.Sequence, token_ids: Sequence[int], states: Sequence[Any]) -> None:
        """See `CudaMtpSequence.append`."""
        loaded, first = self._loaded, sequence.length
        try:
            with device_errors():
                for start in range(0, len(token_ids), MAX_MTP_ROWS):
                    part = slice(start, start + MAX_MTP_ROWS)
                    count = len(token_ids[part])
                    copy_parts(states[part], loaded.states[:count])
                    self._run_rows(sequence, token_ids[part])
                    loaded.sequences.append(sequence, count)
                loaded.follow_run(count - 1)
        except BaseException:
            # Only keys and values behind the end have changed.
            loaded.sequences.truncate(sequence, first)
            raise

    def draft(self, sequence: kvcache.Sequence, num_steps: int) -> list[tuple[list[int], list[float]]]:
        """See `CudaMtpSequence.chain`."""
        loaded, first = self._loaded, sequence.length
        try:
            with device_errors():
                self._run("mtp head", None, loaded.run_head)
                copies.to_host(self._found[0], loaded.candidates.data_ptr())
                for step in range(1, num_steps):
                    shape = self._write(sequence, np.zeros(1, np.int32))
                    self._run("mtp link", shape, partial(loaded.run_link, shape))
                    loaded.sequences.append(sequence, 1)
                    copies.to_host(self._found[step], loaded.candidates.data_ptr())
                streams.current_stream().synchronize()
        finally:
            loaded.sequences.truncate(sequence, first)
        found = self._found[:num_steps]
        token_ids, log_probs = found[:, 0].tolist(), found[:, 1].view(np.float32).tolist()
        return list(zip(token_ids, log_probs, strict=True))

    def rows_of(self, sequence: kvcache.Sequence) -> "MtpFusedRows":
        """Its rows, for fused steps."""
        return MtpFusedRows(self._loaded.sequences, sequence)

    def truncate(self, sequence: kvcache.Sequence, length: int) -> None:
        """See `MtpRows.truncate`."""
        self._loaded.sequences.truncate(sequence, length)
        if length == 0:
            self._loaded.sequences.clear(sequence)

    def _run_rows(self, sequence: kvcache.Sequence, token_ids: Sequence[int]) -> None:
        shape = self._write(sequence, np.array(token_ids, np.int32))
        self._run("mtp rows", shape, partial(self._loaded.run_rows, shape))

    def _write(
        self, sequence: kvcache.Sequence, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> StepShape:
        """Queues the inputs of rows that follow the sequence's, for which memory is reserved."""
        sequences, inputs = self._loaded.sequences, self._loaded.inputs
        segment = CheckedSegment.chain(sequence, token_ids, np.arange(0))
        sequences.check_room([segment.demand])
        sequences.reserve([segment.demand])
        end = sequence.length + len(token_ids)
        shape = run_shape(len(token_ids), is_deep=end > SHORT_CONTEXT)
        arrays = inputs.on_host(shape.num_rows)
        arrays.pad(arrays.write([segment]))
        inputs.copy(shape.num_rows)
        return shape

    def _run(self, kind: str, shape: object, step: Callable[[], None]) -> None:
        self._begin()
        self._steps.run((kind, shape), step, lambda nothing: nothing, self._make_room)


class CudaMtpSequence(MtpRows[CudaMtp]):
    """Rows of one sequence of `CudaMtp`."""

    def keep(self, hidden: Any) -> list[Any]:
        """Copies of hidden states [rows, …], one for each row, on the device."""
        return list(joined([hidden]))

    def append(self, token_ids: Sequence[int], states: Sequence[Any]) -> None:
        """Appends at least one row and at most `room`: each a token and the state before it, float32.

        Raises DeviceError and OutOfMemoryError, with no row appended. States that are not finite show in the
        candidates.
        """
        self.check(token_ids, states)
        self._block.append(self._sequence, token_ids, states)

    def chain(self, num_steps: int) -> Generator[tuple[list[int], list[float]], None, None]:
        """Candidates after the last row, then after the best of them, and so on; directly after `append`.

        They come at most num_steps times, while there is room. All are computed when the first is asked for.
        Log-probabilities are NaN if a logit is not finite. Raises as `append`.
        """
        yield from self._block.draft(self._sequence, min(num_steps, 1 + self.room, MAX_CHAIN))

    @property
    def has_fused_steps(self) -> bool:
        """Whether there are fused steps: if all of the model's experts are on the device."""
        return self._block.fused is not None

    def begin_fused(self, sequence: kvcache.Sequence, text: FusedText) -> CudaFusedRun | None:
        """Fused steps after the last row, which is the text's root; directly after `append`.

        See `CudaFusedSteps.start`. The rows that they keep are in the block afterwards.
        """
        fused = self._block.fused
        return None if fused is None else fused.start(sequence, self._block.rows_of(self._sequence), text)


class MtpFusedDrafter:
    """Implements `CudaFusedDrafter`: a chain of the block's likeliest tokens."""

    most_nodes = MAX_FUSED_ROWS - 1

    def __init__(self, mtp: LoadedMtp) -> None:
        self._mtp = mtp

    @property
    def candidate(self) -> Any:
        """See `CudaFusedDrafter`."""
        return self._mtp.candidates[0, :1]

    def draft(self, kernels: FusedKernels, arrays: FusedArrays, shape: FusedShape) -> None:
        """See `CudaFusedDrafter`. It begins after the block's last output."""
        step = StepShape(1, is_deep=shape.is_deep)
        columns = arrays.link_columns.reshape(NUM_COLUMNS, 1)
        self._mtp.run_head()
        kernels.extend_draft(0)
        for depth in range(1, shape.num_rows - 1):
            self._mtp.compute_link(*shaped_rows(columns, arrays.block_table, step))
            kernels.extend_draft(depth)

    def follow(self, arrays: FusedArrays, shape: FusedShape) -> None:
        """See `CudaFusedDrafter`."""
        mtp, num_rows = self._mtp, shape.num_rows
        columns = arrays.block_columns[: NUM_COLUMNS * num_rows].reshape(NUM_COLUMNS, num_rows)
        step = StepShape(num_rows, has_prompts=num_rows > MAX_SHORT_CHAIN, is_deep=shape.is_deep)
        token_ids, rows = shaped_rows(columns, arrays.block_table, step)
        mtp.follow(mtp.compute_rows(token_ids, mtp.trunk_states[:num_rows], rows), arrays.last_row)

    def state_of(self, row: int) -> Any | None:
        """See `CudaFusedDrafter`."""
        return joined([self._mtp.trunk_states[row : row + 1]])[0]


class MtpFusedRows:
    """Implements `FusedRows`. The last row is the text's root, which the block computed last."""

    def __init__(self, cache: SequenceCache, rows: kvcache.Sequence) -> None:
        self._cache, self._rows = cache, rows

    @property
    def length(self) -> int:
        """See `FusedRows`."""
        return self._rows.length

    @property
    def state_id(self) -> int:
        """See `FusedRows`."""
        assert self._rows.state is not None
        return self._rows.state

    def reserve(self, num_rows: int) -> None:
        """See `FusedRows`."""
        demand = Demand(self._rows, num_rows)
        self._cache.check_room([demand])
        self._cache.reserve([demand])

    def lengthen(self, num_rows: int) -> bool:
        """See `FusedRows`."""
        return self._cache.lengthen(self._rows, num_rows, 0)

    def write_table(self, table: Any) -> None:
        """See `FusedRows`."""
        table[: len(self._rows.blocks)] = self._rows.blocks

    def keep(self, num_rows: int) -> None:
        """See `FusedRows`."""
        self._cache.append(self._rows, num_rows)
        self._cache.truncate(self._rows, self._rows.length)

    def whole_or_cleared(self) -> AbstractContextManager[None]:
        """See `FusedRows`."""
        return WholeOrCleared(self._cache, [self._rows])
