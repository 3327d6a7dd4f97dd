"""Which experts of a pool in RAM the device reads where they are, and what keeps them there. Pure.

The pool gives a place to another expert while a step runs. So an expert that a step's table names is held in
the pool: from before the table is written until the last step has ended whose table names it.

    changes = reads.changes(wanted)    # of the tables of the next step
    reads.written(step, changes)       # they are queued before step `step`
    reads.finish_step(step)            # it has ended, and so have all before it
"""

from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class HoldingPool(Protocol):
    """See `RamPool`."""

    def hold(self, layer: int, expert: int) -> tuple[int, ...] | None: ...

    def release(self, layer: int, expert: int) -> None: ...


class TableChanges(NamedTuple):
    """Experts that may be read from a step on, int64 [n], the host's addresses of their matrices, int64
    [n, matrices], and experts that may no longer be read, int64 [m].
    """

    added: Array
    addresses: Array
    removed: Array


class PoolReads:
    """Holds of the experts that steps read in `pool`, by number: layer · num_experts + expert."""

    def __init__(self, pool: HoldingPool, num_layers: int, num_experts: int, num_matrices: int) -> None:
        self._pool, self._num_experts, self._num_matrices = pool, num_experts, num_matrices
        self.readable = np.zeros(num_layers * num_experts, bool)  # that the tables name
        self._leaving: deque[tuple[int, Array]] = deque()  # the last step that may read them, and experts

    def changes(self, wanted: Array) -> TableChanges:
        """What makes the tables name the `wanted` experts, bool [all], but those that have left the pool."""
        removed = np.flatnonzero(self.readable & ~wanted)
        added, addresses = [], []
        for number in np.flatnonzero(wanted & ~self.readable).tolist():
            found = self._pool.hold(*divmod(number, self._num_experts))
            if found is not None:
                added.append(number)
                addresses.append(found)
        self.readable[added] = True
        places = np.array(addresses, np.int64).reshape(len(added), self._num_matrices)
        return TableChanges(np.array(added, np.int64), places, removed)

    def written(self, step: int, changes: TableChanges) -> None:
        """The steps from `step` on, and none before, have these changes in their tables."""
        if changes.removed.size:
            self.readable[changes.removed] = False
            self._leaving.append((step - 1, changes.removed))

    def finish_step(self, step: int) -> None:
        """All steps up to `step` have ended."""
        while self._leaving and self._leaving[0][0] <= step:
            self._release(self._leaving.popleft()[1])

    def close(self) -> None:
        """No step reads any longer."""
        while self._leaving:
            self._release(self._leaving.popleft()[1])
        self._release(np.flatnonzero(self.readable))
        self.readable[:] = False

    def _release(self, experts: Array) -> None:
        for number in experts.tolist():
            self._pool.release(*divmod(number, self._num_experts))
