"""Threads that read memory, to measure its bandwidth."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PIECE_WORDS = 2**21  # a few milliseconds for a thread


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

    def _read(self, index: int, share: Any) -> None:
        share.fill(1)
        with suppress(threading.BrokenBarrierError):
            self._filled.wait()
        while not self._stopped.is_set():
            for start in range(0, len(share), _PIECE_WORDS):
                piece = share[start : start + _PIECE_WORDS]
                piece.max()
                self._counts[index] += piece.nbytes
