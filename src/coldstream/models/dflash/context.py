"""What a DFlash drafter keeps of the committed rows of a sequence: keys and values, and rows that wait."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coldstream import kvcache
from coldstream.errors import ColdstreamError
from coldstream.kernels.fused.reference import FusedText
from coldstream.models.dflash.spec import FIRST_CONTEXT_ROWS, DflashSpec

CHUNK_ROWS: Final = 512  # of a prompt that are computed at once
Rows = NDArray[np.float32]  # keys or values


class ContextRows:
    """Rows in RAM by ascending position; positions may be missing.

    With a window only the last rows are sure to be kept: those that a row behind the last one attends to.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int | None) -> None:
        self._window = window
        self._shape = (num_kv_heads, head_dim)
        self._keys, self._values = (np.empty((0, *self._shape), np.float32) for _ in range(2))
        self._positions = np.empty(0, np.int64)
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all rows that there is room for."""
        return int(2 * self._keys.nbytes)

    @property
    def last_position(self) -> int:
        """Of the last row, −1 if there are none."""
        return int(self._positions[self._count - 1]) if self._count else -1

    def append(self, keys: Rows, values: Rows, positions: NDArray[np.int64]) -> None:
        """Rows [n, num_kv_heads, head_dim] behind the last one; positions: int64 [n], ascending."""
        if self._window is not None:
            # Nothing behind the last row attends to earlier ones.
            first = max(0, len(positions) - self._window)
            keys, values, positions = keys[first:], values[first:], positions[first:]
        self._count = self._write(keys, values, positions)

    def truncate(self, length: int) -> None:
        """Forgets the rows from position `length` on."""
        self._count = int(np.searchsorted(self._positions[: self._count], length))

    def with_block(
        self, first_position: int, keys: Rows, values: Rows, positions: NDArray[np.int64]
    ) -> tuple[Rows, Rows, NDArray[np.int64]]:
        """Keys, values and positions of the kept rows from `first_position` on and of a block behind them.

        Views until the next call, after which the block is forgotten.
        """
        end = self._write(keys, values, positions)
        first = int(np.searchsorted(self._positions[: self._count], first_position))
        part = slice(first, end)
        return self._keys[part], self._values[part], self._positions[part]

    def _write(self, keys: Rows, values: Rows, positions: NDArray[np.int64]) -> int:
        """Puts rows behind the last one. Returns where they end."""
        if self._count + len(positions) > len(self._positions):
            self._make_room(len(positions))
        end = self._count + len(positions)
        self._keys[self._count : end] = keys
        self._values[self._count : end] = values
        self._positions[self._count : end] = positions
        return end

    def _make_room(self, count: int) -> None:
        """Moves the rows to the front of other memory. Rows outside a window are dropped."""
        kept = self._count if self._window is None else min(self._count, self._window)
        capacity = max(FIRST_CONTEXT_ROWS, 2 * len(self._positions), kept + count)
        if self._window is not None:
            capacity = min(capacity, max(2 * self._window, kept + count))
        part = slice(self._count - kept, self._count)
        keys, values = (np.empty((capacity, *self._shape), np.float32) for _ in range(2))
        positions = np.empty(capacity, np.int64)
        keys[:kept], values[:kept], positions[:kept] = (
            self._keys[part],
            self._values[part],
            self._positions[part],
        )
        self._keys, self._values, self._positions, self._count = keys, values, positions, kept


class LayerContext(Protocol):
    """The rows of some layers."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def last_position(self) -> int: ...

    def truncate(self, length: int) -> None: ...


ContextT = TypeVar("ContextT", bound=LayerContext)


def new_contexts(spec: DflashSpec) -> tuple[ContextRows, ...]:
    """Empty ones of all layers."""
    sizes = (spec.num_kv_heads, spec.head_dim)
    return tuple(ContextRows(*sizes, layer.window) for layer in spec.layers)


class CommittedRows(ABC, Generic[ContextT]):
    """The committed rows of one sequence.

    `length` counts them. Some may be missing, which makes drafts worse: rows that the drafter did not
    observe, rows that could not be computed, and rows that a window had dropped before the sequence became
    shorter. The last rows wait until there are `most_waiting` of them, or a draft. The subclass chooses
    arrays and errors.
    """

    def __init__(self, contexts: Sequence[ContextT], most_waiting: int) -> None:
        """contexts: empty ones, of all layers."""
        self._contexts = contexts
        self._most_waiting = most_waiting
        self._waiting: list[Any] = []  # features of the last rows
        self._num_waiting = 0
        self.length = 0

    @property
    def has_fused_steps(self) -> bool:
        """Whether `begin_fused` may begin any."""
        return False

    def begin_fused(self, sequence: kvcache.Sequence, text: FusedText) -> Any:
        """None: the host takes part in every step, unless the subclass says otherwise."""
        return None

    @property
    def has_last(self) -> bool:
        """Whether the last committed row is there."""
        if self._num_waiting:
            return True
        return self.length > 0 and all(rows.last_position == self.length - 1 for rows in self._contexts)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(rows.num_bytes for rows in self._contexts)

    def append(self, features: Any) -> None:
        """Appends rows: float32 features [n, spec.feature_size], which are copied.

        Raises the subclass's errors. The rows that were being computed are missing then. Values that are not
        finite show in the drafts that attend to them.
        """
        for start in range(0, len(features), CHUNK_ROWS):
            part = self._copied(features[start : start + CHUNK_ROWS])
            self._waiting.append(part)
            self._num_waiting += len(part)
            self.length += len(part)
            if self._num_waiting >= self._most_waiting:
                self._compute_waiting()

    def truncate(self, length: int) -> None:
        """The sequence now has `length` rows.

        Rows beyond the former length are missing, and rows that cannot be computed here.
        """
        known = self.length - self._num_waiting
        if known < length <= self.length:
            kept = self._joined(self._waiting)[: length - known]
            self._waiting, self._num_waiting = [kept], len(kept)
        else:
            if length > self.length:
                with suppress(ColdstreamError, MemoryError):
                    self._compute_waiting()
            self._waiting, self._num_waiting = [], 0
            for rows in self._contexts:
                rows.truncate(length)
        self.length = length

    def _compute_waiting(self) -> None:
        if not self._num_waiting:
            return
        first, waiting = self.length - self._num_waiting, self._waiting
        self._waiting, self._num_waiting = [], 0
        try:
            self._compute(waiting, np.arange(first, self.length))
        except BaseException:
            for rows in self._contexts:
                rows.truncate(first)
            raise

    @abstractmethod
    def _copied(self, features: Any) -> Any:
        """A copy that the drafter computes with."""

    @abstractmethod
    def _joined(self, parts: list[Any]) -> Any:
        """All rows of the parts."""

    @abstractmethod
    def _compute(self, parts: list[Any], positions: NDArray[np.int64]) -> None:
        """Appends the keys and values of these rows to all contexts."""
