"""Runs streams of instructions without a GPU: whether they end, and whether every read is behind its write.

Counters only grow and rings are queues of one writer and one reader. So if streams end in one order, they do
in every order, and one run that goes on where it can finds every deadlock. The same run keeps vector clocks.
A read or a write that no chain of waits orders behind the last write, or behind the reads of what it
overwrites, is a fault in whatever order the streams run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_FAULTS = 20
Wait = tuple[Callable[[], bool], str]  # (whether it is over, what is waited for)
Stream = Iterator[Wait]
Clock = "np.ndarray[Any, np.dtype[np.int32]]"


class Memory:
    """Who last wrote each word, when, and when each stream last read a range, by ranges that were read."""

    def __init__(self, size: int, streams: int, part: int) -> None:
        """part: words of which ranges are looked for together."""
        self.size, self.streams, self.part = size, streams, part
        self.writers = np.full(size, -1, np.int32)
        self.times = np.zeros(size, np.int32)
        self.writes = np.full(size, -1, np.int32)  # the number of the last write of each word
        self.clocks: list[np.ndarray] = []  # of writers, by the number of the write
        self._readers: dict[int, dict[tuple[int, int], np.ndarray]] = {}

    def is_there_from_the_begin(self, begin: int, count: int) -> None:
        """Words that are written before the streams begin."""
        self.writers[begin : begin + count] = 0

    def note_read(self, begin: int, end: int, stream: int, time: int) -> None:
        """A read of a range of words."""
        for part in range(begin // self.part, (end - 1) // self.part + 1):
            of_part = self._readers.setdefault(part, {})
            clipped = max(begin, part * self.part), min(end, (part + 1) * self.part)
            if clipped not in of_part:
                of_part[clipped] = np.zeros(self.streams, np.int32)
            of_part[clipped][stream] = time

    def reads_before(self, begin: int, end: int, clock: np.ndarray) -> bool:
        """Whether all reads of these words come before what a stream with this clock does."""
        for part in range(begin // self.part, (end - 1) // self.part + 1):
            for (first, last), times in self._readers.get(part, {}).items():
                if first < end and last > begin and (times > clock).any():
                    return False
        return True


@dataclass
class Queue:
    """Pieces of a ring, or signals: how many were given, and the givers' clocks."""

    clocks: list[np.ndarray] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


