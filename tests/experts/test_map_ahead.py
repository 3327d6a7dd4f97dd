"""A file whose pages are locked beside what else is loaded."""

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import write_gguf
from coldstream.experts import file_lock
from coldstream.experts.file_lock import FileLock
from coldstream.experts.host import HostExperts
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from coldstream.kernels.cuda.runtime import allocations
from coldstream.kernels.experts.mailbox import Mailbox

EXPERTS = "blk.0.ffn_gate_exps.weight"


class Registered(RegisteredMemory):
    """Memory that no device knows."""

    def __init__(self, address: int, closed: list[int]) -> None:
        super().__init__(address, address + 64)
        self._closed = closed

    def close(self) -> None:
        self._closed.append(self._pieces[0])


@pytest.fixture
def file(tmp_path: Path) -> GGUFFile:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return GGUFFile.open(path)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> HostExperts:
    monkeypatch.setattr(allocations, "page_locked", np.zeros)
    return HostExperts(1, Mailbox.planned(2, 256, 1), Mailbox.planned(2, 256, 1), 8)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_first_experts_wait_for_what_was_begun(
    is_ahead: bool, file: GGUFFile, experts: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the file, on another thread if it was begun, and with the same addresses either way."""
    closed: list[int] = []
    calls: list[bool] = []

    def register(address: int, num_bytes: int, **_: Any) -> RegisteredMemory:
        calls.append(threading.current_thread() is threading.main_thread())
        return Registered(address, closed)

    monkeypatch.setattr(RegisteredMemory, "register", register)
    if is_ahead:
        experts.use_lock(file, {0}, FileLock(file, {0}))
    for name in (EXPERTS, "blk.1.ffn_down_exps.weight"):
        _, address = experts.map_weight(file, file.tensors[name])
        assert experts.device_address(address, 1) == address + 64
    assert calls == [not is_ahead]
    assert experts.is_readable
    experts.close()
    assert len(closed) == 1


@pytest.mark.parametrize("is_over", [True, False], ids=["locked", "being-locked"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_what_was_begun_for_nothing_is_unlocked(
    is_taken: bool, is_over: bool, file: GGUFFile, experts: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loading has failed before anything was mapped, or where nobody reads the file.

    What is not locked yet is given up.
    """
    closed: list[int] = []
    begun, over = threading.Event(), threading.Event()

    def register(address: int, _: int, is_given_up: Callable[[], bool]) -> RegisteredMemory:
        begun.set()
        while not is_over and not is_given_up():
            pass
        over.set()
        return Registered(address, closed)

    monkeypatch.setattr(RegisteredMemory, "register", register)
    lock = FileLock(file, {0})
    if is_taken:
        experts.use_lock(file, {0}, lock)
    (over if is_over else begun).wait()
    experts.close()
    lock.close()
    assert over.is_set()
    assert len(closed) == 1


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_late_lock_that_nobody_needed_locks_nothing(
    is_taken: bool, file: GGUFFile, experts: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(RegisteredMemory, "register", lambda address, *_, **__: called.append(address))
    lock = FileLock(file, {0}, is_late=True)
    if is_taken:
        experts.use_lock(file, {0}, lock)
        assert not experts.is_locked
    experts.close()
    lock.close()
    lock.begin()
    assert not called


def test_a_late_lock_begins_once_it_is_asked_for(
    file: GGUFFile, experts: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `begin`, or by who needs the address; once in all."""
    closed: list[int] = []
    threads: list[bool] = []

    def register(address: int, *_: Any, **__: Any) -> RegisteredMemory:
        threads.append(threading.current_thread() is threading.main_thread())
        return Registered(address, closed)

    monkeypatch.setattr(RegisteredMemory, "register", register)
    for begins in (True, False):
        threads.clear()
        lock = FileLock(file, {0}, is_late=True)
        host = HostExperts(1, Mailbox.planned(2, 256, 1), Mailbox.planned(2, 256, 1), 8)
        host.use_lock(file, {0}, lock)
        _, address = host.map_weight(file, file.tensors[EXPERTS])
        assert not threads
        if begins:
            lock.begin()
            lock.begin()
        assert host.device_address(address, 1) == address + 64
        assert host.is_locked
        assert threads == [False]
        host.close()
        lock.close()
    assert len(closed) == 2


def test_an_error_is_that_of_the_first_experts(
    file: GGUFFile, experts: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def register(address: int, num_bytes: int, **_: Any) -> RegisteredMemory:
        raise RuntimeError("no driver")

    monkeypatch.setattr(RegisteredMemory, "register", register)
    experts.use_lock(file, {0}, FileLock(file, {0}))
    _, address = experts.map_weight(file, file.tensors[EXPERTS])
    with pytest.raises(RuntimeError, match="no driver"):
        experts.device_address(address, 1)
    experts.use_lock(file, {0}, FileLock(file, {0}))
    experts.close()


@pytest.mark.parametrize(
    ("more_than_ram", "is_cached", "is_read"), [(-1, False, True), (-1, True, False), (0, False, False)]
)
def test_a_file_that_is_smaller_than_ram_is_read_before_it_is_locked(
    monkeypatch: pytest.MonkeyPatch, more_than_ram: int, is_cached: bool, is_read: bool
) -> None:
    """Locking reads pages one by one; what does not fit would only push others out."""
    done: list[str] = []

    class Mapped:
        address = 4096
        size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE + more_than_ram

        def read_ahead(self, begin: int, size: int) -> None:
            assert (begin, size) == (0, self.size)
            done.append("read")

    monkeypatch.setattr(file_lock, "is_cached", lambda *_: is_cached)
    monkeypatch.setattr(RegisteredMemory, "register", lambda *_, **__: done.append("locked"))
    mapped: Any = Mapped()
    file_lock.register(0, mapped)
    assert done == ["read"] * is_read + ["locked"]


def test_a_file_that_the_system_has_in_memory_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system says so; samples are of the whole file."""
    path, offsets = tmp_path / "file", list[int]()
    path.write_bytes(bytes(1 << 20))

    def read(descriptor: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        offsets.append(offset)
        if missing is not None and offset > missing:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", read)
    with path.open("rb") as file:
        for missing in (None, 1 << 19):
            assert file_lock.is_cached(file.fileno(), 1 << 20) == (missing is None)
            assert len(set(offsets)) == len(offsets) > 1000 * (missing is None)
            assert max(offsets) > (1 << 20) * (0.9 if missing is None else 0.5)
            offsets.clear()
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert not file_lock.is_cached(0, 1 << 20)
