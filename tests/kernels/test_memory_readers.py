"""Threads that read until they are stopped."""

import time

from coldstream.kernels.memory_readers import MemoryReaders


def test_readers_read_until_they_are_stopped() -> None:
    with MemoryReaders.running(2, 2**22) as readers:
        deadline = time.monotonic() + 10
        while readers.num_bytes < 2**25:
            assert time.monotonic() < deadline
    total = readers.num_bytes
    assert all(not thread.is_alive() for thread in readers._threads)
    assert readers.num_bytes == total
