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
    """Threads that read a buffer over and over until the context ends.

    Each first fills its own share of 64-bit words, as one thread would take a second for all, and then
    takes its maximum, a loop that memory bounds.
    """

    def __init__(self, num_threads: int, num_bytes: int) -> None:
        import numpy as np

        words = np.empty(max(num_threads, num_bytes // 8), dtype=np.int64)
        self._counts = [0] * num_threads
        self._filled = threading.Barrier(num_threads + 1)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(index, share))
            for index, share in enumerate(np.array_split(words, num_threads))
        ]

    @classmethod
    @contextmanager
    def running(cls, num_threads: int, num_bytes: int) -> "Iterator[MemoryReaders]":
        """A context with running readers."""
        readers = cls(num_threads, num_bytes)
        started = []
        try:
            for thread in readers._threads:
                thread.start()
                started.append(thread)
            readers._filled.wait()
            yield readers
        finally:
            readers._stopped.set()
            readers._filled.abort()  # or some would wait for others that could not be started
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
        share.fill(1)
        with suppress(threading.BrokenBarrierError):
            self._filled.wait()
        while not self._stopped.is_set():
            for start in range(0, len(share), _PIECE_WORDS):
                piece = share[start : start + _PIECE_WORDS]
                piece.max()
                self._counts[index] += piece.nbytes
