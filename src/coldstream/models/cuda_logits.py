"""Logits on the GPU, and the choice of next tokens there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.staged import StagedMemory
from coldstream.kernels.sample.cuda import ROW_BYTES, SETTINGS_WORDS, sample_cuda, write_rows
from coldstream.kernels.sample.settings import RowSettings

Array = np.ndarray[Any, Any]
RECENT_OF_A_ROW = 64  # tokens for penalties of a row, unless a request asks for more


class Sampler:
    """Device memory for choosing tokens, allocated by `zeros` of the model's operations.

    There is room for `num_rows` rows at once, and for penalties over one whole context or RECENT_OF_A_ROW
    tokens of each row. A step that needs more is split into several launches.
    """

    def __init__(
        self, zeros: Callable[[tuple[int, ...], str], torch.Tensor], num_rows: int, context_length: int
    ) -> None:
        self._num_rows = num_rows
        self._num_recent = max(context_length, num_rows * RECENT_OF_A_ROW)
        num_words = num_rows * SETTINGS_WORDS
        # Settings and recent tokens are adjacent, so that one copy transfers both.
        self._inputs = StagedMemory(zeros((num_words + self._num_recent,), "int32"))
        self._settings = self._inputs.values[:num_words].view(num_rows, SETTINGS_WORDS)
        self._recent = self._inputs.values[num_words:]
        self._unpenalised = zeros((self._num_recent,), "float32")
        self._workspace = zeros((num_rows, ROW_BYTES), "uint8")
        self._chosen = zeros((num_rows, 2), "int32")
        self._host_chosen = torch.empty((0 if self._chosen.is_meta else num_rows, 2), dtype=torch.int32)
        if not self._chosen.is_meta:
            self._host_chosen = self._host_chosen.pin_memory()

    def choose(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        settings: Sequence[RowSettings],
        wait: Callable[[], None],
    ) -> list[int | None]:
        """The token after each of `rows`, all different, of float32 logits [n, vocab].

        None if there is none to choose. wait: returns when the device has done what is queued.
        """
        tokens: list[int | None] = []
        for part in self._parts(settings):
            tokens += self._choose_part(logits, rows[part], settings[part], wait)
        return tokens

    def _parts(self, settings: Sequence[RowSettings]) -> Iterator[slice]:
        """Slices of the rows that fit the memory, nearly always one."""
        first = num_recent = 0
        for index, each in enumerate(settings):
            is_full = index - first == self._num_rows or num_recent + len(each.recent) > self._num_recent
            if is_full and index > first:
                yield slice(first, index)
                first, num_recent = index, 0
            num_recent += len(each.recent)
        yield slice(first, len(settings))

    def _choose_part(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        settings: Sequence[RowSettings],
        wait: Callable[[], None],
    ) -> list[int | None]:
        num_words = self._settings.numel()
        on_host = self._inputs.on_host
        to = on_host[:num_words].reshape(self._settings.shape)
        num_recent = write_rows(settings, rows, to[: len(rows)], on_host[num_words:])
        self._inputs.copy(num_words + num_recent)
        chosen = self._chosen[: len(rows)]
        sample_cuda(
            logits,
            self._settings[: len(rows)],
            self._recent,
            self._unpenalised,
            self._workspace,
            chosen,
            draws=any(each.temperature != 0 for each in settings),
        )
        host_chosen = self._host_chosen[: len(rows)]
        host_chosen.copy_(chosen, non_blocking=True)
        wait()
        return [None if fault else token for token, fault in host_chosen.tolist()]


@dataclass(frozen=True)
class OnDevice:
    """The logits of one step, float32 [n, vocab]; implements decoding's `DeviceStep`."""

    values: torch.Tensor
    sampler: Sampler
    is_current: Callable[[], bool]  # until the runner's next step
    download: Callable[[Sequence[torch.Tensor]], Array]  # several [n, vocab], as one
    wait: Callable[[], None]  # returns when the device has done what is queued

    def choose(self, rows: Sequence[int], settings: Sequence[RowSettings]) -> list[int | None]:
        """See decoding's `DeviceStep`."""
        self._check()
        with device_errors():
            return self.sampler.choose(self.values, rows, settings, self.wait)

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
    """float32 logits [vocab] after one row of a step; implements decoding's `DeviceLogits`."""

    step: OnDevice
    row: int

    def __len__(self) -> int:
        return self.step.values.shape[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.step.bring([self.row])[0], dtype=dtype)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive rows, as (first, end)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][1]:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
