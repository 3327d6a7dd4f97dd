"""Logits on the GPU, and the choice of next tokens there."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np

from coldstream.kernels.cuda.activations import Activations
from coldstream.kernels.cuda.array import DeviceArray, RawArray
from coldstream.kernels.cuda.contents import take_rows
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.runtime import allocations, copies, streams
from coldstream.kernels.cuda.staged import StagedRing
from coldstream.kernels.sample.admit import Admission, admission_values, admit_rows
from coldstream.kernels.sample.cuda import ROW_BYTES, SETTINGS_WORDS, sample_cuda, write_rows
from coldstream.kernels.sample.settings import MAX_BIASED, RowSettings
from coldstream.kvcache.batch import CheckedSegment

Array = np.ndarray[Any, Any]
Result = tuple[int, int]  # a token, and 0 or the reason why none was chosen, as the kernels have it
Wait = Callable[[streams.Event], None]  # returns when the event has happened
RECENT_OF_A_ROW = 64  # tokens for penalties of a row, unless a request asks for more
NUM_CALLS = 2  # whose results are kept


class Sampler:
    """Device memory for choosing tokens, allocated by `zeros` of the model's operations.

    There is room for `num_rows` rows at once, for penalties over one whole context or RECENT_OF_A_ROW tokens
    of each row, and for MAX_BIASED biases. A step that needs more is split into several launches. Results are
    kept for two calls: the next call and a step may read them.
    """

    def __init__(
        self, zeros: Callable[[tuple[int, ...], str], DeviceArray], num_rows: int, context_length: int
    ) -> None:
        self._num_rows = num_rows
        self._num_recent = max(context_length, num_rows * RECENT_OF_A_ROW)
        num_words = num_rows * SETTINGS_WORDS
        num_others = self._num_recent + 2 * MAX_BIASED
        # Settings, recent tokens and biases are adjacent, so that one copy transfers all.
        self._inputs = StagedRing(zeros((num_words + num_others,), "int32"))
        self._settings = self._inputs.values[:num_words].reshape(num_rows, SETTINGS_WORDS)
        self._recent = self._inputs.values[num_words:]
        self._unchanged = zeros((num_others,), "float32")
        self._workspace = zeros((num_rows, ROW_BYTES), "uint8")
        self._results = zeros((NUM_CALLS * num_rows, 2), "int32")
        self._admissions = StagedRing(zeros((admission_values(num_rows),), "int32"))
        is_there = not self._results.is_meta
        count = len(self._results) if is_there else 0
        self._host_results = allocations.page_locked((count, 2), "int32") if is_there else np.empty((0, 2))
        self._ended: list[streams.Event | None] = [None] * NUM_CALLS
        self._num_launches = 0

    @property
    def num_results(self) -> int:
        """Results that `admit` and recent tokens may name."""
        return len(self._results)

    def begin(
        self, logits: DeviceArray, rows: Sequence[int], settings: Sequence[RowSettings], wait: Wait
    ) -> "CudaChoice":
        """Queues the choice of the token after each of `rows`, all different, of float32 logits [n, vocab].

        wait: see `CudaChoice`. All but the last of several launches are waited for.
        """
        tokens: list[Result] = []
        *parts, last = self._parts(settings)
        for part in parts:
            tokens += self._begin_part(logits, rows[part], settings[part], wait).results()
        choice = self._begin_part(logits, rows[last], settings[last], wait)
        return replace(choice, before=tuple(tokens))

    def admit(self, segments: Collection[CheckedSegment], columns: DeviceArray) -> None:
        """Queues writing tokens that the host does not know into a step's inputs; see `admit_rows`."""
        admissions, row = [], 0
        for segment in segments:
            if segment.chosen is not None:
                admissions.append(Admission(row, segment.chosen.index, segment.chosen.end_ids))
            row += len(segment.token_ids)
        admit_rows(admissions, self._admissions, self._results, columns)

    def choose(self, logits: DeviceArray, settings: DeviceArray, chosen: DeviceArray, *, draws: bool) -> None:
        """Queues the choice of the tokens after rows of logits, without penalties or biases, into `chosen`.

        settings, chosen: as `sample_cuda` has them, on the device already.
        """
        memory = (self._recent, self._unchanged, self._workspace)
        sample_cuda(logits, settings, *memory, chosen, chosen, draws=draws)

    def _parts(self, settings: Sequence[RowSettings]) -> Iterator[slice]:
        """Slices of the rows that fit the memory, nearly always one."""
        first = num_recent = num_biased = 0
        for index, each in enumerate(settings):
            is_full = (
                index - first == self._num_rows
                or num_recent + len(each.recent) > self._num_recent
                or num_biased + len(each.biased) > MAX_BIASED
            )
            if is_full and index > first:
                yield slice(first, index)
                first, num_recent, num_biased = index, 0, 0
            num_recent += len(each.recent)
            num_biased += len(each.biased)
        yield slice(first, len(settings))

    def _begin_part(
        self, logits: DeviceArray, rows: Sequence[int], settings: Sequence[RowSettings], wait: Wait
    ) -> "CudaChoice":
        num_words = self._settings.numel()
        on_host = self._inputs.next_on_host()
        to = on_host[:num_words].reshape(self._settings.shape)
        num_recent = write_rows(settings, rows, to[: len(rows)], on_host[num_words:])
        self._inputs.copy(num_words + num_recent)
        self._num_launches += 1
        call = self._num_launches % NUM_CALLS
        first = call * self._num_rows
        own = slice(first, first + len(rows))
        results = self._results[own]
        sample_cuda(
            logits,
            self._settings[: len(rows)],
            self._recent,
            self._unchanged,
            self._workspace,
            results,
            self._results,
            draws=any(each.temperature != 0 for each in settings),
        )
        host_results = self._host_results[own]
        copies.to_host(host_results, results.data_ptr())
        # That of a call whose results are no longer kept: making one takes longer than recording it again.
        ended = self._ended[call] = self._ended[call] or streams.Event()
        ended.record(streams.current_stream())
        launch = self._num_launches
        return CudaChoice(
            first, host_results, partial(wait, ended), lambda: self._num_launches < launch + NUM_CALLS
        )


