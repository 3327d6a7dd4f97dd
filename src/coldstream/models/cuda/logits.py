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
from coldstream.kernels.sample.cuda import (
    RANKED_WORDS,
    ROW_BYTES,
    SETTINGS_WORDS,
    are_greedy,
    ranked_words,
    read_ranked,
    sample_cuda,
    write_rows,
)
from coldstream.kernels.sample.settings import MAX_BIASED, RankedTokens, RowSettings, mask_words
from coldstream.kvcache.batch import CheckedSegment

Array = np.ndarray[Any, Any]
Result = tuple[int, int]  # a token, and 0 or the reason why none was chosen, as the kernels have it
Wait = Callable[[streams.Event], None]  # returns when the event has happened
RECENT_OF_A_ROW = 64  # tokens for penalties of a row, unless a request asks for more
MOST_MASKS = 32  # rows of a launch with masks
RANKED_OF_A_ROW = 20  # likeliest tokens of a row, unless a request asks for more
MOST_RANKED = 1024  # of one row
NUM_CALLS = 2  # whose results are kept


class Sampler:
    """Device memory for choosing tokens, allocated by `zeros` of the model's operations.

    There is room for `num_rows` rows at once, for penalties over one whole context or RECENT_OF_A_ROW tokens
    of each row, for MAX_BIASED biases, for MOST_MASKS masks, and for MOST_RANKED likeliest tokens or
    RANKED_OF_A_ROW of each row. A step that needs more is split into several launches. Results are kept for
    two calls: the next call and a step may read them.
    """

    def __init__(
        self,
        zeros: Callable[[tuple[int, ...], str], DeviceArray],
        num_rows: int,
        context_length: int,
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._room = _Room(
            num_rows,
            max(context_length, num_rows * RECENT_OF_A_ROW),
            MAX_BIASED,
            min(num_rows, MOST_MASKS) * mask_words(vocab_size),
            max(RANKED_WORDS + 2 * MOST_RANKED, num_rows * (RANKED_WORDS + 2 * RANKED_OF_A_ROW)),
        )
        self._num_rows = num_rows
        num_words = num_rows * SETTINGS_WORDS
        num_others = self._room.recent + 2 * self._room.biased
        # Settings, recent tokens, biases and masks are adjacent, so that one copy transfers all.
        self._inputs = StagedRing(zeros((num_words + num_others + self._room.mask_words,), "int32"))
        self._settings = self._inputs.values[:num_words].reshape(num_rows, SETTINGS_WORDS)
        self._recent = self._inputs.values[num_words:]
        self._unchanged = zeros((num_others,), "float32")
        self._workspace = zeros((num_rows, ROW_BYTES), "uint8")
        self._results = zeros((NUM_CALLS * num_rows, 2), "int32")
        self._ranked = zeros((NUM_CALLS, self._room.ranked_words), "int32")
        self._admissions = StagedRing(zeros((admission_values(num_rows),), "int32"))
        is_there = not self._results.is_meta
        count = len(self._results) if is_there else 0
        self._host_results = allocations.page_locked((count, 2), "int32") if is_there else np.empty((0, 2))
        shape = (NUM_CALLS, self._room.ranked_words)
        self._host_ranked = allocations.page_locked(shape, "int32") if is_there else np.empty(shape)
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
        ranked: list[RankedTokens | None] = []
        *parts, last = self._parts(settings)
        for part in parts:
            made = self._begin_part(logits, rows[part], settings[part], wait)
            tokens += made.results()
            ranked += made.all_ranked()
        choice = self._begin_part(logits, rows[last], settings[last], wait)
        return replace(choice, before=tuple(tokens), ranked_before=tuple(ranked))

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
        sample_cuda(logits, settings, *memory, chosen, chosen, self._ranked, is_greedy=not draws)

    def _parts(self, settings: Sequence[RowSettings]) -> Iterator[slice]:
        """Slices of the rows that fit the memory, nearly always one."""
        first, taken = 0, _Room()
        for index, each in enumerate(settings):
            taken = taken.with_row(each)
            if index > first and not taken.fits(self._room):
                yield slice(first, index)
                first, taken = index, _Room().with_row(each)
        yield slice(first, len(settings))

    def _begin_part(
        self, logits: DeviceArray, rows: Sequence[int], settings: Sequence[RowSettings], wait: Wait
    ) -> "CudaChoice":
        num_words = self._settings.numel()
        on_host = self._inputs.next_on_host()
        to = on_host[:num_words].reshape(self._settings.shape)
        num_recent = write_rows(settings, rows, to[: len(rows)], on_host[num_words:])
        self._inputs.copy(num_words + num_recent)
        check_order()
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
            self._ranked[call],
            is_greedy=are_greedy(settings),
        )
        host_results = self._host_results[own]
        copies.to_host(host_results, results.data_ptr())
        num_ranked = sum(map(ranked_words, settings))
        host_ranked = self._host_ranked[call, :num_ranked]
        if num_ranked:
            copies.to_host(host_ranked, self._ranked[call].data_ptr())
        # That of a call whose results are no longer kept: making one takes longer than recording it again.
        ended = self._ended[call] = self._ended[call] or streams.Event()
        ended.record(streams.current_stream())
        launch = self._num_launches
        return CudaChoice(
            first,
            host_results,
            partial(wait, ended),
            lambda: self._num_launches < launch + NUM_CALLS,
            _Ranked(tuple(settings), host_ranked, self._vocab_size) if num_ranked else None,
        )


