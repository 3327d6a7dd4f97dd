"""The ring of device memory through which a prefill stages missing experts. Pure.

The ring has buffers of equal size, used in cyclic order. A buffer holds a group of experts, matrix by matrix.
So experts that are adjacent in the file stay adjacent, and one copy transfers a run of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from coldstream.kernels.experts.shapes import MATRICES, MAX_GROUP
from coldstream.placement.sizes import BUFFER_BYTES, MIN_BUFFERS

Array = np.ndarray[Any, Any]

ALIGNMENT = 256
NUM_PINNED_BUFFERS = 2  # page-locked, of a ring buffer each, for experts that are read from the file


class StagingCopy(NamedTuple):
    """`size` bytes from the host address `source` to `offset` in the buffer.

    is_held: whether the source lies in a pool, not where the file is mapped.
    """

    source: int
    offset: int
    size: int
    is_held: bool = False


@dataclass(frozen=True)
class LayerShape:
    """A layer's experts on the host, by matrix: address of the first one, stride, and bytes of one."""

    sources: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    def ranges(self, num_experts: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of each matrix of all experts."""
        for source, step, size in zip(self.sources, self.steps, self.sizes, strict=True):
            yield source, (num_experts - 1) * step + size

    def capacity(self, buffer_bytes: int) -> int:
        """How many experts a buffer holds; 0 if not even one."""
        return min(MAX_GROUP, (buffer_bytes - MATRICES * ALIGNMENT) // sum(self.sizes))

    def offsets(self, count: int) -> tuple[int, ...]:
        """Where the matrices of a group of `count` experts begin in its buffer."""
        sizes = [-(-count * size // ALIGNMENT) * ALIGNMENT for size in self.sizes]
        return tuple(accumulate(sizes[:-1], initial=0))

    def copies(
        self, experts: Sequence[int], held: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> list[StagingCopy]:
        """The copies that transfer a group of experts in ascending order.

        held: addresses by matrix of experts that lie in a pool, not where the file is mapped.
        """
        places = [place for place, expert in enumerate(experts) if expert not in held]
        if self.steps != self.sizes:
            runs = [(place, experts[place], 1) for place in places]
        else:
            found = adjacent_runs([experts[place] for place in places])
            runs = [(places[index], expert, count) for index, expert, count in found]
        matrices = list(zip(self.sources, self.steps, self.sizes, self.offsets(len(experts)), strict=True))
        copies = [
            StagingCopy(source + expert * step, offset + place * size, count * size)
            for source, step, size, offset in matrices
            for place, expert, count in runs
        ]
        if held:
            copies += [
                StagingCopy(held[expert][matrix], offset + place * size, size, is_held=True)
                for matrix, (_, _, size, offset) in enumerate(matrices)
                for place, expert in enumerate(experts)
                if expert in held
            ]
        return copies


def adjacent_runs(experts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, expert, length) of each run of consecutive numbers: index and value of its first."""
    first = 0
    for end in range(1, len(experts) + 1):
        if end == len(experts) or experts[end] != experts[end - 1] + 1:
            yield first, experts[first], end - first
            first = end


@dataclass(frozen=True)
class RingShape:
    """`count` buffers of `buffer_bytes` each."""

    count: int
    buffer_bytes: int

    @classmethod
    def of(cls, ring_bytes: int) -> Self:
        count = max(MIN_BUFFERS, ring_bytes // BUFFER_BYTES)
        return cls(count, ring_bytes // count // ALIGNMENT * ALIGNMENT)


def least_ring(expert_bytes: int) -> int:
    """The smallest ring through which experts of that size fit, one at a time."""
    buffer = -(-(expert_bytes + MATRICES * ALIGNMENT) // ALIGNMENT) * ALIGNMENT
    return MIN_BUFFERS * buffer


class StagingRing:
    """Buffers in cyclic order. One is free once the kernel that reads its last group is launched."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._begun = self._read = 0

    @property
    def num_free(self) -> int:
        return self.count - (self._begun - self._read)

    def take(self) -> int:
        """The next buffer; ValueError if none is free."""
        if self.num_free == 0:
            raise ValueError("every buffer holds a group that has not been read")
        self._begun += 1
        return (self._begun - 1) % self.count

    def give_back(self, buffer: int) -> None:
        """Frees a buffer, whose reader has been launched. ValueError unless it is the oldest one taken."""
        if self._begun == self._read or buffer != self._read % self.count:
            raise ValueError(f"buffer {buffer} is not the next to be read")
        self._read += 1