@dataclass(frozen=True)
class CudaChoice:
    """Tokens that the device chooses. Implements decoding's `DeviceChoice`.

    wait: returns when the device has done what is queued up to the choice.
    """

    first: int  # result of the first row
    host_results: Array  # int32 [rows, 2], once the device has done it
    wait: Callable[[], None]
    is_kept: Callable[[], bool]  # until later choices use the same memory
    before: tuple[Result, ...] = ()  # of rows that were chosen by launches before

    @property
    def has_indices(self) -> bool:
        """See decoding's `DeviceChoice`."""
        return not self.before

    def index(self, row: int) -> int:
        """See decoding's `DeviceChoice`."""
        assert not self.before, "results of several launches are not kept together"
        return self.first + row

    def results(self) -> list[Result]:
        """See decoding's `DeviceChoice`."""
        with device_errors():
            self.wait()
        if not self.is_kept():
            raise RuntimeError("these tokens are gone: others have been chosen since")
        return [*self.before, *((token, fault) for token, fault in self.host_results.tolist())]


@dataclass(frozen=True)
class OnDevice:
    """The logits of one step, float32 [n, vocab]. Implements decoding's `DeviceStep`."""

    values: DeviceArray
    sampler: Sampler
    is_current: Callable[[], bool]  # until the runner's next step
    download: Callable[[Sequence[DeviceArray]], Array]  # several [n, vocab], as one
    wait: Wait

    def begin(self, rows: Sequence[int], settings: Sequence[RowSettings]) -> CudaChoice:
        """See decoding's `DeviceStep`."""
        self._check()
        with device_errors():
            return self.sampler.begin(self.values, rows, settings, self.wait)

    def bring(self, rows: Sequence[int]) -> Array:
        """See decoding's `DeviceStep`."""
        self._check()
        with device_errors():
            return self.download([self.values[first:end] for first, end in _runs(rows)])

    def _check(self) -> None:
        """Raises RuntimeError after a later step, which overwrites the memory."""
        if not self.is_current():
            raise RuntimeError("these logits are gone: the model has computed another step since")


@dataclass(frozen=True)
class StepLogits:
    """float32 logits [n, vocab] after some rows of a step. Valid until the runner's next step."""

    step: OnDevice
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, rows: int) -> "CudaLogits": ...

    @overload
    def __getitem__(self, rows: slice) -> "StepLogits": ...

    def __getitem__(self, rows: int | slice) -> "CudaLogits | StepLogits":
        if isinstance(rows, slice):
            return StepLogits(self.step, self.rows[rows])
        return CudaLogits(self.step, self.rows[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.step.bring(self.rows), dtype=dtype)


@dataclass(frozen=True)
class CudaLogits:
    """float32 logits [vocab] after one row of a step. Implements decoding's `DeviceLogits`."""

    step: OnDevice
    row: int

    def __len__(self) -> int:
        return self.step.values.shape[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.step.bring([self.row])[0], dtype=dtype)


@dataclass
class StepOutputs:
    """What the last step has left on the device, until the next one."""

    hidden_size: int  # of what `states_of` returns
    logits: Any = None  # of all rows
    hidden: Activations | None = None  # hidden states of all rows
    states: Any = None  # their float32 values, if they are kept beside logits, or all residual streams

    def forget(self) -> None:
        """Frees them."""
        self.logits = self.hidden = self.states = None

    def logits_of(self, rows: Array, head: Callable[[Activations], Any]) -> Any:
        """Logits of rows, int64 [n] with n ≥ 1; head: computes them of hidden states."""
        first, count = int(rows[0]), len(rows)
        is_run = np.array_equal(rows, np.arange(first, first + count))
        if (logits := self.logits) is not None:
            return logits[first : first + count] if is_run else take_rows(logits, rows)
        assert self.hidden is not None, "logits belong to a step"
        return head(self.hidden.rows(first, count) if is_run else self.hidden.take(rows))

    def states_of(self, rows: Array | slice) -> Any:
        """Hidden states float32 [n, hidden_size], of a slice as a view.

        RuntimeError if another step has begun.
        """
        if isinstance(rows, slice) and rows.start == rows.stop:
            return RawArray(0, (0, self.hidden_size), "float32")
        states: Any = self.states
        if states is None and self.hidden is not None:
            states = self.hidden.values
        if states is None:
            raise RuntimeError("these hidden states are gone: the device has computed another step since")
        return states[rows] if isinstance(rows, slice) else take_rows(states, rows)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive rows, as (first, end)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1]:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
