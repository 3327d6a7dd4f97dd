"""How the missing experts of a step are shared out between the bus and the CPU. Pure, without tensors.

Each missing expert is read once in a step, for all rows that chose it: by the GPU over the bus, which takes
the same time for one row and for several, or by the CPU, which takes longer for several. So those of the most
rows are the bus's. `partition.cuh` chooses the same on the device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS

WHOLE: Final = 1024  # of `MissTimes.bus_left` and `cpu_left`
MAX_NS: Final = 2**31 - 1


@dataclass(frozen=True)
class MissTimes:
    """Times of an expert that is not in the GPU's memory, in nanoseconds.

    bus: a read over the bus while the CPU reads too, in a step of several rows. cpu: the CPU's time for 1, 2,
    … MAX_MAILBOX_ROWS rows of it while the bus is busy; see `cpu_time` for more. answer: between the GPU's
    request and the CPU's first read, and back. bus_left and cpu_left: what is left when the other side has
    ended takes so many 1024ths of its time, from 1 on. row_bus: of a read over the bus in a step of one row,
    which has other kernels; 0: as long as `bus`. layer: of a whole layer that misses no expert; 0: unknown,
    so that no expert is copied ahead in a step of one row. Creation raises ValueError for numbers out of
    range.
    """

    bus: int
    cpu: tuple[int, ...]
    answer: int = 0
    bus_left: int = WHOLE
    cpu_left: int = WHOLE
    row_bus: int = 0
    layer: int = 0

    def __post_init__(self) -> None:
        if len(self.cpu) != MAX_MAILBOX_ROWS:
            raise ValueError(f"times of {len(self.cpu)} numbers of rows, not of {MAX_MAILBOX_ROWS}")
        may_be_zero = all(0 <= time <= MAX_NS for time in (self.answer, self.row_bus, self.layer))
        if not may_be_zero or not all(1 <= time <= MAX_NS for time in (self.bus, *self.cpu)):
            raise ValueError("a time of a missing expert that is no number of nanoseconds up to two seconds")
        if not all(1 <= share <= WHOLE for share in (self.bus_left, self.cpu_left)):
            raise ValueError(f"what is left takes from 1 to {WHOLE} 1024ths of its time")

    def nanoseconds(self, num_on_bus: int, by_cpu: Sequence[int]) -> int:
        """Until all are computed. by_cpu: the numbers of rows of the CPU's experts."""
        cpu = sum(map(self.cpu_time, by_cpu))
        return self._together(num_on_bus * self.bus, cpu, waits=bool(by_cpu))

    def cpu_time(self, rows: int) -> int:
        """The CPU's for any number of rows: of many, as much for each as of MAX_MAILBOX_ROWS."""
        if rows <= MAX_MAILBOX_ROWS:
            return self.cpu[rows - 1]
        return self.cpu[-1] * rows // MAX_MAILBOX_ROWS

    def _together(self, bus: int, cpu: int, *, waits: bool) -> int:
        if not waits:
            return bus * self.bus_left // WHOLE
        bus = max(0, bus - self._ahead)
        both = min(bus, cpu)
        left = (bus - both) * self.bus_left + (cpu - both) * self.cpu_left
        return self.answer + both + left // WHOLE

    @property
    def _ahead(self) -> int:
        """What the bus has done before the CPU begins, in time beside the CPU."""
        return min(self.answer * WHOLE // self.bus_left, MAX_NS)

    def num_streamed(self, rows: Sequence[int], most: int | None = None) -> int:
        """How many experts of a step of several rows the bus reads, those of the most rows first: the fastest
        way, and the least such.

        rows: of each missing expert, from 1 on, in any order. most: that it may read.
        """
        ordered = sorted(rows, reverse=True)
        cpu = sum(map(self.cpu_time, ordered))
        best, best_time = 0, self._together(0, cpu, waits=bool(ordered))
        for number, count in enumerate(ordered[:most], start=1):
            cpu -= self.cpu_time(count)
            time = self._together(number * self.bus, cpu, waits=number < len(ordered))
            if time < best_time:
                best, best_time = number, time
        return best

    def by_misses(self, most: int) -> tuple[int, ...]:
        """How many of the 0, 1, … `most` missing experts of a step of one row the bus reads."""
        times = replace(self, bus=self.row_bus or self.bus)
        return tuple(times.num_streamed([1] * misses) for misses in range(most + 1))

    def by_fetches(self, most: int, recall: float = 1.0) -> tuple[int, ...]:
        """How many of the 0, 1, … `most` missing experts of a layer are copied ahead in a step of one row: of
        the numbers that the bus copies while the CPU computes the others, the fastest, and the least such.

        recall: what part of the copied experts will be chosen. The CPU computes the others too, and is slower
        while the bus copies. In time is what would be if all were chosen, as then the CPU ends first. A
        single one may take as long as two layers: it is guessed two layers ahead, and few layers miss one.
        """
        return tuple(self._num_fetched(misses, recall) for misses in range(most + 1))

    def _num_fetched(self, misses: int, recall: float) -> int:
        if not self.layer:
            return 0
        best, least = 0, self._behind_copies(0, misses)
        for number in range(1, misses + 1):
            is_alone = misses == 1 and self.bus <= 2 * self.layer
            if number * self.bus > self._period(misses - number) and not is_alone:
                break  # more copies come later, and leave the CPU less to do meanwhile
            time = self._behind_copies(number, misses - recall * number)
            if time < least:
                best, least = number, time
        return best

    def by_most_fetches(self, misses: int, most: int, recall: float) -> tuple[float, ...]:
        """What `misses` experts of a layer take in a step of one row, if none of a layer's, one, … `most` are
        copied ahead. If any is, the bus reads none in place.
        """
        times = replace(self, bus=self.row_bus or self.bus)
        on_bus = times.num_streamed([1] * misses)
        in_place = times.nanoseconds(on_bus, [1] * (misses - on_bus))
        fetched = self._num_fetched(misses, recall)
        counts = (min(fetched, number) for number in range(1, most + 1))
        return in_place, *(self._behind_copies(count, misses - recall * count) for count in counts)

    def _period(self, by_cpu: int) -> int:
        return self.layer + (self.answer + by_cpu * self.cpu[0] if by_cpu else 0)

    def _behind_copies(self, number: int, by_cpu: float) -> float:
        """What the CPU takes beside so many copies. by_cpu: its experts on average; fewer than one are one
        that is not always asked for.
        """
        cpu = by_cpu * self.cpu[0]
        both = min(number * self.bus, cpu)
        return min(1.0, by_cpu) * self.answer + both + (cpu - both) * self.cpu_left / WHOLE

    def by_shared_fetches(self, most: int, recall: float = 1.0) -> tuple[int, ...]:
        """How many of a layer's 0, 1, … `most` missing experts are copied ahead in a step of several rows:
        the fastest number, and the least such.

        The bus copies them while the GPU computes the layer. What it has left then delays the experts that it
        is given when the layer's router has run. recall: see `by_fetches`.
        """
        return tuple(self._num_shared_fetched(misses, recall) for misses in range(most + 1))

    def _num_shared_fetched(self, misses: int, recall: float) -> int:
        best = 0, self._shared(misses, 0)[1]
        for number in range(1, misses + 1 if self.layer else 0):
            _, time = self._shared(misses - recall * number, number)
            if time >= best[1]:
                break
            best = number, time
        return best[0]

    def _shared(self, misses: float, num_fetched: int) -> tuple[float, int]:
        """How many of so many experts of a row each the CPU computes, and nanoseconds, if it ends when the
        bus does, which copies others before.
        """
        left = max(0, num_fetched * self.bus - self.layer)
        by_bus = (self.answer + misses * self.cpu[0] - left) / (self.bus + self.cpu[0])
        by_cpu = misses - min(misses, max(0.0, by_bus))
        return by_cpu, max(left, round(self.answer + by_cpu * self.cpu[0]))

    def by_shared_cpu(self, fetches: Sequence[int]) -> tuple[int, ...]:
        """How many of 0, 1, … missing experts of a step of several rows the CPU computes at least, if so many
        are copied ahead.
        """
        return tuple(
            int(self._shared(misses - fetched, fetched)[0]) for misses, fetched in enumerate(fetches)
        )

    def words(self, recall: float | None = None, most: int = MAX_RANKS) -> tuple[int, ...]:
        """As `MissTimes` of partition.cuh has them.

        recall: of guessed experts that are copied to the device, see `by_fetches`; None: none is copied.
        most: of a layer's experts that are copied in a step of one row. If any is, the bus reads none in
        place there, as it would take as much from the copies.
        """
        times = self.bus, self.answer, self._ahead, self.bus_left, self.cpu_left
        none = (0,) * (MAX_RANKS + 1)
        fetches, shared_fetches = none, none
        if recall is not None:
            fetches = tuple(min(each, most) for each in self.by_fetches(MAX_RANKS, recall))
            shared_fetches = self.by_shared_fetches(MAX_RANKS, recall)
        in_place = none if any(fetches) else self.by_misses(MAX_RANKS)
        shared = *shared_fetches, *self.by_shared_cpu(shared_fetches)
        return *times, *self.cpu, *in_place, *fetches, *shared


def _table(number: int) -> slice:
    """Of the words: one of those by numbers of missing experts."""
    first = 5 + MAX_MAILBOX_ROWS + number * (MAX_RANKS + 1)
    return slice(first, first + MAX_RANKS + 1)


BY_MISSES, BY_FETCHES, BY_SHARED_FETCHES, BY_SHARED_CPU = map(_table, range(4))
NUM_WORDS: Final = BY_SHARED_CPU.stop


def streamed_experts(
    topk_ids: Sequence[Sequence[int]], missing: Sequence[int], times: MissTimes, most: int | None = None
) -> set[int]:
    """Those of the `missing` experts that the bus reads in a step of several rows with these choices, no more
    than `most`; of one row, `by_misses` says how many of its first ones.

    Of experts that the same number of rows chose, those of the lowest numbers come first.
    """
    rows = Counter(expert for row in topk_ids for expert in row)
    chosen = sorted(set(missing) & set(rows), key=lambda expert: (-rows[expert], expert))
    return set(chosen[: times.num_streamed([rows[expert] for expert in chosen], most)])
