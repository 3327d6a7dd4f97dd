"""Threads that read memory, to measure its bandwidth."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from coldstream.kernels.best_runs import are_alike

# A few milliseconds for a thread. In shorter pieces more threads wait for the interpreter, and with them the
# one that queues copies beside them.
_PIECE_WORDS = 2**21
_WINDOW_S = 0.05
_NUM_WINDOWS = 24  # at most, over a second, as other programs come and go


class MemoryReaders:
    """Threads that read memory over and over until the context ends.

    Each takes the maximum of its own share of 64-bit words, a loop that memory bounds.
    """

    def __init__(self, num_threads: int, memory: Any) -> None:
        """memory: an array of so many bytes that eight divide them, all of which were written: the system has
        one page for all of its pages that were not.
        """
        import numpy as np

        words = memory.view(np.int64)
        self._counts = [0] * num_threads
        self._started = threading.Barrier(num_threads + 1)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(index, share))
            for index, share in enumerate(np.array_split(words, num_threads))
        ]

    @classmethod
    @contextmanager
    def running(cls, num_threads: int, memory: Any) -> "Iterator[MemoryReaders]":
        """A context with running readers."""
        readers = cls(num_threads, memory)
        started = []
        try:
            for thread in readers._threads:
                thread.start()
                started.append(thread)
            readers._started.wait()
            yield readers
        finally:
            readers._stopped.set()
            readers._started.abort()  # or some would wait for others that could not be started
            for thread in started:
                thread.join()

    @property
    def num_bytes(self) -> int:
        """Bytes read so far by all threads."""
        return sum(self._counts)

    def windows(self) -> list[float]:
        """Bytes per second that all threads read together, in each of several windows.

        There are more of them where they differ, as other programs may have slowed them all.
        """
        rates: list[float] = []
        while len(rates) < _NUM_WINDOWS and not are_alike(rates):
            before, start = self.num_bytes, time.perf_counter()
            time.sleep(_WINDOW_S)
            rates.append((self.num_bytes - before) / (time.perf_counter() - start))
        return rates

    def _read(self, index: int, share: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            self._started.wait()
        while not self._stopped.is_set():
            for start in range(0, len(share), _PIECE_WORDS):
                piece = share[start : start + _PIECE_WORDS]
                piece.max()
                self._counts[index] += piece.nbytes
