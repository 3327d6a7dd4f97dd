"""A model on a device and its sequences: the part that all devices have in common.

The unit of work is a step over a `Batch` of up to `chunk_size` rows. The head runs only on rows whose logits
are wanted. Knows nothing of text, sampling or requests.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as TokenIds
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

import numpy as np

from coldstream.closing import Closing
from coldstream.errors import InvalidRequestError, UnsupportedError, host_memory_errors
from coldstream.experts.cpu.disk_tier import DiskStatistics
from coldstream.experts.expert_map import ExpertMap
from coldstream.experts.gpu_statistics import ExpertTimes, GpuExpertStatistics
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache.batch import Batch, BatchLimits, CheckedSegment, Segment, check_batch, check_segment
from coldstream.kvcache.cache import CacheSize
from coldstream.kvcache.sequence import Checkpoint, Sequence
from coldstream.kvcache.sequence_cache import AcceptedPath, Demand, SequenceCache, WholeOrCleared
from coldstream.models.footprint import bytes_per_token
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.models.spec.sanity import check_logits
from coldstream.placement.run_file import Observed

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
OnChunk = Callable[[TokenIds[int], Any], None]
States = Callable[[Collection[int]], Any]  # of rows of the last step: `ModelRunner.hidden` or `.features`

_NO_DEVICE_ERRORS: Final = nullcontext()


class MtpBlock(Protocol):
    """A model's block for multi-token prediction."""

    def new_sequence(self) -> Any:
        """An empty sequence: a block as `decoding.drafters.mtp` has it."""


