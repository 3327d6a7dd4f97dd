"""Which experts of a layer go through a ring of device memory, and which the CPU computes. Pure.

The ring has buffers of equal size, used in cyclic order. A buffer holds a group of experts, matrix by
matrix, so that experts adjacent in the file stay adjacent and one copy transfers a run of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np

from coldstream.kernels.experts.shapes import MATRICES, MAX_GROUP

Array = np.ndarray[Any, Any]

ALIGNMENT = 256
MIN_BUFFERS = 3  # one is read, one is written, and one waits
BUFFER_BYTES = 32 * 2**20
NUM_PINNED_BUFFERS = 2  # page-locked, of a ring buffer each, for experts that are read from the file
FIRST_BUS_RATE, FIRST_CPU_RATE = 20e9, 10e9  # bytes a second, before any was measured


class StagingCopy(NamedTuple):
    """`size` bytes from the host address `source` to `offset` in the buffer.

    is_held: whether they lie in a pool, instead of where the file is mapped.
    """

    source: int
    offset: int
    size: int
    is_held: bool = False


@dataclass(frozen=True)
class LayerShape:
    """A layer's experts on the host, by matrix: address of the first expert's, stride between experts,
    bytes of one.
    """

    sources: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    def capacity(self, buffer_bytes: int) -> int:
        """How many experts a buffer holds; 0 if not even one."""
        return min(MAX_GROUP, (buffer_bytes - MATRICES * ALIGNMENT) // sum(self.sizes))

    def offsets(self, count: int) -> tuple[int, ...]:
        """Where the matrices of a group of `count` experts begin in its buffer."""
        ends = np.cumsum([-(-count * size // ALIGNMENT) * ALIGNMENT for size in self.sizes])
        return (0, *ends[:-1].tolist())

    def copies(
        self, experts: Sequence[int], held: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> Iterator[StagingCopy]:
        """The copies that transfer a group of experts in ascending order.

        held: those of them that lie elsewhere than in the file: addresses by matrix.
        """
        places = [place for place, expert in enumerate(experts) if expert not in held]
        runs = list(adjacent_runs([experts[place] for place in places]))
        if self.steps != self.sizes:
            runs = [(index, experts[place], 1) for index, place in enumerate(places)]
        matrices = zip(self.sources, self.steps, self.sizes, self.offsets(len(experts)), strict=True)
        for matrix, (source, step, size, offset) in enumerate(matrices):
            for index, expert, count in runs:
                yield StagingCopy(source + expert * step, offset + places[index] * size, count * size)
            for place, expert in enumerate(experts):
                if expert in held:
                    yield StagingCopy(held[expert][matrix], offset + place * size, size, is_held=True)


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
    """Buffers in cyclic order: one is free once the kernel that reads its last group is launched."""

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


def bus_order(counts: Array, missing: Array, with_cpu: bool) -> list[int]:
    """The experts that are `missing` (bool [experts]) and have tokens, by int counts [experts].

    In descending order of tokens with the CPU, which computes the last ones; otherwise in file order.
    """
    wanted = np.flatnonzero(missing & (counts > 0))
    if with_cpu:
        wanted = wanted[np.argsort(-counts[wanted], kind="stable")]
    return wanted.tolist()


def likely_order(last_counts: Array, missing: Array, with_cpu: bool) -> list[int]:
    """The experts that are `missing`, in the order in which to copy them before the layer's router has run.

    last_counts: int [experts], tokens of the step before. With the CPU only half of those that had any, as
    the CPU computes the others.
    """
    likely = bus_order(last_counts, missing, with_cpu)
    if with_cpu and likely:
        return likely[: -(-len(likely) // 2)]
    return likely + np.flatnonzero(missing & (last_counts == 0)).tolist()


class CpuShare:
    """How many experts of a layer the CPU computes, so that it ends when the last of the others has arrived.

    Estimated from measured rates: of the bus, and of the CPU in steps of about as many rows, as the time of
    an expert grows with its rows.
    """

    def __init__(self) -> None:
        self._bus_rate = FIRST_BUS_RATE
        self._cpu_seconds: dict[int, float] = {}  # per expert, by the bit length of a step's rows

    def learn_bus(self, num_bytes: int, seconds: float) -> None:
        """Averages in the rate of a transfer."""
        if seconds > 0:
            self._bus_rate = (self._bus_rate + num_bytes / seconds) / 2

    def learn_cpu(self, rows: int, num_experts: int, seconds: float) -> None:
        """Averages in the CPU's time for `num_experts` experts in a step of `rows` rows."""
        magnitude, measured = rows.bit_length(), seconds / num_experts
        self._cpu_seconds[magnitude] = (self._cpu_seconds.get(magnitude, measured) + measured) / 2

    def split(self, rows: int, num_experts: int, expert_bytes: int, bytes_on_their_way: int) -> int:
        """How many of `num_experts` the CPU computes: at least one, so that its rate stays measured."""
        if num_experts == 0:
            return 0
        on_cpu = self._cpu_seconds.get(rows.bit_length(), expert_bytes / FIRST_CPU_RATE)
        on_bus = expert_bytes / self._bus_rate
        waiting = bytes_on_their_way / self._bus_rate
        return max(1, min(num_experts, round((waiting + num_experts * on_bus) / (on_cpu + on_bus))))


class Lookahead:
    """How many groups of a layer are copied before its router has run, to keep the bus busy."""

    def __init__(self) -> None:
        self.count = 1

    def learn(self, num_on_their_way: int, most: int) -> None:
        """After the router has run: doubles if no group is in flight, decreases if several are."""
        if num_on_their_way == 0:
            self.count = min(2 * self.count, most)
        elif num_on_their_way > 1:
            self.count = max(1, self.count - 1)