class Simulator:
    """One run of streams. faults: what is wrong, the first MOST_FAULTS; none for right streams.

    Streams are generators that yield what they wait for, and call this for whatever else they do.
    """

    def __init__(self, streams: Sequence[str], counters: Sequence[str]) -> None:
        """The names of both."""
        self.names, self.counters = streams, counters
        self.faults: list[str] = []
        self.clocks = np.zeros((len(streams), len(streams)), np.int32)
        self.raised = np.zeros(len(counters), np.int64)
        self._awaited: dict[int, int] = {}
        self._counter_clocks = np.zeros((len(counters), len(streams)), np.int32)

    def run(self, streams: Iterable[tuple[int, Stream]]) -> list[str]:
        """The faults of streams, each with its number."""
        waiting: dict[int, tuple[Stream, Wait]] = {}
        for number, stream in streams:
            if (first := next(stream, None)) is not None:
                waiting[number] = stream, first
        while waiting:
            before, went_on = len(waiting), False
            for number, (stream, wait) in list(waiting.items()):
                current: Wait | None = wait
                while current is not None and current[0]():
                    went_on = True
                    current = next(stream, None)
                if current is None:
                    del waiting[number]
                else:
                    waiting[number] = stream, current
            if not went_on and len(waiting) == before:
                names = [f"{self.names[number]} waits for {wait[1]}" for number, (_, wait) in waiting.items()]
                self.fault(f"deadlock of {len(names)} streams: " + "; ".join(names[:4]))
                break
        for number, target in self._awaited.items():
            if self.raised[number] != target:
                raised = self.raised[number]
                self.fault(f"{self.counters[number]} is raised {raised} times, awaited {target}")
        return self.faults

    def fault(self, text: str) -> None:
        """Something that is wrong."""
        if len(self.faults) < MOST_FAULTS and text not in self.faults:
            self.faults.append(text)

    # ---- clocks

    def tick(self, stream: int) -> int:
        """The stream's next time."""
        self.clocks[stream, stream] += 1
        return int(self.clocks[stream, stream])

    def join(self, stream: int, clock: np.ndarray) -> None:
        """What the stream does from here on comes behind what this clock has seen."""
        np.maximum(self.clocks[stream], clock, out=self.clocks[stream])

    def give(self, stream: int, queue: Queue, item: Any = None) -> None:
        """Puts something in a queue."""
        self.tick(stream)
        queue.clocks.append(self.clocks[stream].copy())
        if item is not None:
            queue.items.append(item)

    def raise_counter(self, stream: int, number: int) -> None:
        """Adds one to a counter, which releases what the stream did before."""
        self.tick(stream)
        self.raised[number] += 1
        np.maximum(self._counter_clocks[number], self.clocks[stream], out=self._counter_clocks[number])

    def join_counter(self, stream: int, number: int) -> None:
        """Who finds a counter complete comes behind all who raised it."""
        self.join(stream, self._counter_clocks[number])

    # ---- memory

    def read(self, stream: int, memory: Memory, begin: int, count: int, what: str) -> None:
        """A read of `count` words."""
        if count <= 0:
            return
        time, those = self.tick(stream), slice(begin, begin + count)
        if begin < 0 or begin + count > memory.size:
            self.fault(f"{self.names[stream]} reads {what} outside of the memory")
            return
        writers = memory.writers[those]
        if (writers < 0).any():
            self.fault(f"{self.names[stream]} reads {what}, which nobody wrote")
        elif (self.clocks[stream, writers] < memory.times[those]).any():
            self.fault(f"{self.names[stream]} reads {what} before it has waited for who writes it")
        memory.note_read(begin, begin + count, stream, time)

    def write(self, stream: int, memory: Memory, begin: int, count: int, what: str) -> None:
        """A write of `count` words."""
        if count <= 0:
            return
        time, those = self.tick(stream), slice(begin, begin + count)
        if begin < 0 or begin + count > memory.size:
            self.fault(f"{self.names[stream]} writes {what} outside of the memory")
            return
        writers = memory.writers[those]
        known = writers >= 0
        if (self.clocks[stream, writers[known]] < memory.times[those][known]).any():
            self.fault(f"{self.names[stream]} writes {what} while another writes it")
        if not memory.reads_before(begin, begin + count, self.clocks[stream]):
            self.fault(f"{self.names[stream]} writes {what} while another reads what was there")
        memory.writers[those], memory.times[those] = stream, time
        memory.writes[those] = len(memory.clocks)
        memory.clocks.append(self.clocks[stream].copy())

    # ---- waits

    def await_counter(self, stream: int, number: int, target: int) -> Stream:
        """Until a counter has been raised so often; it must be as often as it is raised at all."""
        known = self._awaited.setdefault(number, target)
        if known != target:
            self.fault(f"{self.counters[number]} is awaited at {known} and at {target}")
        yield (lambda: bool(self.raised[number] >= target)), self.counters[number]
        self.join_counter(stream, number)

    def await_queue(self, stream: int, queue: Queue, number: int, what: str) -> Stream:
        """Until the number-th item of a queue has been given."""
        yield (lambda: len(queue.clocks) > number), what
        self.join(stream, queue.clocks[number])

    def await_words(self, stream: int, memory: Memory, begin: int, count: int, what: str) -> Stream:
        """Until all of these words have been written, which say so by themselves; reads them."""
        those = slice(begin, begin + count)
        yield (lambda: bool((memory.writers[those] >= 0).all())), what
        for number in np.unique(memory.writes[those]):
            if number >= 0:
                self.join(stream, memory.clocks[number])
        self.read(stream, memory, begin, count, what)
