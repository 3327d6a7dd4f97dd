"""A GPU's streams, events and copies without a GPU, in every order of execution that they allow.

A stream is a queue of operations. A seeded scheduler runs them one at a time, at any moment between the first
that is allowed and a wait for them. "Device" memory is the host's, so that copies move real bytes.

It detects two kinds of errors. *Races*, by vector clocks: of two operations that touch the same bytes, one of
them writing, one must happen before the other in every schedule. *Host memory*: what an operation reads must
not change between the call that queues it and its execution; what it writes is filled with garbage from when
it may run until it has run. Either is a `Violation`, which no code under test catches, and which is raised
again at every later call and at the end. To the clocks all threads of the host are one.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np

from coldstream.kernels.cuda.array import DeviceArray, num_bytes_of

RUBBISH = 0xA5
_VERBS = {True: "writes", False: "reads"}
WAIT_LIMIT_S = 20.0  # for threads of the host; exceeded only after an error

Range = tuple[int, int]  # address and bytes
Pieces = Sequence[tuple[int, int, int]]  # of a copy: target, source, bytes
Clock = dict[int, int]  # by stream: how many of its operations happen before


class Violation(AssertionError):
    """Operations on the same memory are not ordered."""


class Operation:
    """A queued operation; `index` is its number in its stream, from 1."""

    def __init__(self, name: str, stream: "ModelStream", index: int, clock: Clock) -> None:
        self.name, self.stream, self.index, self.clock = name, stream, index, clock
        self.needs: list[Operation] = []
        self.effect: Callable[[Operation], None] | None = None
        self.is_ready: Callable[[], bool] | None = None
        self.host_reads: list[tuple[int, bytes]] = []
        self.host_writes: list[Range] = []  # until it begins
        self.ended_at: int | None = None

    @property
    def can_run(self) -> bool:
        has_turn = all(need.ended_at is not None for need in self.needs)
        return has_turn and (self.is_ready is None or self.is_ready())


@dataclass(frozen=True)
class _Access:
    operation: Operation
    place: Range
    writes: bool


class ModelDevice:
    """One device. kernels: by name of the kernel, a function that queues the operation of a launch."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._eagerness = self._random.choice((0.0, 0.0, 0.3, 0.9))
        self._lock = threading.RLock()
        self._own = threading.local()
        self._streams: list[ModelStream] = []
        self.default = ModelStream(self)
        self._clock: Clock = {}
        self._accesses: list[_Access] = []
        self._most_accesses = 32
        self._memory: list[np.ndarray] = []  # kept, so that addresses are unique
        self._violation: Violation | None = None
        self._now = 0
        self._num_copies = 0
        self._gone: list[Range] = []
        self.refuses: Callable[[Pieces], bool] = lambda pieces: False
        self.free_bytes = 2**40
        self.registers = True  # memory of the host
        self.kernels: dict[str, Callable[..., None]] = {}

    @property
    def is_eager(self) -> bool:
        """Whether most operations run before a wait for them."""
        return self._eagerness > 0.5

    @property
    def current(self) -> "ModelStream":
        """The calling thread's stream."""
        stream: ModelStream = getattr(self._own, "stream", self.default)
        return stream

    @contextmanager
    def on(self, stream: "ModelStream") -> Iterator[None]:
        before, self._own.stream = self.current, stream
        try:
            yield
        finally:
            self._own.stream = before

    def queue(
        self,
        name: str,
        stream: "ModelStream | None" = None,
        *,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
        host_reads: Sequence[Range] = (),
        host_writes: Sequence[Range] = (),
        effect: Callable[[Operation], None] | None = None,
        after: Sequence[Operation] = (),
        is_ready: Callable[[], bool] | None = None,
    ) -> Operation:
        """Queues an operation to a stream, the current one by default; `host_…`: of the host's memory."""
        with self._lock:
            self._advance()
            stream = stream or self.current
            operation = Operation(name, stream, stream.count + 1, dict(self._clock))
            operation.needs = [*([stream.last] if stream.last else []), *after]
            for need in operation.needs:
                _join(operation.clock, need.clock)
            stream.count = operation.clock[stream.number] = operation.index
            stream.last = operation
            stream.queued.append(operation)
            operation.effect, operation.is_ready = effect, is_ready
            operation.host_reads = [(address, _bytes(address, size)) for address, size in host_reads]
            self.touch(operation, reads=[*reads, *host_reads], writes=[*writes, *host_writes])
            operation.host_writes = list(host_writes)
            self._begin()
            return operation

    def touch(self, operation: Operation, reads: Sequence[Range] = (), writes: Sequence[Range] = ()) -> None:
        """Records what an operation reads and writes; also callable while it runs."""
        with self._lock:
            for places, is_writing in ((reads, False), (writes, True)):
                for place in places:
                    if any(_overlap(place, gone) for gone in self._gone):
                        self._violate(f"{operation.name} touches memory that was given back")
                    self._note(_Access(operation, place, is_writing))

    def written_by_host(self, place: Range) -> None:
        """Records a write by the host: earlier operations on `place` must be known to have run."""
        with self._lock:
            if (operation := self._unknown(place)) is not None:
                self._violate(f"the host writes what {operation.name} may still touch")

    def copy_to_device(self, pieces: Pieces, handle: int) -> bool:
        """Queues them as one operation; False: `refuses` says so, and nothing is queued."""
        with self._lock:
            if self.refuses(pieces):
                return False
            number, self._num_copies = self._num_copies, self._num_copies + 1
            self.queue(
                f"copy {number}",
                self._streams[handle],
                writes=[(target, size) for target, _, size in pieces],
                host_reads=[(source, size) for _, source, size in pieces],
                effect=lambda operation: _move(pieces),
            )
            return True

    def copy_to_host(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queues it to the current stream."""
        self.bring_to_host(target.data_ptr(), *range_of(source), self.current.handle)

    def fill(self, address: int, byte: int, size: int, handle: int) -> None:
        """Queues writing the same byte everywhere."""
        self.queue(
            "fill",
            self._streams[handle],
            writes=[(address, size)],
            effect=lambda operation: ctypes.memset(address, byte, size),
        )

    def bring_to_host(self, target: int, source: int, size: int, handle: int) -> None:
        """Queues a copy to the host, by addresses."""
        self.queue(
            "copy to the host",
            self._streams[handle],
            reads=[(source, size)],
            host_writes=[(target, size)],
            effect=lambda operation: _move([(target, source, size)]),
        )

    def allocate(self, num_bytes: int) -> "ModelBlock":
        """A block full of garbage. When it is freed, no operation on it may be unfinished: the driver would
        wait for all work of the device.
        """
        with self._lock:
            memory = np.full(max(1, num_bytes), RUBBISH, np.uint8)
            self._memory.append(memory)
        return ModelBlock(self, memory.ctypes.data, num_bytes)

    def synchronize(self) -> None:
        """Runs everything that is queued."""
        for stream in list(self._streams):
            stream.synchronize()

    def wait_for(self, operation: Operation | None) -> None:
        """Returns when `operation` has run."""
        with self._lock:
            self._advance()
            if operation is not None:
                self._run_until(operation)
                _join(self._clock, operation.clock)

    def has_run(self, operation: Operation | None) -> bool:
        """Whether `operation` has run, as an event's query."""
        with self._lock:
            self._advance()
            if operation is None:
                return True
            if operation.ended_at is None:
                return False
            _join(self._clock, operation.clock)
            return True

    def check(self) -> None:
        """Raises the first Violation again."""
        if self._violation is not None:
            raise self._violation

    def _begin(self) -> None:
        """Fills the targets of operations that may run with garbage."""
        for stream in self._streams:
            if stream.queued and stream.queued[0].host_writes and stream.queued[0].can_run:
                for address, size in stream.queued[0].host_writes:
                    ctypes.memset(address, RUBBISH, size)
                stream.queued[0].host_writes = []

    def _advance(self) -> None:
        """At a call of the host: runs some of the operations that may run."""
        self.check()
        self._begin()
        while self._random.random() < self._eagerness:
            ready = [each.queued[0] for each in self._streams if each.queued and each.queued[0].can_run]
            if not ready:
                return
            self._run(self._random.choice(ready))

    def _run_until(self, last: Operation) -> None:
        """Runs what `last` needs, or more."""
        deadline = None
        while last.ended_at is None:
            needed = _ancestors(last)
            ready = [operation for operation in needed if operation.can_run]
            if ready:
                self._run(self._random.choice(ready))
                self._advance()
                continue
            deadline = deadline or time.monotonic() + WAIT_LIMIT_S
            if all(operation.is_ready is None for operation in needed) or time.monotonic() > deadline:
                self._violate(f"{last.name} waits for ever")
            time.sleep(0)

    def _run(self, operation: Operation) -> None:
        assert operation.stream.queued.popleft() is operation
        for address, then in operation.host_reads:
            if _bytes(address, len(then)) != then:
                self._violate(f"what {operation.name} reads of the host was changed before its turn")
        self._now += 1
        operation.ended_at = self._now
        if operation.effect is not None:
            try:
                operation.effect(operation)
            except AssertionError as error:
                self._violate(f"{operation.name}: {error}")
        self._begin()

    def _note(self, new: _Access) -> None:
        kept = []
        (begin, size), writer = new.place, new.writes
        for old in self._accesses:
            old_begin, old_size = old.place
            if old_begin >= begin + size or begin >= old_begin + old_size:
                kept.append(old)
                continue
            is_before = _is_before(old.operation, new.operation)
            if (old.writes or writer) and not is_before and not _is_before(new.operation, old.operation):
                first, second = (f"{each.operation.name} {_VERBS[each.writes]}" for each in (old, new))
                self._violate(f"{first} what {second}, in no order")
            is_covered = begin <= old_begin and old_begin + old_size <= begin + size
            if not (is_before and writer and is_covered):
                kept.append(old)
        self._accesses = [*kept, new]
        if len(self._accesses) > self._most_accesses:
            self._forget()

    def _forget(self) -> None:
        """Forgets accesses that happen before all unfinished and all later operations."""
        clocks = [self._clock, *(each.clock for stream in self._streams for each in stream.queued)]
        self._accesses = [
            old
            for old in self._accesses
            if any(clock.get(old.operation.stream.number, 0) < old.operation.index for clock in clocks)
        ]
        self._most_accesses = 2 * len(self._accesses) + 32

    def _given_back(self, place: Range) -> None:
        """Called when memory is freed, where an exception would be lost."""
        with self._lock:
            self._gone.append(place)
            operation = self._unknown(place)
            if operation is not None and self._violation is None:
                self._violation = Violation(f"{operation.name} may touch memory that was given back")

    def _unknown(self, place: Range) -> Operation | None:
        """An operation on `place` that the host does not know to have run."""
        touching = [old.operation for old in self._accesses if _overlap(old.place, place)]
        return next((each for each in touching if self._clock.get(each.stream.number, 0) < each.index), None)

    def _violate(self, message: str) -> None:
        self._violation = self._violation or Violation(message)
        raise self._violation


class ModelBlock:
    """In place of the runtime's allocations."""

    def __init__(self, device: ModelDevice, address: int, num_bytes: int) -> None:
        self._device, self.address, self.num_bytes = device, address, num_bytes

    def __del__(self) -> None:
        self._device._given_back((self.address, self.num_bytes))


class ModelStream:
    """In place of the runtime's streams."""

    def __init__(self, device: ModelDevice) -> None:
        self._device = device
        self.number = self.handle = len(device._streams)
        self.queued: deque[Operation] = deque()
        self.last: Operation | None = None
        self.count = 0
        device._streams.append(self)

    def synchronize(self) -> None:
        self._device.wait_for(self.last)

    def wait_event(self, event: "ModelEvent") -> None:
        if event.operation is not None:
            self._device.queue("wait", self, after=[event.operation])

    def wait_stream(self, other: "ModelStream") -> None:
        if other.last is not None:
            self._device.queue("wait", self, after=[other.last])


class ModelEvent:
    """In place of the runtime's events."""

    def __init__(self, device: ModelDevice, *, has_time: bool = False) -> None:
        self._device, self._has_time = device, has_time
        self.operation: Operation | None = None

    def record(self, stream: ModelStream | None = None) -> None:
        self.operation = self._device.queue("record", stream)

    def query(self) -> bool:
        return self._device.has_run(self.operation)

    def synchronize(self) -> None:
        self._device.wait_for(self.operation)

    def milliseconds_since(self, begin: "ModelEvent") -> float:
        times = [event.operation and event.operation.ended_at for event in (begin, self)]
        if None in times or not (self._has_time and begin._has_time):
            raise RuntimeError("both events must have happened, and keep their time")
        return float(times[1] - times[0])  # type: ignore[operator]


def range_of(array: DeviceArray) -> Range:
    """The range of a contiguous array."""
    assert array.is_contiguous()
    return array.data_ptr(), num_bytes_of(array)


def _overlap(one: Range, other: Range) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


def _is_before(first: Operation, second: Operation) -> bool:
    return second.clock.get(first.stream.number, 0) >= first.index


def _join(clock: Clock, other: Clock) -> None:
    for key, count in other.items():
        clock[key] = max(clock.get(key, 0), count)


def _ancestors(last: Operation) -> list[Operation]:
    """`last` and the unfinished operations that must run before it."""
    found, left = {id(last): last}, [last]
    while left:
        for need in left.pop().needs:
            if need.ended_at is None and id(need) not in found:
                found[id(need)] = need
                left.append(need)
    return list(found.values())


def _bytes(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def _move(pieces: Pieces) -> None:
    for target, source, num_bytes in pieces:
        ctypes.memmove(target, source, num_bytes)
