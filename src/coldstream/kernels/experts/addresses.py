"""Changes to tables of addresses between two steps: one launch, however many tables they are in."""

from pathlib import Path

import numpy as np

from coldstream.kernels.cuda.array import HostArray
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.runtime import allocations, streams

PROGRAM = CudaProgram(Path(__file__).with_name("write_addresses.cu"), ("write_addresses",))
THREADS = 256


class AddressWriter:
    """Page-locked memory for up to `capacity` changes at once, which the device reads over the bus.

    There are NUM_COPIES of it, used in turn, as a launch may still wait for its turn when the next one is
    queued.
    """

    NUM_COPIES = 2

    def __init__(self, capacity: int) -> None:
        shape = (self.NUM_COPIES, capacity, 2)
        self._copies = allocations.page_locked(shape, "int64")
        self._read: list[streams.Event | None] = [None] * self.NUM_COPIES
        self._current = 0

    def write(
        self,
        where: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        values: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    ) -> None:
        """Queues values[i] to the int64 at device address where[i], int64 [n] each.

        Waits for the launch of the call before the last one. ValueError beyond the capacity.
        """
        count, capacity = len(where), self._copies.shape[1]
        if count > capacity:
            raise ValueError(f"{count} changes at once, but at most {capacity}")
        self._current = (self._current + 1) % self.NUM_COPIES
        event = self._read[self._current]
        if event is not None:
            event.synchronize()
        entries = self._copies[self._current]
        entries[:count, 0], entries[:count, 1] = where, values
        grid = (-(-count // THREADS), 1, 1)
        PROGRAM.kernel("write_addresses").launch(grid, THREADS, (HostArray.of(entries), count))
        event = self._read[self._current] = event or streams.Event()
        event.record(streams.current_stream())
