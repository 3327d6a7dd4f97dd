"""Copies of experts into the device's memory, on a stream of their own.

The copy engine alone copies from a mapping that is registered with the device, and from a pool in RAM. The
system may refuse to register a mapping, and experts may be on the disk. Then threads first read the file into
page-locked buffers, which limits the rate.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from cuda.bindings import driver

from coldstream.errors import ColdstreamError, DeviceError, ModelChangedError
from coldstream.experts.host import HostExperts
from coldstream.experts.staging import NUM_PINNED_BUFFERS, StagingCopy
from coldstream.kernels.cuda.host_memory import all_from_host
from coldstream.kernels.cuda.runtime import allocations, calls, streams

NUM_READERS = 8
READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Arrival:
    """The event behind the last copy of a group, and what its duration is measured from."""

    event: streams.Event
    begun: streams.Event | float  # event on the copies' stream, or seconds of reading the file

    @property
    def seconds(self) -> float:
        """How long the copies took; only after the event."""
        if isinstance(self.begun, float):
            return self.begun
        return float(self.event.milliseconds_since(self.begun) / 1e3)


class Transfer:
    """A transfer of `num_bytes` in flight."""

    def __init__(self, num_bytes: int, arrival: "Arrival | Future[Arrival]") -> None:
        self.num_bytes = num_bytes
        self._arrival = arrival

    @property
    def is_queued(self) -> bool:
        """Whether `wait` returns at once."""
        return not isinstance(self._arrival, Future) or self._arrival.done()

    @property
    def is_over(self) -> bool:
        """Whether the bytes are there."""
        return self.is_queued and bool(self._result().event.query())

    @property
    def seconds(self) -> float:
        """How long the transfer took; only once it `is_over`."""
        return self._result().seconds

    def seconds_after(self, other: "Transfer") -> float:
        """From the end of one that was begun before to its own end; only once both are over."""
        return float(self._result().event.milliseconds_since(other._result().event) / 1e3)

    def wait(self) -> None:
        """Makes the current stream wait for the bytes. Raises ModelChangedError, DeviceError."""
        streams.current_stream().wait_event(self._result().event)

    def finish(self) -> None:
        """Returns when the transfer writes no more, even if it failed."""
        with suppress(ColdstreamError):
            self._result().event.synchronize()

    def _result(self) -> Arrival:
        return self._arrival.result() if isinstance(self._arrival, Future) else self._arrival


class Copies(Protocol):
    """Transfers from the host to the device, in the order in which they are begun."""

    def begin(self, copies: Sequence[StagingCopy], target: int, after: streams.Event | None) -> Transfer:
        """Copies to the device address `target`, once `after` has happened."""

    def close(self) -> None:
        """Waits for all transfers."""


class DirectCopies:
    """`Copies` from registered memory."""

    def __init__(self) -> None:
        self._stream = streams.Stream()

    def begin(self, copies: Sequence[StagingCopy], target: int, after: streams.Event | None) -> Transfer:
        if after is not None:
            self._stream.wait_event(after)
        begun = _recorded(self._stream)
        try:
            copy_to_device(copies, target, self._stream)
            return Transfer(num_bytes_of(copies), Arrival(_recorded(self._stream), begun))
        except BaseException:
            with suppress(DeviceError):  # the first error is the one to tell
                self._stream.synchronize()
            raise

    def close(self) -> None:
        self._stream.synchronize()


class FileCopies:
    """`Copies` from the file, which threads read into page-locked buffers of `buffer_bytes`.

    Experts that are held in a pool are copied from there.
    """

    def __init__(self, host: HostExperts, buffer_bytes: int) -> None:
        self._host = host
        self._stream = streams.Stream()
        self._buffers = [allocations.page_locked((buffer_bytes,), "uint8") for _ in range(NUM_PINNED_BUFFERS)]
        self._free: list[streams.Event | None] = [None] * NUM_PINNED_BUFFERS
        self._count = 0
        # A thread gets the device's context with its first call to the runtime.
        self._in_order = ThreadPoolExecutor(1, initializer=calls.synchronize)
        self._readers = ThreadPoolExecutor(NUM_READERS)

    def begin(self, copies: Sequence[StagingCopy], target: int, after: streams.Event | None) -> Transfer:
        index, self._count = self._count % NUM_PINNED_BUFFERS, self._count + 1
        future = self._in_order.submit(self._bring, index, copies, target, after)
        return Transfer(num_bytes_of(copies), future)

    def _bring(
        self, index: int, copies: Sequence[StagingCopy], target: int, after: streams.Event | None
    ) -> Arrival:
        pinned, free = self._buffers[index], self._free[index]
        if free is not None:
            free.synchronize()
        begun = time.perf_counter()
        pieces = [
            (
                copy.source + begin,
                pinned[copy.offset + begin : copy.offset + min(begin + READ_BYTES, copy.size)],
            )
            for copy in copies
            if not copy.is_held
            for begin in range(0, copy.size, READ_BYTES)
        ]
        list(self._readers.map(lambda piece: read_host(self._host, *piece), pieces))
        seconds = time.perf_counter() - begun
        if after is not None:
            self._stream.wait_event(after)
        copy_to_device(copies, target, self._stream, pinned.ctypes.data)
        self._free[index] = event = _recorded(self._stream)
        return Arrival(event, seconds)

    def close(self) -> None:
        self._in_order.shutdown()
        self._readers.shutdown()
        self._stream.synchronize()


def num_bytes_of(copies: Sequence[StagingCopy]) -> int:
    return sum(copy.size for copy in copies)


def copy_to_device(
    copies: Sequence[StagingCopy],
    target: int,
    stream: streams.Stream,
    first_source: int | None = None,
) -> None:
    """Queues copies from page-locked memory, in any order, with one retry. Raises DeviceError.

    first_source: address of a host copy of the buffer, for experts that are not held; None: all are copied
    from their own sources.
    """
    if first_source is not None:
        copies = [
            each if each.is_held else each._replace(source=first_source + each.offset) for each in copies
        ]
    places = [(target + copy.offset, copy.source, copy.size) for copy in copies]
    for _ in range(2):
        status = all_from_host(places, stream)
        if status == driver.CUresult.CUDA_SUCCESS:
            return
    raise DeviceError(f"experts cannot be copied: {driver.cuGetErrorString(status)[1].decode()}")


def read_host(host: HostExperts, address: int, target: np.ndarray[Any, Any]) -> None:
    """Fills `target` from the file with the bytes mapped at `address`. Raises ModelChangedError."""
    file, shard, offset = host.locate(address)
    descriptor, view, done = file.descriptor(shard), target.data, 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ModelChangedError(f"{file.paths[shard]} cannot be read: {error}") from error
        if count == 0:
            raise ModelChangedError(f"{file.paths[shard]} shrank: load it again")
        done += count
    if host.pool is not None:
        # There is no room for the file in RAM: its pages would take that of others.
        os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)


def _recorded(stream: streams.Stream) -> streams.Event:
    event = streams.Event(has_time=True)
    event.record(stream)
    return event