class ModelRunner(Closing):
    """One model, and sequences whose state its memory holds. The runner closes the file.

    After an exception in the middle of a step or a commit, the sequences concerned are empty, never
    half-advanced. An exception before anything has changed leaves them as they were.

    A file that steps read is checked before anything is computed, and again before logits are returned. If it
    has changed, this call and all later ones raise ModelChangedError. So logits depend only on the bytes that
    were opened.
    """

    chunk_size: int  # rows of a step
    head_rows: int  # rows of one call of the head
    cache_size: CacheSize  # what all sequences hold together
    gives_hidden = False  # whether `hidden` has what steps compute
    aux_layers: tuple[int, ...] = ()  # layers after which `features` has the residual stream
    _sequences: SequenceCache
    _limits: BatchLimits
    _steps: Any = None  # the `CapturedSteps` of a device that captures them
    _kernels: Any = None  # the `KernelLoading` of a device for which kernels are compiled
    _begin_rest: Callable[[], None] | None = None  # see `go_on_loading`

    def __init__(self, file: GGUFFile, spec: ModelSpec, context_length: int) -> None:
        self.file = file
        self.spec = spec
        self.context_length = context_length
        self._num_rows = 0  # of the last step, 0 if it failed

    @abstractmethod
    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        """Reserve memory for the rows, for which there is room, compute them and keep their hidden states."""

    @abstractmethod
    def _logits_of(self, rows: Array) -> Any:
        """float32 logits [n, vocab] of rows of the last step, int64 [n] in any order.

        Calls `check_file` before it returns them.
        """

    def _hidden_of(self, rows: Array | slice) -> Any:
        """What `hidden` returns, for rows that the last step has. Only of runners that give hidden states."""
        raise NotImplementedError

    def _features_of(self, rows: Array | slice) -> Any:
        """What `features` returns, for rows that the last step has. Only of runners with auxiliary layers."""
        raise NotImplementedError

    @abstractmethod
    def _commit(self, path: AcceptedPath) -> None:
        """Advance caches and states as a chain of the path's rows would have done."""

    @property
    @abstractmethod
    def reads_file(self) -> bool:
        """Whether steps read weights from the file. If not, loading has copied them all, and later changes
        of the file have no effect.
        """

    @property
    @abstractmethod
    def tier(self) -> str:
        """The kernels that run."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """CPU threads that compute."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """Suspicious properties of the file that need not be errors, as text."""

    @property
    def disk(self) -> DiskStatistics | None:
        """Statistics of experts read from the disk; None if all weights are in memory."""
        return None

    @property
    def gpu_experts(self) -> GpuExpertStatistics | None:
        """Statistics of experts that the GPU does not hold; None if it holds all, or without a GPU."""
        return None

    @property
    def expert_times(self) -> ExpertTimes | None:
        """Where steps spent time for experts outside fast memory; None if all are there.

        Waits for a running step. Raises DeviceError.
        """
        return None if self.disk is None else ExpertTimes(disk=self.disk.wait_s)

    @property
    def observed(self) -> Observed | None:
        """What steps of one token took so far on a GPU that lacks experts; None without one."""
        return None

    @property
    def locked_bytes(self) -> tuple[int, int] | None:
        """Bytes of RAM that were to be page-locked for a GPU so far, and those that are; None: none were."""
        return None

    @property
    def num_captured(self) -> int:
        """Steps so far that took longer for a CUDA graph, or as the first of their shape; 0 on a CPU."""
        return 0 if self._steps is None else self._steps.num_captured

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """(hits, misses) of experts in fast memory so far; None if all are there."""
        return None if self.disk is None else (self.disk.hits, self.disk.misses)

    def expert_map(self) -> ExpertMap | None:
        """Recent uses of experts, and where they lie; None if nothing notes their uses."""
        return None

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        return bytes_per_token(self.spec, self.file.tensors)

    @property
    def takes_chosen(self) -> bool:
        """Whether a step may have a `ChosenToken`, so that it is launched before the host knows the token."""
        return self._limits.num_chosen > 0

    def take_back(self, sequence: Sequence) -> None:
        """Tells that the last step left the sequence's only row out, whose `ChosenToken` was an end token.

        Raises InvalidRequestError for a sequence without such a row.
        """
        self._sequences.take_back(sequence)

    def new_sequence(self) -> Sequence:
        """An empty sequence. It takes no memory before its first step."""
        return self._sequences.new()

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with the same tokens. Shared memory is copied when either first writes to it.

        Raises InvalidRequestError, as all methods with a sequence do, if the sequence was released or is of
        another runner, and if a tree is pending where none may be.
        """
        return self._sequences.fork(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the memory of the sequence, which cannot be used afterwards."""
        self._sequences.release(sequence)

    def freed_by(self, sequences: Collection[Sequence]) -> CacheSize:
        """What releasing these sequences together would free. They have no pending trees."""
        return self._sequences.freed_by(sequences)

    @contextmanager
    def contents(self) -> Iterator[SequenceCache]:
        """Access to the memory of sequences, to read and write their bytes. A device's errors are typed."""
        with self._typed_errors():
            yield self._sequences

    def clear(self, sequence: Sequence) -> None:
        """Empties the sequence and drops its checkpoints."""
        self._sequences.clear(sequence)

    @property
    def free(self) -> CacheSize:
        """What of `cache_size` no sequence and no checkpoint has."""
        return self._sequences.free

    def owns_next_row(self, sequence: Sequence) -> bool:
        """Whether a further row of the sequence takes nothing of `free`."""
        return self._sequences.owns_next_row(sequence)

    def need_of(self, demands: Collection[Demand]) -> CacheSize:
        """What a step with these rows takes, copies of what sequences share included."""
        return self._sequences.need_of(demands)

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """A point for `restore`. It takes a recurrent state as soon as the sequence goes on."""
        return self._sequences.checkpoint(sequence)

    def restore(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Truncates the sequence to its checkpoint, which stays. Later checkpoints are dropped."""
        self._sequences.restore(sequence, checkpoint)

    def drop(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint of the sequence."""
        self._sequences.drop(sequence, checkpoint)

    @host_memory_errors()
    def step(self, batch: Batch) -> tuple[Any, ...]:
        """Computes the rows of a batch. For each segment float32 logits [wanted rows, vocab].

        They may be on a device, valid until the next step: `numpy.asarray` copies them to the host. Chains
        are committed, trees stay pending. Raises InvalidRequestError for a batch that cannot be computed and
        OutOfMemoryError if there is no room, both before anything changes, and ModelChangedError.
        """
        segments = check_batch(batch, self._sequences, self._limits)
        self._sequences.check_room([segment.demand for segment in segments])
        self.check_file()
        return self._step(segments)

    @host_memory_errors()
    def commit(self, sequence: Sequence, rows: Collection[int]) -> None:
        """Keeps a path of the sequence's pending tree, each row the parent of the next, and forgets the rest.

        Without rows the whole tree is forgotten. Raises InvalidRequestError if rows is no path or no tree is
        pending. Raises OutOfMemoryError if the sequence shares its recurrent state and there is no room for
        another. Both leave everything as it was.
        """
        with self._typed_errors():
            path = self._sequences.accept(sequence, rows)
            if path.rows:
                with WholeOrCleared(self._sequences, [sequence]):
                    self._commit(path)
        self._sequences.settle(sequence, len(path.rows))

    def hidden(self, rows: Collection[int]) -> Any:
        """Hidden states after the last norm, which the head reads, of rows of the last step's batch.

        float32 [len(rows), E] on the model's device, valid until the next step. Where the file has a block
        for multi-token prediction that reads several residual streams, these are all of them after the last
        layer, [len(rows), C·E]. Raises InvalidRequestError for rows that the step did not have, and
        UnsupportedError unless the runner `gives_hidden`.
        """
        if not self.gives_hidden:
            raise UnsupportedError(
                f"a model on the device {self.tier} does not give its hidden states: draft without them"
            )
        return self._hidden_of(self._computed(rows))

    def features(self, rows: Collection[int]) -> Any:
        """Residual streams of rows of the last step's batch after the auxiliary layers, side by side.

        [len(rows), len(aux_layers) · E] on the model's device, float32 or on a GPU bfloat16, valid until the
        next step. Raises InvalidRequestError for rows that the step did not have, and UnsupportedError
        without such layers.
        """
        if not self.aux_layers:
            raise UnsupportedError(
                f"the model on the device {self.tier} was loaded without keeping residual streams: draft "
                "without them"
            )
        return self._features_of(self._computed(rows))

    def load_mtp(self) -> MtpBlock:
        """The file's block for multi-token prediction, with as much room for sequences as this runner has.

        It has to be given up before the runner is closed. Raises UnsupportedError if the runner has none to
        give, InconsistentError, ModelChangedError and OutOfMemoryError.
        """
        raise UnsupportedError(
            f"the model on the device {self.tier} was loaded without its block for multi-token prediction: "
            "plan with spec_type mtp"
        )

    def _computed(self, rows: Collection[int]) -> Array | slice:
        """The rows as int64 [n] or, of adjacent ones, a slice, if the last step had them."""
        if isinstance(rows, range) and rows.step == 1 and 0 <= rows.start <= rows.stop <= self._num_rows:
            return slice(rows.start, rows.stop)  # as after every token, whose time counts
        indices = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < self._num_rows:
            raise InvalidRequestError(
                f"states of rows {indices.min()} … {indices.max()}, but the last step computed "
                f"{self._num_rows}"
            )
        return indices

    @host_memory_errors()
    def extend(
        self,
        sequence: Sequence,
        token_ids: TokenIds[int],
        progress: Progress | None = None,
        on_chunk: OnChunk | None = None,
        states: States | None = None,
    ) -> Any:
        """Appends one or more tokens in steps. Returns the logits [vocab] after the last token.

        After each step on_chunk is called with the step's tokens and their states, then progress with (tokens
        done, tokens in all). states: `hidden` (the default) or `features`. An exception of a callback, or any
        error after the first step, leaves the sequence empty. Raises as `step`. Raises UnsupportedError for
        an on_chunk if the runner has no such states.
        """
        states = states or self.hidden
        if on_chunk is not None:
            states(range(0))  # raises before anything has changed if there are none
        chunks = self._chunks(sequence, token_ids)
        self.check_file()
        done = 0
        for chunk in chunks:
            done += len(chunk)
            wanted = np.arange(len(chunk) - 1 if done == len(token_ids) else len(chunk), len(chunk))
            (logits,) = self._step([CheckedSegment.chain(sequence, chunk, wanted)])
            with WholeOrCleared(self._sequences, [sequence]):
                if on_chunk is not None:
                    on_chunk(chunk.tolist(), states(range(len(chunk))))
                if progress is not None:
                    progress(done, len(token_ids))
        return logits[0]

    @host_memory_errors()
    def logits(self, token_ids: TokenIds[int]) -> Array:
        """float32 logits [T, vocab] after each token, computed in a new sequence.

        Raises as `step`, and GenerationFault if a logit is not finite.
        """
        sequence = self.new_sequence()
        chunks = self._chunks(sequence, token_ids)
        self._num_rows = 0
        result = np.empty((len(token_ids), self.spec.vocab_size), np.float32)
        try:
            self.check_file()
            with self._typed_errors():
                for chunk in chunks:
                    self._launch([CheckedSegment.chain(sequence, chunk, np.arange(0))])
                    for row in range(0, len(chunk), self.head_rows):
                        first, count = sequence.length + row, min(self.head_rows, len(chunk) - row)
                        rows = result[first : first + count]
                        rows[:] = np.asarray(self._logits_of(np.arange(row, row + count)))
                        check_logits(rows, first + 1)
                    self._sequences.append(sequence, len(chunk))
        finally:
            self.release(sequence)
        return result

    def _chunks(self, sequence: Sequence, token_ids: TokenIds[int]) -> list[Array]:
        """The tokens as int32, divided into steps, if `sequence` has room for them. Raises as `step`."""
        segment = check_segment(Segment(sequence, token_ids), self._sequences, self._limits)
        self._sequences.check_room([segment.demand])
        ids = segment.token_ids
        return [ids[start : start + self.chunk_size] for start in range(0, len(ids), self.chunk_size)]

    def _step(self, segments: Collection[CheckedSegment]) -> tuple[Any, ...]:
        self._num_rows = 0
        with self._typed_errors():
            try:
                self._launch(segments)
                wanted, start = [], 0
                for segment in segments:
                    wanted.append(segment.wanted + start if start else segment.wanted)
                    start += len(segment.token_ids)
                logits = self._logits_of(np.concatenate(wanted) if len(wanted) > 1 else wanted[0])
            except BaseException:
                self._sequences.clear_all([each for segment in segments for each in segment.sequences])
                raise
        self._num_rows = start
        for segment in segments:
            if segment.parents is None:
                self._sequences.append(segment.sequence, len(segment.token_ids), segment.forks)
        parts, end = [], 0
        for rows in wanted:
            parts.append(logits[end : end + len(rows)])
            end += len(rows)
        return tuple(parts)

    def _typed_errors(self) -> AbstractContextManager[None]:
        """Translates a device's exceptions inside into coldstream's errors."""
        return _NO_DEVICE_ERRORS

    def check_file(self) -> None:
        """Raises ModelChangedError if steps read a file that may have other bytes than it was opened with."""
        if self.reads_file:
            self.file.check_unchanged()

    def end_steps(self) -> None:
        """Waits for steps that were launched and whose logits nobody asks for any more. Raises as `step`."""
        return

    def go_on_loading(self) -> None:
        """Begins beside the caller what an early start put off until the first token is there.

        For a caller who does not wait for that token yet. Calling twice is harmless.
        """
        if self._begin_rest is not None:
            self._begin_rest()

    def finish_loading(self) -> None:
        """Returns when nothing that loading began goes on beside steps.

        Steps may be taken before. They wait for what they need, and are slower meanwhile. Raises CompileError
        for a kernel that does not compile.
        """
        if self._kernels is not None:
            with self._typed_errors():
                self._kernels.wait()

    def close(self) -> None:
        """Closes the file. The runner cannot be used afterwards."""
        self.file.close()
