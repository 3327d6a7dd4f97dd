"""Threads that read memory end with their context, whatever happens."""

import threading

import pytest

from coldstream.kernels.memory_readers import MemoryReaders


def readers_alive() -> int:
    return sum(thread.name.startswith("Thread") and thread.is_alive() for thread in threading.enumerate())


def test_they_read_and_are_gone_afterwards() -> None:
    before = readers_alive()
    with MemoryReaders.running(2, 1 << 16) as readers:
        assert readers_alive() == before + 2
        while readers.num_bytes < 1 << 20:
            pass
    assert readers_alive() == before
    with pytest.raises(KeyboardInterrupt), MemoryReaders.running(2, 1 << 16):
        raise KeyboardInterrupt
    assert readers_alive() == before


@pytest.mark.timeout(60)
def test_those_that_were_started_do_not_wait_for_one_that_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, start, started = readers_alive(), threading.Thread.start, []

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError), MemoryReaders.running(2, 1 << 16):
        raise AssertionError("only one was started")
    assert len(started) == 1
    assert not started[0].is_alive()
    assert readers_alive() == before
