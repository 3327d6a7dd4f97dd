"""The disk's rate: from a file, or none."""

import os
from pathlib import Path

import pytest

from coldstream.placement import disk_rate
from coldstream.placement.disk_rate import measure_disk

PIECE = 2**16


def has_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (AttributeError, OSError):
        return False
    return True


@pytest.mark.parametrize("num_bytes", [PIECE, PIECE + 1, 100 * PIECE - 1])
def test_every_whole_piece_is_read_once_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(num_bytes))
    if not has_direct_reads(path):
        pytest.skip("no reads past the page cache here")
    monkeypatch.setattr(disk_rate, "_PASS_LIMIT_S", 60.0)
    read, preadv = [], os.preadv

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    rate = measure_disk(path, PIECE - 1000)
    assert rate is not None
    assert rate > 0
    assert sorted(read) == sorted(3 * list(range(0, num_bytes - PIECE + 1, PIECE)))


def test_where_it_cannot_be_said_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PIECE - 1))
    assert measure_disk(path, PIECE) is None
    path.write_bytes(bytes(2 * PIECE))

    def fail(*arguments: object) -> int:
        raise OSError("unaligned")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert measure_disk(path, PIECE) is None
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert measure_disk(path, PIECE) is None
