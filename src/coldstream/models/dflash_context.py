"""Keys and values that one layer of a DFlash drafter keeps of committed rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coldstream.models.dflash_spec import FIRST_CONTEXT_ROWS


class ContextRows:
    """Rows by ascending position; positions may be missing.

    With a window only the last rows are sure to be kept: those that a row behind the last one attends to.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, window: int | None, new: Callable[[tuple[int, ...]], Any]
    ) -> None:
        """new: memory of a shape, an array or a tensor; rows are of the same kind."""
        self._window, self._new = window, new
        self._shape = (num_kv_heads, head_dim)
        self._keys, self._values = (new((0, *self._shape)) for _ in range(2))
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

    def append(self, keys: Any, values: Any, positions: NDArray[np.int64]) -> None:
        """Rows [n, num_kv_heads, head_dim] behind the last one; positions: int64 [n], ascending."""
        if self._window is not None:
            # Those before them are attended to by nothing behind the last one.
            first = max(0, len(positions) - self._window)
            keys, values, positions = keys[first:], values[first:], positions[first:]
        self._count = self._write(keys, values, positions)

    def cut(self, length: int) -> None:
        """Forgets the rows from position `length` on."""
        self._count = int(np.searchsorted(self._positions[: self._count], length))

    def with_block(
        self, first_position: int, keys: Any, values: Any, positions: NDArray[np.int64]
    ) -> tuple[Any, Any, NDArray[np.int64]]:
        """Keys, values and positions of the kept rows from `first_position` on and of a block behind them.

        Views until the next call, after which the block is forgotten.
        """
        end = self._write(keys, values, positions)
        first = int(np.searchsorted(self._positions[: self._count], first_position))
        part = slice(first, end)
        return self._keys[part], self._values[part], self._positions[part]

    def _write(self, keys: Any, values: Any, positions: NDArray[np.int64]) -> int:
        """Puts rows behind the last one; where they end."""
        if self._count + len(positions) > len(self._positions):
            self._make_room(len(positions))
        end = self._count + len(positions)
        self._keys[self._count : end] = keys
        self._values[self._count : end] = values
        self._positions[self._count : end] = positions
        return end

    def _make_room(self, count: int) -> None:
        """Moves the rows to the front of other memory, of a window's rows only those that are needed."""
        kept = self._count if self._window is None else min(self._count, self._window)
        capacity = max(FIRST_CONTEXT_ROWS, 2 * len(self._positions), kept + count)
        if self._window is not None:
            capacity = min(capacity, max(2 * self._window, kept + count))
        part = slice(self._count - kept, self._count)
        keys, values = (self._new((capacity, *self._shape)) for _ in range(2))
        positions = np.empty(capacity, np.int64)
        keys[:kept], values[:kept], positions[:kept] = (
            self._keys[part],
            self._values[part],
            self._positions[part],
        )
        self._keys, self._values, self._positions, self._count = keys, values, positions, kept
