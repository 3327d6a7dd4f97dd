"""The committed rows of one sequence on a GPU: keys and values of all layers of a DFlash drafter.

Each layer has a ring, the row at position p in place p modulo its capacity, and the positions of what is
there, which kernels compare: so they need not be told which rows are missing. A layer with a window keeps as
many rows as that, one without as many as there are.
"""

import numpy as np
import torch

from coldstream.kernels.draft_block.cuda import CONTEXT_TYPE
from coldstream.models.dflash.spec import FIRST_CONTEXT_ROWS, DflashSpec


class RowSpans:
    """Which positions there are rows of, where only the last `capacity` ones are kept."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # ascending, neither empty nor adjacent

    @property
    def last(self) -> int:
        """−1 if there are none."""
        return self._spans[-1][1] - 1 if self._spans else -1

    def append(self, first: int, count: int, capacity: int) -> None:
        """At least one row, behind the last one."""
        assert first > self.last
        end = first + count
        if self._spans and self._spans[-1][1] == first:
            first = self._spans.pop()[0]
        self._spans.append((first, end))
        oldest = self.last + 1 - capacity
        self._spans = [(max(begin, oldest), end) for begin, end in self._spans if end > oldest]

    def cut(self, length: int) -> None:
        """Forgets those from position `length` on."""
        self._spans = [(begin, min(end, length)) for begin, end in self._spans if begin < length]


class DflashRings:
    """The rings of one sequence. They take no memory before `make_room`.

    table: `CONTEXT_TYPE` entries by layer, uint8 on the device; another tensor whenever memory has changed.
    """

    def __init__(self, spec: DflashSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self._room = 0  # positions that fit, however many of them a window keeps
        self._capacities: list[int] = []
        self._rows = torch.empty((0, spec.num_kv_heads, spec.head_dim), dtype=dtype)
        self._positions = torch.empty(0, dtype=torch.int32)
        self._spans = RowSpans()
        self.table = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return self._rows.nbytes

    @property
    def last_position(self) -> int:
        """Of the last row, −1 if there are none."""
        return self._spans.last

    def make_room(self, length: int) -> None:
        """For rows up to position `length`. Raises torch.OutOfMemoryError, with nothing changed."""
        if length <= self._room:
            return
        spec, room = self._spec, max(FIRST_CONTEXT_ROWS, 2 * self._room, length)
        capacities = [room if layer.window is None else min(room, layer.window) for layer in spec.layers]
        if capacities == self._capacities:
            self._room = room
            return
        ends = np.cumsum([0, *capacities])
        rows = torch.empty(
            (2 * int(ends[-1]), spec.num_kv_heads, spec.head_dim), dtype=self._dtype, device=self._device
        )
        positions = torch.full((int(ends[-1]),), -1, dtype=torch.int32, device=self._device)
        table = np.zeros(len(capacities), CONTEXT_TYPE)
        old = 0
        for layer, (first, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
            parts = (rows[2 * first : first + end], rows[first + end : 2 * end], positions[first:end])
            if self._capacities:
                # They keep their places: a ring that has come round does not grow.
                count = self._capacities[layer]
                keys, values = self._rows[2 * old : 2 * (old + count)].chunk(2)
                here = (keys, values, self._positions[old : old + count])
                for target, source in zip(parts, here, strict=True):
                    target[:count].copy_(source)
                old += count
            table[layer] = (*(part.data_ptr() for part in parts), capacities[layer])
        self.table = torch.from_numpy(table.view(np.uint8)).to(self._device)
        self._rows, self._positions = rows, positions
        self._room, self._capacities = room, capacities

    def appended(self, first: int, count: int) -> None:
        """So many rows from position `first` on have been put there, behind the last one."""
        if count:
            self._spans.append(first, count, min(self._capacities))

    def cut(self, length: int) -> None:
        """Forgets the rows from position `length` on."""
        if self._spans.last < length:
            return
        self._spans.cut(length)
        self._positions.masked_fill_(self._positions >= length, -1)
