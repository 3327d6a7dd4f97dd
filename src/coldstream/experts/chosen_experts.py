"""The experts that a step's routers chose, as the host sees them when the step has ended."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.skinny_shapes import MAX_GEMV_ROWS
from coldstream.kernels.cuda.staged import ReadBack
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS

Array = np.ndarray[Any, Any]


class AllocateZeros(Protocol):
    """Allocates persistent memory, all zero."""

    def __call__(self, shape: tuple[int, ...], dtype: str) -> DeviceArray: ...


@dataclass(frozen=True)
class ExpertIds:
    """The experts of one step, int32. Rows that the step did not have are undefined.

    used: [layers, MAX_MAILBOX_ROWS, K], chosen by routers. guessed: [layers, MAX_GEMV_ROWS, K], guessed at by
    earlier layers.
    """

    used: Array
    guessed: Array


class ChosenExperts:
    """Device memory, with the shapes of `ExpertIds`, that each decode step writes."""

    def __init__(self, zeros: AllocateZeros, num_layers: int, num_ranks: int) -> None:
        self.num_layers, self._num_ranks = num_layers, num_ranks
        rows = MAX_MAILBOX_ROWS + MAX_GEMV_ROWS
        self._memory = ReadBack(zeros((num_layers * rows * num_ranks,), "int32"))
        self.used, self.guessed = self._parts(self._memory.values)

    def copy(self) -> ExpertIds:
        """Queues a copy for the host. Its arrays are complete when the device has reached the copy.

        They stay until the second call after this one.
        """
        return ExpertIds(*self._parts(self._memory.copy()))

    def _parts(self, values: Any) -> tuple[Any, Any]:
        num_used = self.num_layers * MAX_MAILBOX_ROWS * self._num_ranks
        shape = (self.num_layers, -1, self._num_ranks)
        return values[:num_used].reshape(*shape), values[num_used:].reshape(*shape)