@dataclass(frozen=True)
class _Room:
    """What rows of a launch take, or may take."""

    rows: int = 0
    recent: int = 0  # tokens
    biased: int = 0  # tokens
    mask_words: int = 0
    ranked_words: int = 0

    def with_row(self, settings: RowSettings) -> "_Room":
        return _Room(
            self.rows + 1,
            self.recent + len(settings.recent),
            self.biased + len(settings.biased),
            self.mask_words + (0 if settings.allowed is None else len(settings.allowed)),
            self.ranked_words + ranked_words(settings),
        )

    def fits(self, room: "_Room") -> bool:
        return (
            self.rows <= room.rows
            and self.recent <= room.recent
            and self.biased <= room.biased
            and self.mask_words <= room.mask_words
            and self.ranked_words <= room.ranked_words
        )


@dataclass(frozen=True)
class _Ranked:
    """Where the ranks of a launch's rows come to."""

    settings: Sequence[RowSettings]  # of all of its rows
    words: Array  # int32, those of the ranked rows one after another
    vocab_size: int

    def has(self, row: int) -> bool:
        return self.settings[row].logprobs is not None

    def of(self, row: int) -> RankedTokens:
        first = sum(map(ranked_words, self.settings[:row]))
        own = self.settings[row]
        return read_ranked(own, self.words[first : first + ranked_words(own)], self.vocab_size)


@dataclass(frozen=True)
class CudaChoice:
    """Tokens that the device chooses. Implements decoding's `DeviceChoice`.

    wait: returns when the device has done what is queued up to the choice.
    """

    first: int  # result of the first row
    host_results: Array  # int32 [rows, 2], once the device has done it
    wait: Callable[[], None]
    is_kept: Callable[[], bool]  # until later choices use the same memory
    own_ranked: _Ranked | None = None  # of the last launch
    before: tuple[Result, ...] = ()  # of rows that were chosen by launches before
    ranked_before: tuple[RankedTokens | None, ...] = ()  # of these

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

    def all_ranked(self) -> list[RankedTokens | None]:
        """Of all rows of the launch, once it is waited for; None for those that are not ranked."""
        own, num_rows = self.own_ranked, len(self.host_results)
        return [own.of(row) if own and own.has(row) else None for row in range(num_rows)]

    def ranked(self, row: int) -> RankedTokens:
        """See decoding's `DeviceChoice`."""
        if row < len(self.before):
            found = self.ranked_before[row]
        else:
            if not self.is_kept():
                raise RuntimeError("these ranks are gone: others have been found since")
            found = None if self.own_ranked is None else self.own_ranked.of(row - len(self.before))
        assert found is not None, "the ranks of this row were not asked for"
        return found


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


def check_order() -> None:
    """All models of a process choose tokens in the device's default stream, and so one after another.

    The blocks of such a launch wait for each other. Of two at once each could have some of the places on the
    device that the other's blocks need.
    """
    assert streams.current_stream() is streams.default_stream(), "tokens are chosen in the default stream"


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive rows, as (first, end)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1]:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
