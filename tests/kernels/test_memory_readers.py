"""Threads that read memory end with their context, whatever happens."""

import threading

import numpy as np
import pytest

from coldstream.kernels import memory_readers
from coldstream.kernels.memory_readers import MemoryReaders

MEMORY = np.ones(1 << 16, np.uint8)


def readers_alive() -> int:
    return sum(thread.name.startswith("Thread") and thread.is_alive() for thread in threading.enumerate())


def test_they_read_and_are_gone_afterwards() -> None:
    before = readers_alive()
    with MemoryReaders.running(2, MEMORY) as readers:
        assert readers_alive() == before + 2
        while readers.num_bytes < 1 << 20:
            pass
    assert readers_alive() == before
    with pytest.raises(KeyboardInterrupt), MemoryReaders.running(2, MEMORY):
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
    with pytest.raises(RuntimeError), MemoryReaders.running(2, MEMORY):
        raise AssertionError("only one was started")
    assert len(started) == 1
    assert not started[0].is_alive()
    assert readers_alive() == before


@pytest.mark.parametrize(
    ("rates", "num_windows"),
    [
        ([10.0, 9.8, 9.9, 20.0], 3),
        ([5.0, 9.8, 7.0, 10.0, 9.9, 20.0], 5),
        ([float(rate) for rate in range(1, 41)], 24),
    ],
)
def test_windows_are_read_until_several_agree(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], num_windows: int
) -> None:
    """With a clock that goes on by a second in each, in which the readers read so many bytes."""
    readers, now = MemoryReaders(1, MEMORY), [0.0]
    monkeypatch.setattr(MemoryReaders, "num_bytes", property(lambda self: sum(rates[: round(now[0])])))

    def sleep(seconds: float) -> None:
        now[0] += 1.0

    monkeypatch.setattr(memory_readers.time, "sleep", sleep)
    monkeypatch.setattr(memory_readers.time, "perf_counter", lambda: now[0])
    assert readers.windows() == pytest.approx(rates[:num_windows])
