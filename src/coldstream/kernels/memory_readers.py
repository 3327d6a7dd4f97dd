"""Threads that read memory, to measure its bandwidth."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PIECE_WORDS = 2**21  # a few milliseconds for a thread


class MemoryReaders:
    """Threads that read a buffer over and over until the context ends.

    Each takes the maximum of its own share of 64-bit words, a loop that memory bounds.
    """

    def __init__(self, num_threads: int, num_bytes: int) -> None:
        import numpy as np

        words = np.ones(max(num_threads, num_bytes // 8), dtype=np.int64)
        self._counts = [0] * num_threads
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
        for thread in readers._threads:
            thread.start()
        try:
            yield readers
        finally:
            readers._stopped.set()
            for thread in readers._threads:
                thread.join()

    @property
    def num_bytes(self) -> int:
        """Bytes read so far by all threads."""
        return sum(self._counts)

    def _read(self, index: int, share: Any) -> None:
        while not self._stopped.is_set():
            for start in range(0, len(share), _PIECE_WORDS):
                piece = share[start : start + _PIECE_WORDS]
                piece.max()
                self._counts[index] += piece.nbytes
